"""The programs of collectives, simulated: no rank waits for ever, and all data arrives."""

import itertools
import struct
from collections import defaultdict, deque

import pytest

from communicator.backends import _tcp
from communicator.backends.scheduled_collectives import (
    COPY,
    NOTHING,
    RECV,
    REDUCE,
    ROUND,
    SEND,
    SETTLE,
    STEP,
    Buffer,
    SubgroupCollectives,
    packed,
    row,
)

SIZES = (1, 2, 3, 5, 8, 13, 17)
every_size = pytest.mark.parametrize("world_size", SIZES)
PIECE_NBYTES = 60 << 10  # of csrc/tcp/programs.cpp


class Program:
    """The steps of one rank, in elements of so many bytes."""

    def __init__(self, made, itemsize):
        steps, scratch_nbytes = made
        self.scratch_numel, self.steps = scratch_nbytes // itemsize, []
        for kind, peer, source, target, *places in STEP.iter_unpack(steps):
            assert not any(place % itemsize for place in places)
            self.steps.append((kind, peer, source, target, *(n // itemsize for n in places)))

    def of_kind(self, kind):
        return [step for step in self.steps if step[0] == kind]

    @property
    def shape(self):
        """What all ranks must have in common: the rounds, and how many may be under way."""
        return [step[1] for step in self.of_kind(ROUND)]

    def traffic(self):
        """Rounds, messages, and the most elements of a direction."""
        sends, recvs = self.of_kind(SEND), self.of_kind(RECV)
        most = max(sum(step[6] for step in steps) for steps in (sends, recvs))
        return len(self.shape), len(sends), most


def program(name, rank, world_size, numel, itemsize=1, root=0):
    made = _tcp.program(name, rank, packed(range(world_size)), numel, itemsize, root)
    return Program(made, itemsize)


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
        self.steps = deque(program.steps)

    def moves(self):
        has_moved = False
        for waiting in self.under_way:
            for peer, target, to, numel in [*waiting]:
                if arrived := self.messages[peer, self.rank]:
                    data = arrived.popleft()
                    assert len(data) == numel
                    self.buffers[target][to : to + numel] = data
                    waiting.remove((peer, target, to, numel))
                    has_moved = True
        while self.under_way and not self.under_way[0] and not self.is_in_round():
            self.under_way.popleft()
            has_moved = True
        while self.steps and self.is_due(*self.steps[0]):
            self.take(*self.steps.popleft())
            has_moved = True
        return has_moved

    def is_in_round(self):
        """True if the last round's messages are not all started."""
        return len(self.under_way) == 1 and self.steps and self.steps[0][0] in (SEND, RECV)

    def is_due(self, kind, peer, *_):
        if kind == ROUND:
            return len(self.under_way) < peer
        return kind != SETTLE or len(self.under_way) <= peer

    def take(self, kind, peer, source, target, begin, to, numel):
        if kind == ROUND:
            self.under_way.append([])
        elif kind == SEND:
            data = self.buffers[source][begin : begin + numel]
            assert None not in data, "what is sent has not come yet"
            self.messages[self.rank, peer].append(data)
        elif kind == RECV:
            self.under_way[-1].append((peer, target, to, numel))
        elif kind == COPY:
            self.buffers[target][to : to + numel] = self.buffers[source][begin : begin + numel]
        elif kind == REDUCE:
            begins = [begin + k * numel for k in range(source)]
            rows = [self.buffers[Buffer.SCRATCH][first : first + numel] for first in begins]
            rows = rows[peer:] + rows[:peer]
            self.buffers[target][to : to + numel] = [
                "+".join(map(str, column)) for column in zip(*rows, strict=True)
            ]


def words(world_size, numel):
    """A tensor for each rank, and what each element is when all are added in order."""
    tensors = [[f"{rank}.{k}" for k in range(numel)] for rank in range(world_size)]
    return tensors, ["+".join(parts) for parts in zip(*tensors, strict=True)]


# By the number of ranks and the bytes of an element: gathered by all or in log2 rounds, added in
# parts, piece by piece, and in rotations.
reductions = pytest.mark.parametrize(
    ("world_size", "itemsize"),
    [(1, 4), (2, 4), (2, 1 << 17), (3, 8), (3, 1 << 14), (5, 1 << 10), (13, 4), (5, 1 << 17)]
    + [(17, 1 << 12), (64, 16), (65, 4)],
)


@reductions
@pytest.mark.parametrize("numel", [1, 30, 97])
def test_an_allreduce_gives_every_rank_the_sums_in_order_of_rank(world_size, itemsize, numel):
    """In place, with several rounds under way."""
    ranks = range(world_size)
    by_rank = [program("allreduce", rank, world_size, numel, itemsize) for rank in ranks]
    tensors, total = words(world_size, numel)
    run_programs(by_rank, [(tensor, tensor) for tensor in tensors])
    assert tensors == [total] * world_size
    assert len({tuple(one.shape) for one in by_rank}) == 1


@reductions
@pytest.mark.parametrize("numel", [1, 97])
def test_a_reduce_gives_dst_the_sums(world_size, itemsize, numel):
    for dst in {0, world_size - 1}:
        tensors, total = words(world_size, numel)
        ranks = range(world_size)
        by_rank = [program("reduce", rank, world_size, numel, itemsize, dst) for rank in ranks]
        run_programs(by_rank, [(tensor, tensor) for tensor in tensors])
        assert tensors[dst] == total


@reductions
@pytest.mark.parametrize("width", [1, 7])
def test_a_reduce_scatter_gives_each_rank_its_row_of_the_sums(world_size, itemsize, width):
    ranks, numel = range(world_size), width * world_size
    by_rank = [program("reduce_scatter", rank, world_size, numel, itemsize) for rank in ranks]
    tensors, total = words(world_size, numel)
    outs = [[None] * width for _ in tensors]
    run_programs(by_rank, [*zip(tensors, outs, strict=True)])
    assert [word for out in outs for word in out] == total


@reductions
def test_rows_are_gathered_and_swapped(world_size, itemsize):
    ranks = range(world_size)
    tensors, _ = words(world_size, 2)
    outs = [[None] * (2 * world_size) for _ in ranks]
    by_rank = [program("allgather", rank, world_size, 2, itemsize) for rank in ranks]
    run_programs(by_rank, [*zip(tensors, outs, strict=True)])
    assert outs == [[*itertools.chain(*tensors)]] * world_size
    tensors, _ = words(world_size, 2 * world_size)
    by_rank = [program("alltoall", rank, world_size, 2 * world_size, itemsize) for rank in ranks]
    run_programs(by_rank, [*zip(tensors, outs, strict=True)])
    for rank, out in enumerate(outs):
        assert out == [tensor[2 * rank + k] for tensor in tensors for k in (0, 1)]


@every_size
@pytest.mark.parametrize("numel", [0, 1, 100, 10_000])
def test_a_broadcast_reaches_every_rank(world_size, numel):
    for src in {0, world_size // 2, world_size - 1}:
        buffers = [[None] * numel for _ in range(world_size)]
        buffers[src] = list(range(numel))
        ranks = range(world_size)
        by_rank = [program("broadcast", rank, world_size, numel, 1 << 7, src) for rank in ranks]
        run_programs(by_rank, [(buffer, buffer) for buffer in buffers])
        assert buffers == [list(range(numel))] * world_size


@pytest.mark.parametrize("world_size", range(2, 17))
def test_no_rank_sends_a_tensor_of_64_kib_twice(world_size):
    sends = program("broadcast", 0, world_size, 1 << 16).of_kind(SEND)
    assert sum(step[6] for step in sends) == 1 << 16


@pytest.mark.parametrize("world_size", SIZES[2:])
@pytest.mark.parametrize("nbytes", [1 << 20, 4 << 20])
def test_a_chain_passes_on_pieces_that_are_one_packet_at_most(world_size, nbytes):
    """Larger ones leave a rank's link idle while the end of a piece is on its way to it."""
    for rank in range(world_size):
        sends = program("broadcast", rank, world_size, nbytes, root=1).of_kind(SEND)
        assert max((step[6] for step in sends), default=0) <= PIECE_NBYTES


@pytest.mark.parametrize("numel", [PIECE_NBYTES * 3 // 4 + k for k in range(-4, 5)])
def test_ranks_whose_parts_differ_in_size_take_the_same_rounds(numel):
    """Around the size from which a part goes in two pieces."""
    shapes = [program("allreduce", rank, 3, numel, 4).shape for rank in range(3)]
    assert shapes[0] == shapes[1] == shapes[2]


class Recorded:
    """A network that keeps its programs, and moves nothing."""

    collective = ""

    def __init__(self, rank):
        self.rank, self.programs = rank, []

    def run_program(self, program, tensor, out, op=""):
        self.programs.append(Program(program, 4))


class FourBytes:
    itemsize = 4


def exchanged(rank, ranks, sends, recvs):
    """The program of an exchange of four bytes an element."""
    network = Recorded(rank)
    SubgroupCollectives(network, ranks).exchange(FourBytes, FourBytes, sends, recvs)
    return network.programs[0]


def test_a_rank_that_sends_nothing_takes_the_same_rounds():
    slices = [(0, 1 << 20), (0, 0), (0, 0)]
    by_rank = [exchanged(rank, range(3), [slices[rank]] * 3, slices) for rank in range(3)]
    assert len({tuple(one.shape) for one in by_rank}) == 1


def test_an_exchange_among_some_ranks_and_without_some():
    rows = [row(2, place) for place in range(3)]
    among = exchanged(7, [4, 7, 9], rows, rows)
    assert [step[1] for step in among.of_kind(SEND)] == [9, 4]
    assert [step[1] for step in among.of_kind(RECV)] == [4, 9]
    rows = [row(1, 0), NOTHING, NOTHING, row(1, 3)]
    left = exchanged(0, range(4), rows, rows)
    assert [step[1:] for step in left.of_kind(SEND)] == [(3, 0, 0, 3, 0, 1)]
    assert [step[1:] for step in left.of_kind(RECV)] == [(3, 0, 1, 0, 3, 1)]
    assert len(left.shape) == 2  # not those of neither


def test_what_is_no_collective_and_a_slice_too_few_are_refused():
    with pytest.raises(ValueError, match="gossip"):
        program("gossip", 0, 2, 1)
    with pytest.raises(ValueError, match="a slice for each rank"):
        _tcp.exchange(0, packed(range(2)), 1, struct.pack("qq", 0, 1), b"", 0, 1)


def most_traffic(name, world_size, numel, itemsize=1):
    """The most rounds, messages and elements of a direction of a link, of some ranks.

    All programs are those of rank 0, shifted by the rank, but for a broadcast's: whose first ranks
    have the most to send.
    """
    ranks = (0, 1, world_size - 1)
    counts = [program(name, rank, world_size, numel, itemsize).traffic() for rank in ranks]
    return [max(column) for column in zip(*counts, strict=True)]


@pytest.mark.parametrize("world_size", [1000, 10_000])
def test_rounds_of_small_calls_grow_with_the_logarithm(world_size):
    """8 bytes, or 2 for each: of an allreduce twice the rounds at most, and as many messages."""
    log2 = (world_size - 1).bit_length()
    times = {"allgather": 1, "allreduce": 2, "reduce_scatter": 1, "alltoall": 1, "broadcast": 1}
    for name, most in times.items():
        numel = 2 * world_size if name in ("reduce_scatter", "alltoall") else 8
        rounds, messages, _ = most_traffic(name, world_size, numel)
        assert rounds <= most * log2 and messages <= most * log2, (name, rounds, messages)


@pytest.mark.parametrize("world_size", [2, 6, 1000, 10_000])
def test_the_busiest_link_carries_little_more_than_the_least_bytes(world_size):
    """Of large calls: what a rank must send or receive, whatever the algorithm, and 1/10 more."""
    width = 1 << 12 if world_size == 10_000 else 1 << 14
    numel, others = width * world_size, world_size - 1
    least = {"reduce_scatter": others * width, "broadcast": numel, "alltoall": others * width}
    for name, most in least.items():
        assert most_traffic(name, world_size, numel)[2] <= 1.1 * most
    assert others == 1 or most_traffic("allreduce", world_size, numel)[2] <= 2.2 * others * width


@pytest.mark.parametrize("world_size", [2, 3, 6, 64])
def test_tensors_are_gathered_where_that_takes_less_time(world_size):
    """Then each rank adds all of it, and otherwise a part."""
    small, large = (program("allreduce", 0, world_size, n).of_kind(REDUCE) for n in (64, 4 << 20))
    assert [step[6] for step in small] == [64]
    assert max(step[6] for step in large) < 4 << 20
