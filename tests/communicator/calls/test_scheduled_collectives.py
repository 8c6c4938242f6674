"""The schedules of collectives, simulated: no rank waits for ever, and all data arrives."""

import functools
import itertools
import queue
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from communicator.calls import programs, scheduled_collectives, schedules
from communicator.calls.programs import Buffer, CollectiveProgram, Copy, Transfers, row
from communicator.calls.scheduled_collectives import ScheduledCollectives
from communicator.calls.schedules import PIECE_NBYTES, PeerSlice

SIZES = (1, 2, 3, 5, 8, 13, 17)
every_size = pytest.mark.parametrize("world_size", SIZES)


def simulate(by_rank, buffers):
    """Run the schedules of all ranks; buffers: the (source, target) lists of each rank."""
    run_programs([CollectiveProgram((Transfers(one, 0, 1),)) for one in by_rank], buffers)


def run_programs(by_rank, buffers):
    """Run the programs of all ranks. buffers: TENSOR and OUT of each, lists of words to add."""
    messages = defaultdict(deque)  # between two ranks, in order
    ranks = [
        SimulatedRank(rank, program, [*lists, [None] * program.scratch_numel], messages)
        for rank, (program, lists) in enumerate(zip(by_rank, buffers, strict=True))
    ]
    while any(rank.steps or rank.under_way for rank in ranks):
        assert any([rank.moves() for rank in ranks]), "the ranks wait for each other"
    assert not any(messages.values()), "a message that nobody received"


class SimulatedRank:
    """Takes the steps of a program as csrc/tcp/engine.cpp does; a round ends when all has come."""

    def __init__(self, rank, program, buffers, messages):
        self.rank, self.buffers, self.messages = rank, buffers, messages
        self.under_way = deque()  # the receives that each round waits for
        self.steps = deque()
        for step in program.steps:
            rounds = step.schedule.rounds if isinstance(step, Transfers) else [None]
            self.steps.extend((step, one) for one in rounds)

    def moves(self):
        has_moved = False
        for waiting in self.under_way:
            for recv, target in [*waiting]:
                if arrived := self.messages[recv.peer, self.rank]:
                    data = arrived.popleft()
                    assert len(data) == recv.numel
                    self.buffers[target][recv.begin : recv.end] = data
                    waiting.remove((recv, target))
                    has_moved = True
        while self.under_way and not self.under_way[0]:
            self.under_way.popleft()
            has_moved = True
        while self.steps and self.is_due(*self.steps[0]):
            self.take(*self.steps.popleft())
            has_moved = True
        return has_moved

    def is_due(self, step, one):
        if one is not None:
            return len(self.under_way) < step.schedule.window
        return len(self.under_way) <= step.under_way

    def take(self, step, one):
        if one is not None:
            for send in one.sends:
                data = self.buffers[step.source][send.begin : send.end]
                self.messages[self.rank, send.peer].append(data)
            self.under_way.append([(recv, step.target) for recv in one.recvs])
        elif isinstance(step, Copy):
            data = self.buffers[step.source][step.begin : step.end]
            self.buffers[step.target][step.to : step.to + len(data)] = data
        else:
            begins = [step.begin + k * step.numel for k in range(step.num_rows)]
            rows = [self.buffers[Buffer.SCRATCH][begin : begin + step.numel] for begin in begins]
            rows = rows[step.first :] + rows[: step.first]
            total = ["+".join(column) for column in zip(*rows, strict=True)]
            self.buffers[step.target][step.to : step.to + step.numel] = total


@every_size
@pytest.mark.parametrize("nbytes", [1, PIECE_NBYTES, 3 * PIECE_NBYTES])
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


@pytest.mark.parametrize("world_size", range(2, 17))
def test_no_rank_sends_a_tensor_of_64_kib_twice(world_size):
    rounds, _ = schedules.broadcast(0, world_size, 0, 1 << 16, 1)
    assert sum(one.numel for sends, _ in rounds for one in sends) == 1 << 16


@pytest.mark.parametrize("world_size", SIZES[2:])
@pytest.mark.parametrize("nbytes", [1 << 20, 4 << 20])
def test_a_chain_passes_on_pieces_that_are_one_packet_at_most(world_size, nbytes):
    """Larger ones leave a rank's link idle while the end of a piece is on its way to it."""
    for rank in range(world_size):
        rounds, _ = schedules.broadcast(rank, world_size, 1, nbytes, 1)
        assert max(sum(one.numel for one in sends) for sends, _ in rounds) <= PIECE_NBYTES


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


def test_programs_are_kept_up_to_so_many_messages(monkeypatch):
    monkeypatch.setattr(scheduled_collectives, "MAX_KEPT_MESSAGES", 40)
    rank = Recorded(0, 4)
    for numel in range(1000, 1018):
        rank.alltoall(torch.zeros(4, numel), torch.zeros(4, numel))
    assert sum(program.num_messages for program in rank._programs.values()) == 36


@pytest.mark.parametrize("numel", [PIECE_NBYTES * 3 // 4 + k for k in range(-4, 5)])
def test_ranks_whose_parts_differ_in_size_take_the_same_rounds(numel):
    """Around the size from which a part goes in two pieces."""
    ranks = [Recorded(rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.allreduce(torch.zeros(numel), torch.zeros(numel), "sum")
    shapes = [[(len(one.rounds), one.window) for one in rank.schedules] for rank in ranks]
    assert shapes[0] == shapes[1] == shapes[2]


def test_a_rank_that_sends_nothing_takes_the_same_rounds():
    def slice_of(rank):
        return (0, 1 << 20) if rank == 0 else (0, 0)

    steps = [
        programs.exchange(rank, 3, 4, lambda _, rank=rank: slice_of(rank), slice_of)
        for rank in range(3)
    ]
    assert len({len(step.schedule.rounds) for step in steps}) == 1


def test_a_schedule_among_some_ranks_and_without_some():
    among = schedules.dissemination(1, 3, 2).renumbered([4, 7, 9])
    assert [sends[0].peer for sends, _ in among.rounds] == [4, 9]
    left = schedules.pairwise(0, 4, lambda r: (r, r + 1), lambda r: (r, r + 1), 1).without([1, 2])
    assert [one.sends for one in left.rounds if one.sends] == [(PeerSlice(3, 3, 4),)]
    assert [one.recvs for one in left.rounds if one.recvs] == [(PeerSlice(3, 3, 4),)]


class Lockstep(ScheduledCollectives):
    """One of the ranks of a network within this process: each waits where the others must come."""

    def __init__(self, rank, world_size, links):
        self.rank, self.world_size, self._links = rank, world_size, links

    def run_schedule(self, schedule, source, target):
        for sends, recvs in schedule.rounds:
            for send in sends:
                self._links[self.rank, send.peer].put(source[send.begin : send.end].clone())
            for recv in recvs:
                target[recv.begin : recv.end] = self._links[recv.peer, self.rank].get(timeout=60)


def on_all_ranks(world_size, call):
    """What call(collectives) returns on each rank."""
    links = {pair: queue.Queue() for pair in itertools.product(range(world_size), repeat=2)}
    with ThreadPoolExecutor(world_size) as pool:
        return [*pool.map(call, [Lockstep(rank, world_size, links) for rank in range(world_size)])]


@pytest.mark.parametrize("world_size", SIZES[1:6])
def test_rows_that_go_in_rotations_are_swapped_and_added_in_order(world_size, monkeypatch):
    """As they do among many ranks."""
    monkeypatch.setattr(scheduled_collectives, "is_rotated", lambda *_: True)
    for module in (scheduled_collectives, programs):
        monkeypatch.setattr(module, "is_gathered", lambda *_: False)
    generator = torch.Generator().manual_seed(1)
    tensors = torch.randn(world_size, world_size, 3, generator=generator).half()
    odd = torch.randn(world_size, 101, generator=generator).half()

    def total(stacked):
        return functools.reduce(torch.add, stacked.float()).half()

    def body(rank):
        swapped, reduced, whole = tensors[0].clone(), tensors[0, 0].clone(), odd[0].clone()
        rank.alltoall(swapped, tensors[rank.rank])
        rank.reduce_scatter(reduced, tensors[rank.rank], "sum")
        rank.allreduce(whole, odd[rank.rank], "sum")
        return swapped, reduced, whole

    for rank, (swapped, reduced, whole) in enumerate(on_all_ranks(world_size, body)):
        assert torch.equal(swapped, tensors[:, rank])
        assert torch.equal(reduced, total(tensors[:, rank]))
        assert torch.equal(whole, total(odd))


class Traffic(Recorded):
    """Collectives of one rank that count: rounds, messages, and elements sent and received."""

    def reduce_parts(self, parts, op):
        return parts[0]

    def count(self):
        rounds = [one for schedule in self.schedules for one in schedule.rounds]
        sent = [send.numel for one in rounds for send in one.sends]
        received = [recv.numel for one in rounds for recv in one.recvs]
        return len(rounds), len(sent), sum(sent), sum(received)


def traffic(world_size, call):
    """The most rounds, messages and elements of a direction of a link, of some ranks.

    All schedules are those of rank 0, shifted by the rank, but for a broadcast's: whose first ranks
    have the most to send.
    """
    counts = []
    for rank in (0, 1, world_size - 1):
        collectives = Traffic(rank, world_size)
        call(collectives)
        counts.append(collectives.count())
    rounds, messages, sent, received = map(max, zip(*counts, strict=True))
    return rounds, messages, max(sent, received)


many = pytest.mark.parametrize("world_size", [1000, 10_000])


@many
def test_rounds_of_small_calls_grow_with_the_logarithm(world_size):
    """8 bytes, or 8 for each: of an allreduce twice the rounds at most, and as many messages."""
    log2 = (world_size - 1).bit_length()
    one, rows = torch.zeros(2), torch.zeros(world_size, 2, dtype=torch.int8)
    calls = {
        "barrier": (1, lambda comm: comm.barrier()),
        "allgather": (1, lambda comm: comm.allgather(torch.zeros(world_size, 2), one)),
        "allreduce": (2, lambda comm: comm.allreduce(one.clone(), one, "sum")),
        "reduce_scatter": (1, lambda comm: comm.reduce_scatter(rows[0].clone(), rows, "sum")),
        "alltoall": (1, lambda comm: comm.alltoall(rows.clone(), rows)),
        "broadcast": (1, lambda comm: comm.broadcast(one, 0)),
    }
    for name, (times, call) in calls.items():
        rounds, messages, _ = traffic(world_size, call)
        assert rounds <= times * log2 and messages <= times * log2, (name, rounds, messages)


@pytest.mark.parametrize("world_size", [2, 6, 1000, 10_000])
def test_the_busiest_link_carries_little_more_than_the_least_bytes(world_size):
    """Of large calls: what a rank must send or receive, whatever the algorithm, and 1/10 more."""
    row = 1 << 12 if world_size == 10_000 else 1 << 14
    numel, others = row * world_size, world_size - 1
    rows = torch.empty(world_size, row, dtype=torch.int8)  # its pages are never touched
    pieces = schedules.parts(numel, world_size)
    assert numel * others > schedules.HOP_NBYTES * world_size

    def exchange(comm):
        step = programs.exchange(
            comm.rank, world_size, 1, pieces.__getitem__, lambda _: pieces[comm.rank]
        )
        comm.run_schedule(step.schedule, rows, rows)

    least = {exchange: others * row, lambda comm: comm.broadcast(rows, 0): numel}
    for call, most in least.items():
        assert traffic(world_size, call)[2] <= 1.1 * most


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("name", ["allreduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize("numel", [30, 97])
def test_pieces_are_added_while_others_are_fetched(world_size, name, numel, monkeypatch):
    """In place, with several rounds under way: all get the sums, in order of rank."""
    monkeypatch.setattr(schedules, "PIECE_NBYTES", 2)
    monkeypatch.setattr(schedules, "FLIGHT_NBYTES", 6)
    monkeypatch.setattr(programs, "is_gathered", lambda *_: False)
    numel -= numel % world_size if name == "reduce_scatter" else 0
    root = [world_size - 1] if name == "reduce" else []
    build = getattr(programs, name)
    by_rank = [build(rank, world_size, numel, 1, *root) for rank in range(world_size)]
    tensors = [[f"{rank}.{k}" for k in range(numel)] for rank in range(world_size)]
    total = ["+".join(parts) for parts in zip(*tensors, strict=True)]
    if name == "reduce_scatter":
        outs = [[None] * (numel // world_size) for _ in tensors]
        run_programs(by_rank, [*zip(tensors, outs, strict=True)])
        assert [word for out in outs for word in out] == total
    else:
        run_programs(by_rank, [(tensor, tensor) for tensor in tensors])
        assert all(tensor == total for tensor in tensors[min(root or [0]) :])


@pytest.mark.parametrize("world_size", [2, 3, 6, 64])
def test_tensors_are_gathered_where_that_takes_less_time(world_size):
    assert schedules.is_gathered(world_size, 64)
    assert not schedules.is_gathered(world_size, 4 << 20)
