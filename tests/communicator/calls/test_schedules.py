"""The schedules of collectives, simulated: no rank waits for ever, and all data arrives."""

from collections import defaultdict, deque

import pytest
import torch

from communicator.calls import schedules
from communicator.calls.scheduled_collectives import ScheduledCollectives, row
from communicator.calls.schedules import SMALL_NBYTES, TOKEN_NBYTES, PeerSlice

SIZES = (1, 2, 3, 5, 8, 13, 17)
every_size = pytest.mark.parametrize("world_size", SIZES)


def simulate(by_rank, buffers):
    """Run the schedules of all ranks; a round ends once its messages have come.

    buffers: the (source, target) lists of each rank. Messages between two ranks keep their order.
    """
    messages = defaultdict(deque)
    pending = [deque(schedule.rounds) for schedule in by_rank]
    under_way = [[] for _ in by_rank]
    while any(pending) or any(under_way):
        has_moved = False
        for rank, (source, target) in enumerate(buffers):
            while pending[rank] and len(under_way[rank]) < by_rank[rank].window:
                has_moved, (sends, recvs) = True, pending[rank].popleft()
                for send in sends:
                    messages[rank, send.peer].append(source[send.begin : send.end])
                under_way[rank].append(list(recvs))
            for recvs in under_way[rank]:
                for recv in [recv for recv in recvs if messages[recv.peer, rank]]:
                    data = messages[recv.peer, rank].popleft()
                    assert len(data) == recv.numel
                    target[recv.begin : recv.end] = data
                    recvs.remove(recv)
                    has_moved = True
            while under_way[rank] and not under_way[rank][0]:
                del under_way[rank][0]
        assert has_moved, "the ranks wait for each other"
    assert not any(messages.values()), "a message that nobody received"


@every_size
@pytest.mark.parametrize("nbytes", [1, 2 * SMALL_NBYTES, 2 * TOKEN_NBYTES])
def test_pairwise_gives_each_rank_the_row_of_every_other(world_size, nbytes):
    buffers, ranks = [], range(world_size)
    for rank in ranks:
        source = [(rank, dst, k) for dst in ranks for k in (0, 1)]
        buffers.append((source, [None] * len(source)))
    send = recv = lambda rank: row(2, rank)
    by_rank = [schedules.pairwise(rank, world_size, send, recv, nbytes) for rank in ranks]
    simulate(by_rank, buffers)
    for rank, (_, target) in enumerate(buffers):
        expected = [(src, rank, k) for src in ranks if src != rank for k in (0, 1)]
        assert [cell for cell in target if cell is not None] == expected


@every_size
def test_dissemination_gives_every_rank_all_rows(world_size):
    buffers = [[(rank, 0), (rank, 1), *[None] * (2 * world_size - 2)] for rank in range(world_size)]
    by_rank = [schedules.dissemination(rank, world_size, 2) for rank in range(world_size)]
    simulate(by_rank, [(buffer, buffer) for buffer in buffers])
    for rank, buffer in enumerate(buffers):
        order = [(rank + k) % world_size for k in range(world_size)]
        assert buffer == [(src, k) for src in order for k in (0, 1)]


@every_size
@pytest.mark.parametrize("numel", [0, 1, 100, 10_000])
def test_broadcast_reaches_every_rank(world_size, numel):
    for src in {0, world_size // 2, world_size - 1}:
        buffers = [[None] * numel for _ in range(world_size)]
        buffers[src] = list(range(numel))
        by_rank = [
            schedules.broadcast(rank, world_size, src, numel, 1 << 7) for rank in range(world_size)
        ]
        simulate(by_rank, [(buffer, buffer) for buffer in buffers])
        assert buffers == [list(range(numel))] * world_size


@every_size
def test_gather_gives_dst_all_rows(world_size):
    for dst in {0, world_size - 1}:
        buffers = [[None] * world_size for _ in range(world_size)]
        for rank in range(world_size):
            buffers[rank][rank] = rank
        by_rank = [
            schedules.gather(rank, world_size, dst, lambda src: row(1, src))
            for rank in range(world_size)
        ]
        simulate(by_rank, [(buffer, buffer) for buffer in buffers])
        assert buffers[dst] == list(range(world_size))


class Recorded(ScheduledCollectives):
    """Collectives that keep their schedules, and move nothing."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size, self.schedules = rank, world_size, []

    def run_schedule(self, schedule, source, target):
        self.schedules.append(schedule)


@pytest.mark.parametrize("numel", [schedules.TOKEN_NBYTES * 3 // 4 + k for k in range(-4, 5)])
def test_ranks_whose_parts_differ_in_size_take_the_same_rounds(numel):
    """Around the size from which a message waits until it is asked for."""
    ranks = [Recorded(rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.do_allreduce(torch.zeros(numel), torch.zeros(numel), "sum")
    shapes = [[(len(one.rounds), one.window) for one in rank.schedules] for rank in ranks]
    assert shapes[0] == shapes[1] == shapes[2]


def test_a_rank_that_sends_nothing_takes_the_same_rounds():
    def slice_of(rank):
        return (0, 1 << 20) if rank == 0 else (0, 0)

    ranks, big = [Recorded(rank, 3) for rank in range(3)], torch.zeros(1 << 20)
    for rank in ranks:
        rank.exchange(big, lambda _, rank=rank: slice_of(rank.rank), big, slice_of)
    assert len({len(rank.schedules[0].rounds) for rank in ranks}) == 1


def test_a_schedule_among_some_ranks_and_without_some():
    among = schedules.dissemination(1, 3, 2).renumbered([4, 7, 9])
    assert [sends[0].peer for sends, _ in among.rounds] == [4, 9]
    left = schedules.pairwise(0, 4, lambda r: (r, r + 1), lambda r: (r, r + 1), 1).without([1, 2])
    assert [one.sends for one in left.rounds if one.sends] == [(PeerSlice(3, 3, 4),)]
    assert [one.recvs for one in left.rounds if one.recvs] == [(PeerSlice(3, 3, 4),)]


@pytest.mark.parametrize("world_size", [1000, 10_000])
def test_rounds_of_small_calls_grow_with_the_logarithm(world_size):
    log2 = (world_size - 1).bit_length()
    assert len(schedules.dissemination(3, world_size, 1).rounds) == log2
    assert len(schedules.broadcast(3, world_size, 0, 100, 1).rounds) <= log2


@pytest.mark.parametrize("world_size", [2, 6, 1000])
def test_the_busiest_link_carries_little_more_than_the_least_bytes(world_size):
    """Of a large broadcast each rank sends each byte once; of an exchange only what others need."""
    numel = 1 << 24
    broadcast = [schedules.broadcast(rank, world_size, 0, numel, 4) for rank in (0, 1)]
    sent = [sum(send.numel for sends, _ in one.rounds for send in sends) for one in broadcast]
    assert max(sent) == numel
    pieces = schedules.parts(numel, world_size)
    exchange = schedules.pairwise(0, world_size, pieces.__getitem__, lambda _: pieces[0], numel)
    sent = sum(send.numel for sends, _ in exchange.rounds for send in sends)
    assert sent == numel - pieces[0][1]


@pytest.mark.parametrize("world_size", [2, 3, 6, 64])
def test_tensors_are_gathered_where_that_takes_less_time(world_size):
    assert schedules.is_gathered(world_size, 64)
    assert not schedules.is_gathered(world_size, 4 << 20)
