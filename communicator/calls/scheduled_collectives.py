"""Collectives over a network that runs schedules, for all ranks of a communicator or some of them.

Every sum is taken in order of rank, by whoever takes it, so all ranks have the bits of the
shared-memory backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from communicator.calls.default_collectives import CollectivesFromP2P
from communicator.calls.schedules import (
    MAX_DIRECT,
    SMALL_NBYTES,
    Schedule,
    Slice,
    broadcast,
    dissemination,
    gather,
    is_gathered,
    is_rotated,
    pairwise,
    parts,
    rotations,
)

MAX_SCRATCH_BYTES = 1 << 24  # of memory that is kept between two calls


class Network(Protocol):
    """A backend that reaches all ranks, and runs schedules.

    collective: the call in progress, in words.
    """

    rank: int
    collective: str

    def run_schedule(self, schedule: Schedule, source: torch.Tensor, target: torch.Tensor) -> None:
        """Run the rounds, which send from source and receive into target, both flat."""
        ...


class ScheduledCollectives(CollectivesFromP2P):
    """The collectives as schedules, which run_schedule runs."""

    _scratch = torch.empty(0, dtype=torch.uint8)

    def run_schedule(self, schedule: Schedule, source: torch.Tensor, target: torch.Tensor) -> None:
        raise NotImplementedError

    def do_barrier(self) -> None:
        rows = torch.empty((self.world_size, 0), dtype=torch.uint8)
        self.do_allgather(rows, rows[0])

    def do_allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        """Small: every rank gets all tensors. Large: every rank adds a part, and all get it."""
        if is_gathered(self.world_size, tensor.nbytes):
            rows = self._scratch_rows(tensor)
            self.do_allgather(rows, tensor)
            out.copy_(self.reduce_parts(rows, op))
            return
        if is_rotated(self.world_size, tensor.nbytes):
            return self._allreduce_in_rotations(out, tensor, op)
        pieces = parts(tensor.numel(), self.world_size)
        flat, (begin, end) = out.view(-1), pieces[self.rank]
        flat[begin:end] = self._reduced_part(tensor.view(-1), pieces, op)
        self.exchange(flat, lambda _: (begin, end), flat, pieces.__getitem__)

    def _allreduce_in_rotations(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        """Every rank adds a part, of the same size on all, and gets those of the others."""
        width = -(-tensor.numel() // self.world_size)
        rows = tensor.new_zeros(self.world_size, width)
        rows.view(-1)[: tensor.numel()] = tensor.view(-1)
        self._rotate(rows, rows)
        reduced = self.reduce_parts(rows, op).to(tensor.dtype)
        self.do_allgather(rows, reduced)
        out.view(-1).copy_(rows.view(-1)[: tensor.numel()])

    def do_reduce(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, op: str) -> None:
        """Small: dst gets all tensors. Large: it gets from every rank the part that this adds."""
        if is_gathered(self.world_size, tensor.nbytes):
            rows = self._scratch_rows(tensor)
            rows[self.rank] = tensor
            self._gather(rows.view(-1), dst, functools.partial(row, tensor.numel()))
            if out is not None:
                out.copy_(self.reduce_parts(rows, op))
            return
        pieces = parts(tensor.numel(), self.world_size)
        flat = tensor.new_empty(tensor.numel()) if out is None else out.view(-1)
        begin, end = pieces[self.rank]
        flat[begin:end] = self._reduced_part(tensor.view(-1), pieces, op)
        self._gather(flat, dst, pieces.__getitem__)

    def do_reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        if is_rotated(self.world_size, tensor.nbytes):
            rows = self._scratch_rows(tensor[0])
            self._rotate(rows, tensor)
            out.copy_(self.reduce_parts(rows, op))
            return
        pieces = parts(tensor.numel(), self.world_size)
        out.view(-1).copy_(self._reduced_part(tensor.view(-1), pieces, op))

    def do_allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        out[self.rank] = tensor
        if self.world_size > MAX_DIRECT and tensor.nbytes <= SMALL_NBYTES:
            rotated = out.roll(-self.rank, 0)
            schedule = dissemination(self.rank, self.world_size, tensor.numel())
            self.run_schedule(schedule, rotated.view(-1), rotated.view(-1))
            out.copy_(rotated.roll(self.rank, 0))
        else:
            of_rank = functools.partial(row, tensor.numel())
            self.exchange(out, lambda _: of_rank(self.rank), out, of_rank)

    def do_alltoall(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        if is_rotated(self.world_size, tensor.nbytes):
            return self._rotate(out, tensor)
        out[self.rank] = tensor[self.rank]
        of_rank = functools.partial(row, tensor[0].numel())
        self.exchange(tensor, of_rank, out, of_rank)

    def _rotate(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """As do_alltoall, in log2 rounds; out may be tensor."""
        rows = tensor.roll(-self.rank, 0)
        for moving, schedule in rotations(self.rank, self.world_size, tensor[0].numel()):
            packed = rows[moving]
            received = torch.empty_like(packed)
            self.run_schedule(schedule, packed.view(-1), received.view(-1))
            rows[moving] = received
        out.copy_(rows.flip(0).roll(self.rank + 1, 0))

    def do_broadcast(self, tensor: torch.Tensor, src: int) -> None:
        flat = tensor.view(-1)
        schedule = broadcast(self.rank, self.world_size, src, flat.numel(), tensor.itemsize)
        self.run_schedule(schedule, flat, flat)

    def exchange(
        self,
        source: torch.Tensor,
        send: Callable[[int], Slice],
        target: torch.Tensor,
        recv: Callable[[int], Slice],
    ) -> None:
        """Send source[send(r)] to each other rank r, and receive target[recv(r)] from it."""
        ranks = range(self.world_size)
        sizes = [end - begin for of_rank in (send, recv) for begin, end in map(of_rank, ranks)]
        nbytes = max(sizes) * source.itemsize  # the same on all ranks, also where sizes differ
        schedule = pairwise(self.rank, self.world_size, send, recv, nbytes)
        self.run_schedule(schedule, source.view(-1), target.view(-1))

    def _gather(self, flat: torch.Tensor, dst: int, of_rank: Callable[[int], Slice]) -> None:
        self.run_schedule(gather(self.rank, self.world_size, dst, of_rank), flat, flat)

    def _reduced_part(self, flat: torch.Tensor, pieces: list[Slice], op: str) -> torch.Tensor:
        """The reduction of this rank's piece of all ranks' tensors."""
        begin, end = pieces[self.rank]
        rows = self._scratch_rows(flat[begin:end])
        rows[self.rank] = flat[begin:end]
        self.exchange(flat, pieces.__getitem__, rows, functools.partial(row, end - begin))
        return self.reduce_parts(rows, op)

    def _scratch_rows(self, like: torch.Tensor) -> torch.Tensor:
        """[world_size, *like.shape]; kept for the next call unless it is large.

        Pages that are new each time cost as much as filling them.
        """
        nbytes = like.nbytes * self.world_size
        scratch = self._scratch
        if scratch.numel() < nbytes:
            with torch.inference_mode(False):  # it may be written outside of that mode later
                scratch = torch.empty(nbytes, dtype=torch.uint8)
        if scratch.numel() <= MAX_SCRATCH_BYTES:
            self._scratch = scratch
        return scratch[:nbytes].view(like.dtype).view(self.world_size, *like.shape)


class SubgroupCollectives(ScheduledCollectives):
    """The collectives of some ranks over the network of all.

    ranks: of the network, this one among them; here each is known by its place.
    """

    def __init__(self, network: Network, ranks: Sequence[int]) -> None:
        self._network, self._ranks = network, ranks
        self.rank, self.world_size = ranks.index(network.rank), len(ranks)

    def run_schedule(self, schedule: Schedule, source: torch.Tensor, target: torch.Tensor) -> None:
        self._network.run_schedule(schedule.renumbered(self._ranks), source, target)


def row(numel: int, rank: int) -> Slice:
    """The elements of a rank's row of so many."""
    return numel * rank, numel * (rank + 1)
