"""Compares the first calls of a communicator whose library does not compare them by itself.

Over the Coordinator, before anything is enqueued: what a device has begun to do wrong cannot be
called back. It costs a few messages to rank 0 for each call, and each waits for the slowest rank.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from communicator import call_check
from communicator.base import Communicator
from communicator.errors import CommunicatorError, CommunicatorTimeout
from coordinator import CoordinatorError, CoordinatorTimeout, PeerLost

if TYPE_CHECKING:
    from communicator.backends.plugin import Native

SLICE_S = 1.0  # of a wait, between two looks at whether the others live

HOW = {
    "allreduce": "{op}",
    "broadcast": "from rank {src}",
    "reduce": "{op}, to rank {dst}",
    "allgather": "",
    "reduce_scatter": "{op}",
    "alltoall": "",
    "barrier": "",
}
SIGNATURES = {name: inspect.signature(getattr(Communicator, name)) for name in HOW}
OUT_SHAPE: dict[str, Callable[[int, Any], tuple[int, ...]]] = {
    "allreduce": lambda world_size, shape: tuple(shape),
    "allgather": lambda world_size, shape: (world_size, *shape),
    "reduce_scatter": lambda world_size, shape: tuple(shape[1:]),
    "alltoall": lambda world_size, shape: tuple(shape),
}


class FirstCalls:
    """Stands before the collectives of comm until count of them have been compared."""

    def __init__(self, comm: Native, count: int) -> None:
        self._comm, self._count, self._number = comm, count, 0
        self._captured_after = -1  # after how many compared calls this rank last captured one
        self._store = comm.coor.store("first calls", timeout_s=SLICE_S)
        self._kept = {name: comm.__dict__.get(name) for name in HOW}
        for name in HOW:
            comm.__dict__[name] = self._comparing(name, getattr(comm, name))

    def _comparing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def compared(*values: Any, **options: Any) -> Any:
            if self._number < self._count:
                if self._comm._is_capturing():
                    self._note_capture()
                else:
                    self._compare(self._describe(name, values, options))
            return method(*values, **options)

        return compared

    def _note_capture(self) -> None:
        """Leave word for ranks that compare a call at this place, and would wait for this one."""
        if self._captured_after == self._number:
            return
        self._captured_after = self._number
        with suppress(CoordinatorError):  # a capture is no place to learn of it
            self._store.set(f"captured/{self._comm.rank}", str(self._number))

    def step_aside(self) -> None:
        """Give the methods back as they were."""
        for name, method in self._kept.items():
            self._comm.__dict__.pop(name, None)
            if method is not None:
                self._comm.__dict__[name] = method
        self._kept = {}

    def _describe(self, name: str, values: tuple[Any, ...], options: dict[str, Any]) -> str:
        """The call in words. Raises if its tensors cannot be right, whatever the others do."""
        bound = SIGNATURES[name].bind(self._comm, *values, **options)
        bound.apply_defaults()
        given = bound.arguments
        words = [name]
        if "tensor" in given:
            self._check(name, given["tensor"], given.get("out"))
            words.append(f"of {call_check.describe(given['tensor'])}")
        if not isinstance(given.get("op", ""), str):
            given["op"] = "scaled sum"
        return " ".join(filter(None, (*words, HOW[name].format(**given))))

    def _check(self, name: str, tensor: torch.Tensor, out: torch.Tensor | None) -> None:
        self._comm._check(name, tensor)
        if out is not None:
            shape = OUT_SHAPE[name](self._comm.world_size, tensor.shape)
            self._comm._check_out(name, out, shape, tensor)

    def _compare(self, mine: str) -> None:
        self._number += 1
        call = f"call {self._number}, {mine}"
        try:
            said = self._await(mine[: call_check.NBYTES], call)
        except PeerLost as error:
            raise PeerLost(f"{error} (It was comparing {call}, with theirs.)") from error
        number = self._number
        if number == self._count:
            self.step_aside()
        call_check.judge(self._comm, number, said)

    def _await(self, mine: str, call: str) -> list[str]:
        """What every rank says it calls."""
        deadline = time.monotonic() + self._comm.timeout_s
        while True:
            self._comm._raise_if_lost(call)
            try:
                return self._exchange(mine)
            except CoordinatorTimeout as error:
                self._raise_if_captured(call)
                if time.monotonic() > deadline:
                    raise self._late(call) from error

    def _raise_if_captured(self, call: str) -> None:
        """Raise if a rank that is waited for has captured a call where this one has not."""
        before = self._number - 1
        if self._captured_after == before:
            return  # they may still be at it
        with suppress(CoordinatorTimeout):  # rank 0 may be busy: the wait goes on
            ranks = range(self._comm.world_size)
            names = [f"captured/{rank}" for rank in ranks]
            marks = [self._store.get(name) if self._store.check([name]) else b"" for name in names]
            if found := [rank for rank in ranks if marks[rank] == str(before).encode()]:
                self._store.set(self._key(self._comm.rank), f"{call}, outside of any capture")
                who = ", ".join(str(self._comm.coor.peers[rank]) for rank in found)
                raise CommunicatorError(
                    f"rank {self._comm.rank}: {call}, is made outside of any capture, and {who} "
                    "captured a call in a CUDA graph instead. Nothing was enqueued here. All ranks "
                    "capture, or none: let them make the same calls in the same order."
                )

    def _exchange(self, mine: str) -> list[str]:
        """One try, which may be made again. Who has read all of a call has left the one before."""
        self._store.set(self._key(self._comm.rank), mine)
        said = self._store.multi_get([self._key(rank) for rank in range(self._comm.world_size)])
        if self._number > 1:
            self._store.delete_key(self._key(self._comm.rank, before=1))
        return [text.decode(errors="replace") for text in said]

    def _key(self, rank: int, before: int = 0) -> str:
        return f"{self._number - before}/{rank}"

    def _late(self, call: str) -> CommunicatorTimeout:
        with suppress(CoordinatorTimeout):  # rank 0 may be stopped, and cannot tell then
            peers = enumerate(self._comm.coor.peers)
            late = [str(peer) for rank, peer in peers if not self._store.check([self._key(rank)])]
            call = f"{call}, with {', '.join(late)}, who made no call" if late else call
        return CommunicatorTimeout(
            f"rank {self._comm.rank} waited {self._comm.timeout_s:g} s to compare {call}. Nothing "
            "was enqueued. Let every rank make the same calls in the same order, or give "
            "checked_calls=0 to compare none."
        )
