"""Tensors over TCP with gloo: always there, on any number of hosts, never the fastest."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import AllreduceOptions, BarrierOptions, BroadcastOptions
from torch.distributed.distributed_c10d import AllgatherOptions

from communicator.backends.tagged_p2p import TaggedP2PBackend, as_bytes
from communicator.calls import call_check
from communicator.calls.dtypes import OPS, keeps_nan
from communicator.errors import DrumlineError
from coordinator import Coordinator, CoordinatorError, torch_private
from launcher import linux

REDUCED = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.uint8, torch.int32, torch.int64,
}  # fmt: skip


class Gloo(TaggedP2PBackend):
    """gloo on a process group of its own; what it cannot reduce is reduced here, by rank.

    Every collective is compared among the ranks before it starts, the first ones by their
    descriptions and the others by a digest: where sizes differ, gloo ends the process.
    """

    name = "gloo"
    _gloo: Any = None  # until it is open

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        return 10

    def open(self) -> None:
        super().open()
        if self.world_size == 1:
            return
        store = self.coor.store("gloo communicator")
        with _sockets_closed_on_exec():
            self._gloo = torch_private.gloo_group(
                store, self.rank, self.world_size, self.coor.address, self._timeout
            )
        # A rank that closes while two others still connect to each other ends that for both.
        self.coor.barrier(timeout_s=self.timeout_s)

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

    def close(self) -> None:
        if self._gloo is not None:
            self._gloo.shutdown()
            self._gloo = None

    def compare_call(
        self, call: str, tensor: torch.Tensor | None = None, details: str = ""
    ) -> None:
        if self.world_size == 1 or self._num_compared < self.capabilities.checked_calls:
            return super().compare_call(call, tensor, details)
        self._num_compared += 1
        description = call_check.describe_call(call, tensor, details)
        digest = zlib.crc32(description.encode())
        # The largest digest and the smallest, which costs less than to gather all.
        extremes = torch.tensor([digest, -digest])
        self.allreduce(extremes, extremes, "max")
        if extremes.sum().item() != 0:
            call_check.compare(self, self._num_compared, description)

    def start_bytes(self, kind: str, data: torch.Tensor, peer: int, tag: int) -> Any:
        call = f"{kind} {'to' if kind == 'send' else 'from'} {self.rank_name(peer)}"
        with self._translated_errors(call):
            return (self._gloo.send if kind == "send" else self._gloo.recv)([data], peer, tag)

    def wait_for(self, call: str, work: Any) -> None:
        with self._translated_errors(call):
            work.wait(self._timeout)

    def barrier(self) -> None:
        options = self._limited(BarrierOptions())
        with self._translated_errors("barrier"):
            self._gloo.barrier(options).wait(self._timeout)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        options = self._limited(BroadcastOptions())
        options.rootRank = src
        with self._translated_errors("broadcast"):
            self._gloo.broadcast([as_bytes(tensor)], options).wait(self._timeout)

    def allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        if tensor.dtype not in REDUCED or not keeps_nan(tensor.dtype, op):
            return super().allreduce(out, tensor, op)
        if out is not tensor:
            out.copy_(tensor)
        options = self._limited(AllreduceOptions())
        options.reduceOp = OPS["sum" if op == "avg" else op].torch
        with self._translated_errors("allreduce"):
            self._gloo.allreduce([out], options).wait(self._timeout)
        if op == "avg":
            out.div_(self.world_size)

    def allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        options = self._limited(AllgatherOptions())
        with self._translated_errors("allgather"):
            data = as_bytes(out), as_bytes(tensor)
            torch_private.gloo_allgather(self._gloo, *data, options).wait(self._timeout)

    def _limited(self, options: Any) -> Any:
        """The options of a call, with its deadline: the group has that of open()."""
        options.timeout = self._timeout
        return options

    @contextmanager
    def _translated_errors(self, call: str) -> Iterator[None]:
        """Turn what gloo raises inside into an error that names the call and the lost peers."""
        start = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise self._translate(call, time.monotonic() - start, error) from error

    def _translate(self, call: str, waited_s: float, error: RuntimeError) -> DrumlineError:
        text = str(error)
        timed_out = "timed out" in text.lower()
        lost = self._lost_peers() if timed_out else self._await_lost_peers()
        details = f" ({text}){self._diagnosis() if timed_out else ''}"
        return self.wait_error(call, waited_s, timed_out, lost, details)

    def _diagnosis(self) -> str:
        """The Coordinator's report of where the ranks are, for an error."""
        try:
            return f" The ranks are:\n{self.coor.diagnose(stacks_too=False)}"
        except CoordinatorError as error:  # it was closed first, or its rank 0 exited
            return f" Where the ranks are is not known: {error}"


@contextmanager
def _sockets_closed_on_exec() -> Iterator[None]:
    """Mark the sockets made within, which gloo does not: no program that a rank runs keeps them."""
    before = _sockets()
    yield
    for link, fd in _sockets().items():
        if link not in before:
            with suppress(OSError):  # another thread has closed it meanwhile
                os.set_inheritable(fd, False)


def _sockets() -> dict[str, int]:
    """The sockets of this process: the number of each, by a link that no other has."""
    links = {linux.link_of_fd(fd): int(fd) for fd in linux.open_fds()}
    return {link: fd for link, fd in links.items() if link.startswith("socket:")}
