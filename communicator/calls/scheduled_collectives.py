"""Collectives over a network that runs programs, for all ranks of a communicator or some of them.

Every sum is taken in order of rank, by whoever takes it, so all ranks have the bits of the
shared-memory backend.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from communicator.calls import programs
from communicator.calls.async_work import AsyncWork
from communicator.calls.default_collectives import CollectivesFromP2P
from communicator.calls.programs import Buffer, CollectiveProgram, Copy, Transfers
from communicator.calls.schedules import Schedule, is_gathered, is_rotated, rotations

MAX_KEPT_PROGRAMS = 256
MAX_KEPT_MESSAGES = 1 << 18  # of all programs: one takes 60 bytes over tcp, 200 elsewhere


class Network(Protocol):
    """A backend that reaches all ranks, and runs programs.

    collective: the call in progress, in words.
    """

    rank: int
    collective: str

    def compile_program(self, program: CollectiveProgram, itemsize: int) -> Any:
        """The program in the form that run_compiled takes."""
        ...

    def run_compiled(
        self, compiled: Any, tensor: torch.Tensor, out: torch.Tensor, op: str = ""
    ) -> None:
        """Run a program on TENSOR and OUT; its reductions by op, over as many ranks as it has."""
        ...


class ProgramRunner(CollectivesFromP2P):
    """Programs on a network that runs one schedule after another, each kind compiled once."""

    _programs: dict[tuple[Any, ...], Any] | None = None  # compiled
    _num_messages = 0  # of them

    def run_schedule(self, schedule: Schedule, source: torch.Tensor, target: torch.Tensor) -> None:
        """Run the rounds, which send from source and receive into target, both flat."""
        raise NotImplementedError

    def submit(self, call: Callable[[], object]) -> AsyncWork:
        """Start a call that moves tensors on this network; some only return when it has ended."""
        return AsyncWork([]).run(call)

    def compiled(self, build: Callable[..., CollectiveProgram], *key: Hashable) -> Any:
        """The compiled program of such a call that has been made before; None without one."""
        return None if self._programs is None else self._programs.get((build, *key))

    def run_program(
        self,
        build: Callable[..., CollectiveProgram],
        tensor: torch.Tensor,
        out: torch.Tensor,
        op: str = "",
        *key: Hashable,
    ) -> None:
        """Run build(rank, world_size, numel and itemsize of tensor, *key); compiled once."""
        numel, itemsize = tensor.numel(), tensor.itemsize
        compiled = self.compiled(build, numel, itemsize, *key)
        if compiled is None:
            program = build(self.rank, self.world_size, numel, itemsize, *key)
            compiled = self.compile_program(program, itemsize)
            self._keep((build, numel, itemsize, *key), compiled, program.num_messages)
        self.run_compiled(compiled, tensor, out, op)

    def _keep(self, key: tuple[Any, ...], compiled: Any, num_messages: int) -> None:
        self._num_messages += num_messages
        is_full = self._programs is not None and len(self._programs) == MAX_KEPT_PROGRAMS
        if self._programs is None or is_full or self._num_messages > MAX_KEPT_MESSAGES:
            self._programs, self._num_messages = {}, num_messages
        self._programs[key] = compiled

    def compile_program(self, program: CollectiveProgram, itemsize: int) -> Any:
        return program

    def run_compiled(
        self, compiled: Any, tensor: torch.Tensor, out: torch.Tensor, op: str = ""
    ) -> None:
        scratch = tensor.new_empty(compiled.scratch_numel)
        buffers = (tensor.view(-1), out.view(-1), scratch)
        for step in compiled.steps:
            if isinstance(step, Copy):
                numel = step.end - step.begin
                piece = buffers[step.source][step.begin : step.end]
                buffers[step.target][step.to : step.to + numel] = piece
            elif isinstance(step, Transfers):
                self.run_schedule(step.schedule, buffers[step.source], buffers[step.target])
            else:
                end = step.begin + step.num_rows * step.numel
                rows = scratch[step.begin : end].view(step.num_rows, step.numel)
                total = self.reduce_parts(rows.roll(-step.first, 0), op)
                buffers[step.target][step.to : step.to + step.numel] = total


class ScheduledCollectives(ProgramRunner):
    """The collectives as programs."""

    def barrier(self) -> None:
        empty = torch.empty(0, dtype=torch.uint8)
        self.run_program(programs.allgather, empty, empty)

    def allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        nbytes = tensor.nbytes
        if is_rotated(self.world_size, nbytes) and not is_gathered(self.world_size, nbytes):
            return self._allreduce_in_rotations(out, tensor, op)
        self.run_program(programs.allreduce, tensor, out, op)

    def _allreduce_in_rotations(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        """Every rank adds a part, of the same size on all, and gets those of the others."""
        width = -(-tensor.numel() // self.world_size)
        rows = tensor.new_zeros(self.world_size, width)
        rows.view(-1)[: tensor.numel()] = tensor.view(-1)
        self._rotate(rows, rows)
        reduced = self.reduce_parts(rows, op).to(tensor.dtype)
        self.allgather(rows, reduced)
        out.view(-1).copy_(rows.view(-1)[: tensor.numel()])

    def reduce(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, op: str) -> None:
        self.run_program(programs.reduce, tensor, tensor if out is None else out, op, dst)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        if is_rotated(self.world_size, tensor.nbytes):
            rows = torch.empty_like(tensor)
            self._rotate(rows, tensor)
            out.copy_(self.reduce_parts(rows, op))
            return
        self.run_program(programs.reduce_scatter, tensor, out, op)

    def allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self.run_program(programs.allgather, tensor, out)

    def alltoall(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        if is_rotated(self.world_size, tensor.nbytes):
            return self._rotate(out, tensor)
        self.run_program(programs.alltoall, tensor, out)

    def _rotate(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """As alltoall, in log2 rounds; out may be tensor."""
        rows = tensor.roll(-self.rank, 0)
        for moving, schedule in rotations(self.rank, self.world_size, tensor[0].numel()):
            packed = rows[moving]
            received = torch.empty_like(packed)
            self.run_schedule(schedule, packed.view(-1), received.view(-1))
            rows[moving] = received
        out.copy_(rows.flip(0).roll(self.rank + 1, 0))

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.run_program(programs.broadcast, tensor, tensor, "", src)


class SubgroupCollectives(ScheduledCollectives):
    """The collectives of some ranks over the network of all.

    ranks: of the network, this one among them; here each is known by its place.
    """

    def __init__(self, network: Network, ranks: Sequence[int]) -> None:
        self._network, self._ranks = network, ranks
        self.rank, self.world_size = ranks.index(network.rank), len(ranks)

    def compile_program(self, program: CollectiveProgram, itemsize: int) -> Any:
        renumbered = program.with_schedules(lambda schedule: schedule.renumbered(self._ranks))
        return self._network.compile_program(renumbered, itemsize)

    def run_compiled(
        self, compiled: Any, tensor: torch.Tensor, out: torch.Tensor, op: str = ""
    ) -> None:
        self._network.run_compiled(compiled, tensor, out, op)

    def run_schedule(self, schedule: Schedule, source: torch.Tensor, target: torch.Tensor) -> None:
        run_alone(self, schedule, source, target)


def run_alone(
    network: ProgramRunner, schedule: Schedule, source: torch.Tensor, target: torch.Tensor
) -> None:
    """Run a schedule as a program, on a network that compiles programs."""
    program = CollectiveProgram((Transfers(schedule, Buffer.TENSOR, Buffer.OUT),))
    network.run_compiled(network.compile_program(program, source.itemsize), source, target)
