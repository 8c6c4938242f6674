"""Tensors over TCP with gloo: always there, on any number of hosts, never the fastest."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import AllreduceOptions, BarrierOptions, ProcessGroupGloo, ReduceOp

from communicator import call_check
from communicator.backends.tagged_p2p import Network, as_bytes
from communicator.errors import CommunicatorTimeout, DrumlineError, PeerLost
from coordinator import Coordinator, CoordinatorError

GRACE_S = 0.5  # its sockets close a little before a process that dies is seen dead
POLL_S = 0.005
REDUCES = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
}
OPS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.SUM,
    "prod": ReduceOp.PRODUCT,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
}


class Gloo(Network):
    """gloo on a process group of its own; what it cannot reduce is reduced here, by rank.

    Every collective is compared among the ranks before it starts, the first ones by their words and
    the others by a digest: where sizes differ, gloo ends the process.
    """

    name = "gloo"

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        return 10

    def _open(self) -> None:
        super()._open()
        self._gloo: Any = None
        self._limit = timedelta(seconds=self.timeout_s)
        if self.world_size == 1:
            return
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=self.coor.address)]
        options._threads = 1
        options._timeout = self._limit
        store = self.coor.store("gloo communicator")
        self._gloo = ProcessGroupGloo(store, self.rank, self.world_size, options)

    def _close(self) -> None:
        if self._gloo is not None:
            self._gloo.shutdown()
            self._gloo = None

    def _compare(self, call: str, tensor: torch.Tensor | None = None, how: str = "") -> None:
        if self.world_size == 1 or self._calls < self._checked_calls:
            return super()._compare(call, tensor, how)
        self._calls += 1
        what = "" if tensor is None else f"of {call_check.describe(tensor)}"
        mine = " ".join(filter(None, (call, what, how)))
        digest = zlib.crc32(mine.encode())
        ends = torch.tensor([digest, -digest])
        self._allreduce(ends, ends, "max")  # which costs less than to gather them
        if ends.sum().item() != 0:
            call_check.compare(self, self._calls, mine)

    def _launch(self, kind: str, data: torch.Tensor, peer: int, tag: int) -> Any:
        with self._naming(f"{kind} with rank {peer}"):
            return (self._gloo.send if kind == "send" else self._gloo.recv)([data], peer, tag)

    def _await(self, call: str, work: Any) -> None:
        with self._naming(call):
            work.wait(self._limit)

    def _barrier(self) -> None:
        options = BarrierOptions()
        options.timeout = self._limit
        with self._naming("barrier"):
            self._gloo.barrier(options).wait(self._limit)

    def _broadcast(self, tensor: torch.Tensor, src: int) -> None:
        with self._naming("broadcast"):
            self._gloo.broadcast(as_bytes(tensor), src).wait(self._limit)

    def _allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        if tensor.dtype not in REDUCES:
            return super()._allreduce(out, tensor, op)
        if out is not tensor:
            out.copy_(tensor)
        options = AllreduceOptions()
        options.reduceOp = OPS[op]  # type: ignore[assignment]
        options.timeout = self._limit
        with self._naming("allreduce"):
            self._gloo.allreduce([out], options).wait(self._limit)
        if op == "avg":
            out.div_(self.world_size)

    def _allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        rows, mine = as_bytes(out), as_bytes(tensor)
        with self._naming("allgather"):
            self._gloo._allgather_base(rows, mine).wait(self._limit)

    @contextmanager
    def _naming(self, call: str) -> Iterator[None]:
        """What gloo raises inside becomes an error that names the call and who is gone."""
        begun = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise self._failure(call, time.monotonic() - begun, error) from error

    def _failure(self, call: str, waited_s: float, error: RuntimeError) -> DrumlineError:
        text = str(error)
        timed_out = "timed out" in text.lower()
        lost = self._lost_peers() if timed_out else self._lost_peers_soon()
        kind = CommunicatorTimeout if timed_out else PeerLost
        return kind(
            f"rank {self.rank} waited {waited_s:.1f} s in {call} (gloo, {self.world_size} ranks)."
            f"{lost} Are all ranks in the same call, with tensors of the same "
            f"size, and alive? ({text}){self._whereabouts() if timed_out else ''}"
        )

    def _whereabouts(self) -> str:
        """What the Coordinator knows of the ranks, dead, stopped or elsewhere, for an error."""
        diagnose = getattr(self.coor, "diagnose", None)  # who met in a Store cannot ask
        if diagnose is None:
            return ""
        try:
            return f" The ranks are:\n{diagnose(stacks_too=False)}"
        except CoordinatorError as error:  # it was closed first, or its rank 0 is gone
            return f" Where the ranks are is not known: {error}"

    def _lost_peers_soon(self) -> str:
        until = time.monotonic() + GRACE_S
        while not (lost := self._lost_peers()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return lost
