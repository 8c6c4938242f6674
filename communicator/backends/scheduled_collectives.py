"""Collectives over a network that runs programs, for all ranks of a communicator or some of them.

A program is copies, messages by rounds and reductions (csrc/tcp/programs.cpp). Every sum is taken
in order of rank, by whoever takes it, so all ranks have the bits of the shared-memory backend.
"""

from __future__ import annotations

import itertools
import struct
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch

from communicator.backend import Backend
from communicator.backends._tcp import exchange, program
from communicator.calls import call_check
from communicator.calls.default_collectives import CollectivesFromP2P

STEP = struct.Struct("iiiiQQQ")  # tcp::Step of csrc/tcp/engine.h
COPY, SEND, RECV, ROUND, REDUCE, SETTLE = range(6)
StepProgram = tuple[bytes, int]
"""Packed steps, and the bytes of SCRATCH."""

Slice = tuple[int, int]
NOTHING: Slice = (1, 0)
"""Of exchange(): no message, where (0, 0) is one without elements."""


class Buffer(IntEnum):
    """A flat tensor: that of the call, its result, and room for rows of the ranks."""

    TENSOR = 0
    OUT = 1
    SCRATCH = 2


class ComparedByMessages(Backend):
    """A backend whose first calls are compared before anything moves, and later ones by their
    messages, which name the call."""

    def name_call(self, call: str) -> None:
        """Have the messages that follow name the call so."""
        raise NotImplementedError

    def compare_call(
        self, call: str, tensor: torch.Tensor | None = None, details: str = ""
    ) -> None:
        self.name_call("comparison")
        super().compare_call(call, tensor, details)
        self.name_call(call_check.describe_call(call, tensor, details))

    def decline(self, why: str) -> None:
        if self._num_compared < self.capabilities.checked_calls:
            return super().decline(why)
        self.name_call(call_check.DECLINED)  # without why: the same on all that decline
        self.barrier()


class ScheduledCollectives(CollectivesFromP2P):
    """The collectives as programs."""

    peers = b""  # the number of each rank in the network, as C has it

    def run_program(
        self, program: StepProgram, tensor: torch.Tensor, out: torch.Tensor, op: str = ""
    ) -> None:
        """Run a program on TENSOR and OUT; its reductions by op, over as many ranks as it has."""
        raise NotImplementedError

    def _run(
        self, name: str, tensor: torch.Tensor, out: torch.Tensor, op: str = "", root: int = 0
    ) -> None:
        sizes = tensor.numel(), tensor.itemsize
        self.run_program(program(name, self.rank, self.peers, *sizes, root), tensor, out, op)

    def barrier(self) -> None:
        empty = torch.empty(0, dtype=torch.uint8)
        self._run("allgather", empty, empty)

    def allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        self._run("allreduce", tensor, out, op)

    def reduce(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, op: str) -> None:
        self._run("reduce", tensor, tensor if out is None else out, op, dst)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        self._run("reduce_scatter", tensor, out, op)

    def allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._run("allgather", tensor, out)

    def alltoall(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._run("alltoall", tensor, out)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self._run("broadcast", tensor, tensor, root=src)


class SubgroupCollectives(ScheduledCollectives):
    """The collectives of some ranks over the network of all.

    network: a backend that runs programs. ranks: of it, this one among them; here each is known by
    its place.
    """

    def __init__(self, network: Any, ranks: Sequence[int]) -> None:
        self._network, self.peers = network, packed(ranks)
        self.rank, self.world_size = ranks.index(network.rank), len(ranks)

    def run_program(
        self, program: StepProgram, tensor: torch.Tensor, out: torch.Tensor, op: str = ""
    ) -> None:
        self._network.run_program(program, tensor, out, op)

    def exchange(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor,
        sends: Sequence[Slice],
        recvs: Sequence[Slice],
        source: Buffer = Buffer.TENSOR,
    ) -> None:
        """Send tensor[sends[r]], or of OUT, to each other rank r; receive out[recvs[r]] from it."""
        out_of, into = (array("q", itertools.chain(*each)).tobytes() for each in (sends, recvs))
        made = exchange(self.rank, self.peers, tensor.itemsize, out_of, into, source, Buffer.OUT)
        self.run_program(made, tensor, out)


def packed(ranks: Sequence[int]) -> bytes:
    """Numbers of ranks as C has them."""
    return array("i", ranks).tobytes()


def row(numel: int, rank: int) -> Slice:
    """The elements of a rank's row, where each row has `numel`."""
    return numel * rank, numel * (rank + 1)


def parts(numel: int, count: int) -> list[Slice]:
    """`numel` elements in `count` parts that differ by at most one, in order."""
    return list(itertools.pairwise(numel * k // count for k in range(count + 1)))
