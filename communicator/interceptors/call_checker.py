"""Compares the first calls of the ranks before a library that does not compare calls itself."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from communicator import timings
from communicator.backend import Backend
from communicator.calls.call_check import DECLINED, NBYTES, check_identical, describe_call
from communicator.calls.checked_calls import CheckedCalls
from communicator.calls.dtypes import op_name
from communicator.errors import CommunicatorError, CommunicatorTimeout, PeerLost, with_text
from communicator.interceptors.interceptor import Call, Interceptor, Order
from coordinator import CoordinatorError, CoordinatorTimeout

DETAILS = {
    "allreduce": "{op}",
    "broadcast": "from rank {src}",
    "reduce": "{op}, to rank {dst}",
    "allgather": "",
    "reduce_scatter": "{op}",
    "alltoall": "",
    "barrier": "",
}
OUT_SHAPE: dict[str, Callable[[int, Any], tuple[int, ...]]] = {
    "allreduce": lambda world_size, shape: tuple(shape),
    "allgather": lambda world_size, shape: (world_size, *shape),
    "reduce_scatter": lambda world_size, shape: tuple(shape[1:]),
    "alltoall": lambda world_size, shape: tuple(shape),
}


class CallChecker(Interceptor):
    """Stands before the collectives until count of them have been compared.

    Compares over the Coordinator's store, before anything is enqueued: what a device has begun to
    do wrong cannot be called back. It costs a few messages to rank 0 for each call, and each waits
    for the slowest rank. A call inside a CUDA graph capture is not compared. Collective to make.
    """

    order, names = Order.COMPARE, DETAILS

    def __init__(self, backend: Backend, count: int) -> None:
        self._backend, self._count, self._number = backend, count, 0
        self._captured_after = -1  # after how many compared calls this rank last captured one
        poll_s = timings.TIMINGS.call_check_poll_s
        self._store = backend.coor.store("first calls", timeout_s=poll_s)
        self._signatures = {
            name: inspect.signature(getattr(CheckedCalls, name)) for name in DETAILS
        }

    def around(self, name: str, call: Call) -> Call:
        @functools.wraps(call)
        def compared(*args: Any, **kwargs: Any) -> Any:
            is_joined = kwargs.get("dim") is not None or kwargs.get("sizes") is not None
            if self._number < self._count and not is_joined:  # those are made of others
                self._backend.check_open(name)
                self._compare(lambda: self._describe(name, args, kwargs))
            return call(*args, **kwargs)

        return compared

    def compare_first(self, description: str) -> None:
        """Raise CommunicatorError unless all describe the same call, if it is a first one."""
        if self._number < self._count:
            self._compare(lambda: description)

    def decline(self, why: str) -> None:
        """Compare, in place of a call, that this rank makes none. Raises unless no rank does."""
        self.compare_first(f"{DECLINED} {why}")

    def _announce_capture(self) -> None:
        """Write down this capture for ranks that compare a call instead, and would wait for it."""
        if self._captured_after == self._number:
            return
        self._captured_after = self._number
        with suppress(CoordinatorError):  # the next call outside of the capture raises it
            self._store.set(f"captured/{self._backend.rank}", str(self._number))

    def _describe(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The call in words. Raises if its tensors cannot be right, whatever the others do."""
        own = {key: value for key, value in kwargs.items() if key not in ("dim", "sizes")}
        bound = self._signatures[name].bind(None, *args, **own)
        bound.apply_defaults()
        arguments = bound.arguments
        tensor = arguments.get("tensor")
        if "tensor" in arguments:
            self._check_tensors(name, arguments["tensor"], arguments.get("out"))
        op = arguments.get("op", "")
        if not isinstance(op, str):  # of NCCL's scaled sums an op is a number
            arguments["op"] = "scaled sum" if type(op) is int else op_name(op)
        return describe_call(name, tensor, DETAILS[name].format(**arguments))

    def _check_tensors(self, name: str, tensor: torch.Tensor, out: torch.Tensor | None) -> None:
        self._backend.check_tensor(name, tensor)
        if out is not None:
            shape = OUT_SHAPE[name](self._backend.world_size, tensor.shape)
            self._backend.check_out(name, out, shape, tensor)

    def _compare(self, describe: Callable[[], str]) -> None:
        if self._backend.is_capturing():
            return self._announce_capture()
        description = describe()
        self._number += 1
        number, call = self._number, f"call {self._number}, {description}"
        try:
            calls = self._gather(description[:NBYTES], call)
        except PeerLost as error:
            text = f"{error} (This was the comparison of {call}, among the ranks.)"
            raise with_text(error, text) from error
        if number == self._count:
            self.remove()
        check_identical(self._backend, f"call {number}", calls)

    def _gather(self, description: str, call: str) -> list[str]:
        """Every rank's description of its call. Waits for the slowest rank, until the deadline."""
        deadline = time.monotonic() + self._backend.timeout_s
        while True:
            try:
                return self._try_gather(description)
            except CoordinatorTimeout as error:
                self._backend.check_peers(call)
                self._raise_if_captured(call)
                if time.monotonic() > deadline:
                    raise self._late(call) from error

    def _try_gather(self, description: str) -> list[str]:
        """One attempt, which may be repeated.

        A rank that has read every key of a call has left the call before it, so its own key of
        that one can be deleted.
        """
        self._store.set(self._key(self._backend.rank), description)
        keys = [self._key(rank) for rank in range(self._backend.world_size)]
        calls = self._store.multi_get(keys)
        if self._number > 1:
            self._store.delete_key(self._key(self._backend.rank, before=1))
        return [call.decode(errors="replace") for call in calls]

    def _raise_if_captured(self, call: str) -> None:
        """Raise if a rank that is waited for has captured a call where this one has not."""
        before = self._number - 1
        if self._captured_after == before:
            return  # the others may still be capturing
        with suppress(CoordinatorTimeout):  # rank 0 may be busy: the wait goes on
            ranks = self._capturing_ranks(before)
            if ranks:
                self._store.set(self._key(self._backend.rank), f"{call}, outside of any capture")
                peers = ", ".join(str(self._backend.coor.peers[rank]) for rank in ranks)
                raise CommunicatorError(
                    f"{self._backend.rank_name()}: {call}, is made outside of any capture, and "
                    f"{peers} captured a call in a CUDA graph instead. Nothing was enqueued "
                    "here. All ranks capture, or none: let them make the same calls in the same "
                    "order."
                )

    def _capturing_ranks(self, number: int) -> list[int]:
        """The ranks that have captured a call after `number` compared ones."""
        names = [f"captured/{rank}" for rank in range(self._backend.world_size)]
        marks = [self._store.get(name) if self._store.check([name]) else b"" for name in names]
        return [rank for rank, mark in enumerate(marks) if mark == str(number).encode()]

    def _key(self, rank: int, before: int = 0) -> str:
        return f"{self._number - before}/{rank}"

    def _late(self, call: str) -> CommunicatorTimeout:
        with suppress(CoordinatorTimeout):  # rank 0 may be suspended, and cannot answer then
            peers = enumerate(self._backend.coor.peers)
            late = [str(peer) for rank, peer in peers if not self._store.check([self._key(rank)])]
            call = f"{call}, with {', '.join(late)}, who made no call" if late else call
        return CommunicatorTimeout(
            f"{self._backend.rank_name()} timed out after {self._backend.timeout_s:g} s of "
            f"comparing {call}. Nothing was enqueued. Let every rank make the same calls in the "
            "same order, or give checked_calls=0 to compare none."
        )
