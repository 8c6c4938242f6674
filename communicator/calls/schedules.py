"""Schedules of collectives over a network: who sends which elements to whom, round by round.

schedule = pairwise(rank, world_size, send=row, recv=row, message_nbytes=1 << 20)

Pure functions of the rank, the number of ranks and the size, so that all ranks agree without a
message. A sum is never taken on the way: every rank that adds has all parts, and adds them in order
of rank, so the bits depend neither on the schedule nor on who adds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

HOP_NBYTES = 1 << 13  # bytes that a link carries in one message latency
SMALL_NBYTES = 1 << 14  # of a message that mostly waits
PIECE_NBYTES = 60 << 10  # of a message, sent in turn: it is with its headers one of Linux' packets
FLIGHT_NBYTES = 2 * PIECE_NBYTES  # a rank has on its way at once
MAX_PIECES = 1 << 10  # of a message
MAX_ADDITIONS = 1 << 6  # by which a rank adds its part of a tensor, one while the next is fetched
SHARED_NBYTES = 1 << 20  # from this size on two ranks share the additions of an allreduce
MAX_DIRECT = 8  # ranks that gather small messages from each other, and not in log2 rounds
MESSAGE_NBYTES = 1 << 10  # bytes that a link carries while a message keeps a processor
Slice = tuple[int, int]


class PeerSlice(NamedTuple):
    """Elements begin to end of a flat tensor, to or from a rank."""

    peer: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


class Round(NamedTuple):
    """Transfers that go on at the same time; each pair of ranks has at most one a direction."""

    sends: tuple[PeerSlice, ...] = ()
    recvs: tuple[PeerSlice, ...] = ()

    def renumbered(self, ranks: Sequence[int]) -> Round:
        sends, recvs = (
            tuple(transfer._replace(peer=ranks[transfer.peer]) for transfer in transfers)
            for transfers in self
        )
        return Round(sends, recvs)

    def without(self, ranks: Sequence[int]) -> Round:
        sends, recvs = (
            tuple(transfer for transfer in transfers if transfer.peer not in ranks)
            for transfers in self
        )
        return Round(sends, recvs)


class Schedule(NamedTuple):
    """The rounds of one rank. window: how many of them may be under way at once."""

    rounds: tuple[Round, ...]
    window: int = 1

    def renumbered(self, ranks: Sequence[int]) -> Schedule:
        """A copy among these ranks, in the numbering of a larger group."""
        return Schedule(tuple(one.renumbered(ranks) for one in self.rounds), self.window)

    def without(self, ranks: Sequence[int]) -> Schedule:
        """A copy with no transfers to and from these ranks."""
        rounds = (one.without(ranks) for one in self.rounds)
        return Schedule(tuple(one for one in rounds if any(one)), self.window)


def pairwise(
    rank: int,
    world_size: int,
    send: Callable[[int], Slice],
    recv: Callable[[int], Slice],
    message_nbytes: int,
) -> Schedule:
    """Each rank sends to each other one, to its right neighbour first: no two to the same one.

    send, recv: the elements for and from a rank. message_nbytes: the largest of them on any rank.
    Large messages go piece by piece in turn: each link has data for all ranks at any time, so none
    is idle while one rank is late.
    """
    count = num_pieces(message_nbytes)
    peers = [
        ((rank + distance) % world_size, (rank - distance) % world_size)
        for distance in range(1, world_size)
    ]
    messages = [(dst, cut(send(dst), count), src, cut(recv(src), count)) for dst, src in peers]
    rounds = (
        Round((PeerSlice(dst, *sends[k]),), (PeerSlice(src, *recvs[k]),))
        for k in range(count)
        for dst, sends, src, recvs in messages
    )
    return Schedule(tuple(rounds), window(message_nbytes // count))


def num_pieces(nbytes: int, most: int = MAX_PIECES) -> int:
    """The number of pieces to cut the bytes into; at most `most`, and then each is larger."""
    return min(-(-nbytes // PIECE_NBYTES), most) or 1


def window(message_nbytes: int) -> int:
    """The number of rounds, with such messages, that may be under way at once."""
    return max(2, FLIGHT_NBYTES // max(message_nbytes, 1))


def dissemination(rank: int, world_size: int, row: int) -> Schedule:
    """An allgather in log2 rounds (Bruck's): rows of `row` elements, this rank's own first.

    Row i of the buffer becomes that of rank (rank + i) % world_size.
    """
    rounds, distance = [], 1
    while distance < world_size:
        count = min(distance, world_size - distance)
        dst, src = (rank - distance) % world_size, (rank + distance) % world_size
        send = PeerSlice(dst, 0, count * row)
        rounds.append(Round((send,), (PeerSlice(src, distance * row, (distance + count) * row),)))
        distance *= 2
    return Schedule(tuple(rounds))


def rotations(rank: int, world_size: int, row: int) -> Iterator[tuple[list[int], Schedule]]:
    """An alltoall in log2 rounds (Bruck's): row i is for rank (rank + i) % world_size.

    Each round has the rows that move on, which are sent and received one after another. At the end
    row i is from rank (rank - i) % world_size.
    """
    distance = 1
    while distance < world_size:
        rows = [index for index in range(world_size) if index & distance]
        dst, src = (rank + distance) % world_size, (rank - distance) % world_size
        send, recv = (PeerSlice(peer, 0, len(rows) * row) for peer in (dst, src))
        yield rows, Schedule((Round((send,), (recv,)),))
        distance *= 2


def broadcast(rank: int, world_size: int, src: int, numel: int, itemsize: int) -> Schedule:
    """A chain of ranks that pass on piece after piece, or a tree.

    A tree where it takes at most 3/4 of the time: its busiest link carries the tensor log2 times.
    """
    nbytes = numel * itemsize
    hops = max(world_size - 2, 0)
    count = max(num_pieces(nbytes), round(math.sqrt(hops * nbytes / HOP_NBYTES)))
    chain_nbytes = (count + hops) * (nbytes / count + HOP_NBYTES)
    tree_nbytes = (world_size - 1).bit_length() * (nbytes + HOP_NBYTES)
    if chain_nbytes * 3 < tree_nbytes * 4:
        return chain(rank, world_size, src, numel, count)
    return tree(rank, world_size, src, numel)


def chain(rank: int, world_size: int, src: int, numel: int, count: int) -> Schedule:
    """From src to its right neighbour and so on; a rank passes one piece on as the next arrives."""
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    pieces = parts(numel, count)
    if rank == src:
        return Schedule(tuple(Round((PeerSlice(after, *piece),)) for piece in pieces))
    recvs: list[tuple[PeerSlice, ...]] = [(PeerSlice(before, *piece),) for piece in pieces]
    sends: list[tuple[PeerSlice, ...]] = [(PeerSlice(after, *piece),) for piece in pieces]
    if after == src:
        return Schedule(tuple(Round(recvs=recv) for recv in recvs))
    rounds = zip([(), *sends], [*recvs, ()], strict=True)
    return Schedule(tuple(Round(send, recv) for send, recv in rounds))


def tree(rank: int, world_size: int, src: int, numel: int) -> Schedule:
    """A binomial tree: in every round each rank that has the tensor sends it to one more."""
    place, whole = (rank - src) % world_size, (0, numel)
    rounds, distance = [], 1
    while distance < world_size:
        if place < distance and place + distance < world_size:
            rounds.append(Round((PeerSlice((rank + distance) % world_size, *whole),)))
        elif distance <= place < 2 * distance:
            rounds.append(Round(recvs=(PeerSlice((rank - distance) % world_size, *whole),)))
        distance *= 2
    return Schedule(tuple(rounds))


def gather(rank: int, world_size: int, dst: int, row: Callable[[int], Slice]) -> Schedule:
    """Each rank's row to dst."""
    if rank != dst:
        return Schedule((Round((PeerSlice(dst, *row(rank)),)),))
    others = [src for src in range(world_size) if src != dst]
    return Schedule((Round(recvs=tuple(PeerSlice(src, *row(src)) for src in others)),))


def parts(numel: int, count: int) -> list[Slice]:
    """`numel` elements in `count` parts that differ by at most one, in order."""
    return cut((0, numel), count)


def cut(elements: Slice, count: int) -> list[Slice]:
    begin, end = elements
    ends = [begin + (end - begin) * k // count for k in range(count + 1)]
    return list(itertools.pairwise(ends))


def is_gathered(world_size: int, nbytes: int) -> bool:
    """For a reduction of `nbytes`: whether every rank gets all tensors and adds them itself.

    Otherwise each rank adds a part of all tensors, which takes a message more, and fewer bytes.
    """
    if world_size == 2:
        return nbytes < SHARED_NBYTES
    more_nbytes = nbytes * (world_size - 1) * (world_size - 2) // world_size
    return more_nbytes <= HOP_NBYTES


def is_rotated(world_size: int, nbytes: int) -> bool:
    """True if an alltoall of `nbytes` a rank goes by rotations(), and not pairwise().

    Fewer messages, and more bytes: half of them move in each round.
    """
    rotated_nbytes = (world_size - 1).bit_length() * (HOP_NBYTES + nbytes // 2)
    pairwise_nbytes = (world_size - 1) * (MESSAGE_NBYTES + nbytes // world_size)
    return rotated_nbytes < pairwise_nbytes
