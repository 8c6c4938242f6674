"""Programs of collectives over a network: copies, schedules and reductions, for one rank.

program = allreduce(rank, world_size, tensor.numel(), tensor.itemsize)

Pure functions, as schedules are. A sum is never taken on the way: every rank that adds has all
parts, and adds them in order of rank, so the bits depend neither on the schedule nor on who adds.
numel and itemsize are those of the call's tensor.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from communicator.calls import schedules
from communicator.calls.schedules import (
    MAX_ADDITIONS,
    MAX_DIRECT,
    SMALL_NBYTES,
    Schedule,
    Slice,
    cut,
    dissemination,
    gather,
    is_gathered,
    num_pieces,
    pairwise,
    parts,
)


class Buffer(IntEnum):
    """A flat tensor: that of the call, its result, and room for rows of the ranks."""

    TENSOR = 0
    OUT = 1
    SCRATCH = 2


class Copy(NamedTuple):
    """Elements begin to end of source, into target from element `to` on.

    under_way: how many rounds of the transfers before it need not have ended.
    """

    source: Buffer
    begin: int
    end: int
    target: Buffer
    to: int
    under_way: int = 0


class Transfers(NamedTuple):
    """A schedule, which sends from source and receives into target."""

    schedule: Schedule
    source: Buffer
    target: Buffer


class Reduce(NamedTuple):
    """num_rows rows of SCRATCH, reduced in order of rank into target from element `to` on.

    begin: of the rows in SCRATCH. first: the row of rank 0; after the last row follows row 0.
    under_way: as of a Copy.
    """

    num_rows: int
    numel: int
    target: Buffer
    to: int
    begin: int = 0
    first: int = 0
    under_way: int = 0


Step = Copy | Transfers | Reduce
ANY = 2**31 - 1  # rounds


class CollectiveProgram(NamedTuple):
    """Steps, one after another. scratch_numel: the elements of SCRATCH."""

    steps: tuple[Step, ...]
    scratch_numel: int = 0

    @property
    def num_messages(self) -> int:
        transfers = (step for step in self.steps if isinstance(step, Transfers))
        rounds = itertools.chain.from_iterable(step.schedule.rounds for step in transfers)
        return sum(len(one.sends) + len(one.recvs) for one in rounds)

    def with_schedules(self, change: Callable[[Schedule], Schedule]) -> CollectiveProgram:
        """A copy whose schedules are changed."""
        steps = (
            step._replace(schedule=change(step.schedule)) if isinstance(step, Transfers) else step
            for step in self.steps
        )
        return self._replace(steps=tuple(steps))


def exchange(
    rank: int,
    world_size: int,
    itemsize: int,
    send: Callable[[int], Slice],
    recv: Callable[[int], Slice],
    source: Buffer = Buffer.TENSOR,
    target: Buffer = Buffer.OUT,
) -> Transfers:
    """Send source[send(r)] to each other rank r, and receive target[recv(r)] from it."""
    ranks = range(world_size)
    sizes = [end - begin for of_rank in (send, recv) for begin, end in map(of_rank, ranks)]
    nbytes = max(sizes) * itemsize  # the same on all ranks, also where sizes differ
    return Transfers(pairwise(rank, world_size, send, recv, nbytes), source, target)


def allreduce(rank: int, world_size: int, numel: int, itemsize: int) -> CollectiveProgram:
    """Small: every rank gets all tensors. Large: every rank adds a part, and all get it."""
    if is_gathered(world_size, numel * itemsize):
        steps, first = _gather_rows(rank, world_size, numel, itemsize)
        total = Reduce(world_size, numel, Buffer.OUT, 0, first=first)
        return CollectiveProgram((*steps, total), world_size * numel)

    def share(pieces: Sequence[Slice]) -> Transfers:
        return exchange(
            *(rank, world_size, itemsize, lambda _: pieces[rank], pieces.__getitem__),
            *(Buffer.OUT, Buffer.OUT),
        )

    begin, _ = parts(numel, world_size)[rank]
    return _reduce_in_parts(rank, world_size, numel, itemsize, Buffer.OUT, begin, share)


def reduce(rank: int, world_size: int, numel: int, itemsize: int, dst: int) -> CollectiveProgram:
    """Small: dst gets all tensors. Large: it gets from every rank the part that this adds."""
    if is_gathered(world_size, numel * itemsize):
        if rank != dst:
            send = gather(rank, world_size, dst, lambda _: (0, numel))
            return CollectiveProgram((Transfers(send, Buffer.TENSOR, Buffer.OUT),))
        rows = functools.partial(row, numel)
        steps = (
            Copy(Buffer.TENSOR, 0, numel, Buffer.SCRATCH, rows(rank)[0]),
            Transfers(gather(rank, world_size, dst, rows), Buffer.SCRATCH, Buffer.SCRATCH),
            Reduce(world_size, numel, Buffer.OUT, 0),
        )
        return CollectiveProgram(steps, world_size * numel)

    def collect(pieces: Sequence[Slice]) -> Transfers:
        (begin, _), (first, last) = part, pieces[rank]
        own = (first - begin + to, last - begin + to)
        of_rank = pieces.__getitem__ if rank == dst else lambda _: own
        return Transfers(gather(rank, world_size, dst, of_rank), target, target)

    part = begin, end = parts(numel, world_size)[rank]
    target, to = (Buffer.OUT, begin) if rank == dst else (Buffer.SCRATCH, 0)
    num_kept = 0 if rank == dst else end - begin  # where a rank without a result adds its part
    return _reduce_in_parts(rank, world_size, numel, itemsize, target, to, collect, num_kept)


def reduce_scatter(rank: int, world_size: int, numel: int, itemsize: int) -> CollectiveProgram:
    return _reduce_in_parts(rank, world_size, numel, itemsize, Buffer.OUT, 0)


def allgather(rank: int, world_size: int, numel: int, itemsize: int) -> CollectiveProgram:
    rows = functools.partial(row, numel)
    begin, end = rows(rank)
    if _is_disseminated(world_size, numel * itemsize):
        steps, _ = _gather_rows(rank, world_size, numel, itemsize)
        whole = world_size * numel
        to_end = Copy(Buffer.SCRATCH, 0, whole - begin, Buffer.OUT, begin)
        from_begin = Copy(Buffer.SCRATCH, whole - begin, whole, Buffer.OUT, 0)
        return CollectiveProgram((*steps, to_end, from_begin), whole)
    share = exchange(
        rank, world_size, itemsize, lambda _: (begin, end), rows, Buffer.OUT, Buffer.OUT
    )
    return CollectiveProgram((Copy(Buffer.TENSOR, 0, numel, Buffer.OUT, begin), share))


def alltoall(rank: int, world_size: int, numel: int, itemsize: int) -> CollectiveProgram:
    rows = functools.partial(row, numel // world_size)
    begin, end = rows(rank)
    own = Copy(Buffer.TENSOR, begin, end, Buffer.OUT, begin)
    return CollectiveProgram((own, exchange(rank, world_size, itemsize, rows, rows)))


def broadcast(rank: int, world_size: int, numel: int, itemsize: int, src: int) -> CollectiveProgram:
    schedule = schedules.broadcast(rank, world_size, src, numel, itemsize)
    return CollectiveProgram((Transfers(schedule, Buffer.TENSOR, Buffer.TENSOR),))


def _is_disseminated(world_size: int, nbytes: int) -> bool:
    return world_size > MAX_DIRECT and nbytes <= SMALL_NBYTES


def _gather_rows(
    rank: int, world_size: int, numel: int, itemsize: int
) -> tuple[Sequence[Step], int]:
    """All ranks' tensors as the rows of SCRATCH, and the row of rank 0."""
    if _is_disseminated(world_size, numel * itemsize):
        own = Copy(Buffer.TENSOR, 0, numel, Buffer.SCRATCH, 0)
        schedule = dissemination(rank, world_size, numel)
        return (own, Transfers(schedule, Buffer.SCRATCH, Buffer.SCRATCH)), -rank % world_size
    rows = functools.partial(row, numel)
    own = Copy(Buffer.TENSOR, 0, numel, Buffer.SCRATCH, rows(rank)[0])
    return (
        own,
        exchange(
            rank, world_size, itemsize, lambda _: (0, numel), rows, Buffer.TENSOR, Buffer.SCRATCH
        ),
    ), 0


def _reduce_in_parts(
    rank: int,
    world_size: int,
    numel: int,
    itemsize: int,
    target: Buffer,
    to: int,
    share: Callable[[Sequence[Slice]], Transfers] | None = None,
    num_kept: int = 0,
) -> CollectiveProgram:
    """Every rank adds its part of all tensors into target from `to` on, piece by piece.

    While a piece is fetched the one before is added, and goes where `share` says. SCRATCH has room
    for num_kept elements, and after them for the rows of two pieces.
    """
    most = -(-numel // world_size)  # of a part
    count = num_pieces(most * itemsize, MAX_ADDITIONS)
    width = world_size * -(-most // count)
    pieces = zip(*(cut(part, count) for part in parts(numel, world_size)), strict=True)
    part_begin, _ = parts(numel, world_size)[rank]
    fetches: list[tuple[Copy, Transfers]] = []
    additions: list[Reduce] = []
    shares: list[Transfers] = []
    for k, of_rank in enumerate(pieces):
        begin, end = of_rank[rank]
        rows = functools.partial(row, end - begin, begin=num_kept + k % 2 * width)
        own = Copy(Buffer.TENSOR, begin, end, Buffer.SCRATCH, rows(rank)[0], ANY)
        send, scratch = of_rank.__getitem__, Buffer.SCRATCH
        fetches.append((own, exchange(rank, world_size, itemsize, send, rows, target=scratch)))
        additions.append(
            Reduce(world_size, end - begin, target, to + begin - part_begin, rows(0)[0])
        )
        shares += [] if share is None else [share(of_rank)]
    steps: list[Step] = []
    for k in range(count + 1):
        steps += [step for fetch in fetches[k : k + 1] for step in fetch]
        if k > 0:
            since = [*shares[k - 2 : k - 1], *(fetch for _, fetch in fetches[k : k + 1])]
            under_way = sum(len(transfers.schedule.rounds) for transfers in since)
            steps += [additions[k - 1]._replace(under_way=under_way), *shares[k - 1 : k]]
    return CollectiveProgram(tuple(steps), num_kept + min(count, 2) * width)


def row(numel: int, rank: int, begin: int = 0) -> Slice:
    """The elements of a rank's row, where each row has `numel`."""
    return begin + numel * rank, begin + numel * (rank + 1)


# Of ranks on nodes. nodes: the ranks of each.

Nodes = tuple[tuple[int, ...], ...]


def scattered_rows(
    node: int, num_nodes: int, numel: int, itemsize: int, nodes: Nodes, place: int
) -> CollectiveProgram:
    """Of a column: the row of each node's rank at this place to it, and the rows of all to this."""
    width = numel // sum(map(len, nodes))

    def row_of(node: int) -> Slice:
        return row(width, nodes[node][place]) if place < len(nodes[node]) else (0, 0)

    recv = functools.partial(row, width if place < len(nodes[node]) else 0)
    return CollectiveProgram((exchange(node, num_nodes, itemsize, row_of, recv),))


def gathered_rows(
    node: int,
    num_nodes: int,
    _: int,
    itemsize: int,
    nodes: Nodes,
    place: int,
    numel: int,
    segment: Slice,
) -> CollectiveProgram:
    """Of a column: a segment of the row, of numel elements, of each node's rank at this place."""

    def row_of(node: int) -> Slice:
        ranks, (begin, end) = nodes[node], segment
        if place >= len(ranks):
            return 0, 0
        return numel * ranks[place] + begin, numel * ranks[place] + end

    own, out = row_of(node), Buffer.OUT
    share = exchange(node, num_nodes, itemsize, lambda _: own, row_of, out, out)
    return CollectiveProgram((share,))


def swapped_rows(
    rank: int, world_size: int, numel: int, itemsize: int, near: tuple[int, ...]
) -> CollectiveProgram:
    """An alltoall with all ranks but these."""
    program = alltoall(rank, world_size, numel, itemsize)
    return program.with_schedules(lambda schedule: schedule.without(near))
