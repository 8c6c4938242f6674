"""Collectives over a network that runs programs, for all ranks of a communicator or some of them.

Every sum is taken in order of rank, by whoever takes it, so all ranks have the bits of the
shared-memory backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from communicator.calls import programs
from communicator.calls.default_collectives import CollectivesFromP2P
from communicator.calls.programs import CollectiveProgram
from communicator.calls.schedules import Slice

MAX_KEPT_PROGRAMS = 256


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


class ScheduledCollectives(CollectivesFromP2P):
    """The collectives as programs, which are compiled once for each kind of call."""

    _programs: dict[tuple[Any, ...], Any]  # compiled

    def compile_program(self, program: CollectiveProgram, itemsize: int) -> Any:
        raise NotImplementedError

    def run_compiled(
        self, compiled: Any, tensor: torch.Tensor, out: torch.Tensor, op: str = ""
    ) -> None:
        raise NotImplementedError

    def do_barrier(self) -> None:
        empty = torch.empty(0, dtype=torch.uint8)
        self._run(programs.allgather, empty, empty)

    def do_allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        self._run(programs.allreduce, tensor, out, op)

    def do_reduce(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, op: str) -> None:
        self._run(programs.reduce, tensor, tensor if out is None else out, op, dst)

    def do_reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        self._run(programs.reduce_scatter, tensor, out, op)

    def do_allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._run(programs.allgather, tensor, out)

    def do_alltoall(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._run(programs.alltoall, tensor, out)

    def do_broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self._run(programs.broadcast, tensor, tensor, "", src)

    def exchange(
        self,
        source: torch.Tensor,
        send: Callable[[int], Slice],
        target: torch.Tensor,
        recv: Callable[[int], Slice],
    ) -> None:
        """Send source[send(r)] to each other rank r, and receive target[recv(r)] from it."""
        step = programs.exchange(self.rank, self.world_size, source.itemsize, send, recv)
        compiled = self.compile_program(CollectiveProgram((step,)), source.itemsize)
        self.run_compiled(compiled, source, target)

    def _run(
        self,
        build: Callable[..., CollectiveProgram],
        tensor: torch.Tensor,
        out: torch.Tensor,
        op: str = "",
        *root: int,
    ) -> None:
        numel, itemsize = tensor.numel(), tensor.itemsize
        key = (build, numel, itemsize, *root)
        compiled = self._programs.get(key)
        if compiled is None:
            if len(self._programs) == MAX_KEPT_PROGRAMS:
                self._programs.clear()
            program = build(self.rank, self.world_size, numel, itemsize, *root)
            compiled = self._programs[key] = self.compile_program(program, itemsize)
        self.run_compiled(compiled, tensor, out, op)


class SubgroupCollectives(ScheduledCollectives):
    """The collectives of some ranks over the network of all.

    ranks: of the network, this one among them; here each is known by its place.
    """

    def __init__(self, network: Network, ranks: Sequence[int]) -> None:
        self._network, self._ranks, self._programs = network, ranks, {}
        self.rank, self.world_size = ranks.index(network.rank), len(ranks)

    def compile_program(self, program: CollectiveProgram, itemsize: int) -> Any:
        renumbered = program.with_schedules(lambda schedule: schedule.renumbered(self._ranks))
        return self._network.compile_program(renumbered, itemsize)

    def run_compiled(
        self, compiled: Any, tensor: torch.Tensor, out: torch.Tensor, op: str = ""
    ) -> None:
        self._network.run_compiled(compiled, tensor, out, op)
