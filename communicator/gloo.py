"""Tensors over TCP with gloo: always there, on any number of hosts, never the fastest."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import AllreduceOptions, BarrierOptions, ProcessGroupGloo, ReduceOp

from communicator.base import Communicator
from communicator.errors import CommunicatorError, CommunicatorTimeout, PeerLost
from coordinator import Coordinator

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


class Gloo(Communicator):
    """gloo on a process group of its own; what it cannot reduce is reduced here, by rank."""

    name = "gloo"

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        return 10

    def _open(self) -> None:
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

    def _send(self, tensor: torch.Tensor, dst: int) -> None:
        with self._naming(f"send to rank {dst}"):
            self._gloo.send([_bytes(tensor)], dst, 0).wait(self._limit)

    def _recv(self, tensor: torch.Tensor, src: int) -> None:
        with self._naming(f"recv from rank {src}"):
            self._gloo.recv([_bytes(tensor)], src, 0).wait(self._limit)

    def _exchange(self, calls: list[tuple[str, torch.Tensor, int]]) -> None:
        self._finish(self._begin(calls))

    def _begin(self, calls: list[tuple[str, torch.Tensor, int]]) -> list[Any]:
        """Start sends and receives, which go on by themselves until _finish waits for them."""
        with self._naming("group"):
            return [self._start(*call) for call in calls]

    def _finish(self, begun: list[Any]) -> None:
        with self._naming("group"):
            for work in begun:
                work.wait(self._limit)

    def _start(self, kind: str, tensor: torch.Tensor, peer: int) -> Any:
        start = self._gloo.send if kind == "send" else self._gloo.recv
        return start([_bytes(tensor)], peer, 0)

    def _barrier(self) -> None:
        options = BarrierOptions()
        options.timeout = self._limit
        with self._naming("barrier"):
            self._gloo.barrier(options).wait(self._limit)

    def _broadcast(self, tensor: torch.Tensor, src: int) -> None:
        with self._naming("broadcast"):
            self._gloo.broadcast(_bytes(tensor), src).wait(self._limit)

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
        rows, mine = _bytes(out), _bytes(tensor)
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

    def _failure(self, call: str, waited_s: float, error: RuntimeError) -> CommunicatorError:
        text = str(error)
        timed_out = "timed out" in text.lower()
        kind = CommunicatorTimeout if timed_out else PeerLost
        return kind(
            f"rank {self.rank} waited {waited_s:.1f} s in {call} (gloo, {self.world_size} ranks)."
            f"{self._lost_peers()} Are all ranks in the same call, and alive? ({text})"
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of tensor as bytes, so that every dtype can be moved."""
    return tensor.reshape(-1).view(torch.uint8)
