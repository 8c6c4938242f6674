"""The shared-memory backend against the plain answer, with ranks as threads."""

import pytest
import torch

from communicator import (
    Communicator,
    CommunicatorError,
    CommunicatorTimeout,
    PeerLost,
    conformance,
)
from coordinator import Coordinator
from tests.cases import soak

ALL_FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
SMALL_FLOATS = ALL_FLOATS[2:]


@pytest.fixture
def with_shm(ranks):
    """with_shm(body, n): body(comm) on n ranks, and what each returned."""

    def run(body, world_size):
        def rank(info):
            with (
                Coordinator(info, timeout_s=30) as coor,
                Communicator(coor, backend="shm") as comm,
            ):
                return body(comm)

        return ranks(rank, world_size)

    return run


@pytest.mark.parametrize("world_size", [1, 3, soak(7)])
def test_shm_conforms(with_shm, world_size):
    """On two and four, as processes: test_shm_processes.py."""

    def body(comm):
        report = conformance.check(comm)
        return report.having(conformance.FAILED), report.having(conformance.UNSUPPORTED)

    assert with_shm(body, world_size) == [([], [])] * world_size


def values(rank, count, dtype, scale=100.0):
    generator = torch.Generator().manual_seed(1000 * rank + count)
    return (torch.randn(count, generator=generator) * scale).to(dtype)


def added_in_order(world_size, count, dtype):
    """Rank 0 first, small floats in 32 bits and rounded once."""
    wide = torch.float32 if dtype in SMALL_FLOATS else dtype
    total = values(0, count, dtype).to(wide)
    for rank in range(1, world_size):
        total = total + values(rank, count, dtype).to(wide)
    return narrowed(total, dtype)


def narrowed(tensor, dtype):
    """As torch 2.13 rounds; torch 2.11 made NaN of what is too large for float8_e4m3fn."""
    if dtype == torch.float8_e4m3fn:
        tensor = tensor.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return tensor.to(dtype)


def bits(tensor):
    return tensor.view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", ALL_FLOATS, ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_are_added_in_order_of_rank_and_rounded_once(with_shm, world_size, dtype):
    counts = (1, 63, 1021, 150_001)  # in one shot, and in two

    def body(comm):
        found = [values(comm.rank, count, dtype) for count in counts]
        for tensor in found:
            comm.allreduce(tensor)
        return [bits(tensor) for tensor in found]

    expected = [bits(added_in_order(world_size, count, dtype)) for count in counts]
    assert with_shm(body, world_size) == [expected] * world_size


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
def test_every_value_of_a_small_float_survives_as_in_torch(with_shm, dtype):
    """max of a tensor with itself: NaN, infinities, denormals and both zeros go there and back."""
    width = 8 * dtype.itemsize
    patterns = torch.arange(2**width, dtype=torch.int32)
    every = patterns.to(torch.uint8 if width == 8 else torch.uint16).view(dtype)

    def body(comm):
        found = comm.allreduce(every.clone(), "max").float()
        same = (found == every.float()) | (found.isnan() & every.float().isnan())
        return bool(same.all()) and torch.equal(found.signbit(), found.signbit())

    assert with_shm(body, 2) == [True, True]


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
def test_sums_beyond_the_range_of_a_small_float_end_as_in_torch(with_shm, dtype):
    largest = torch.finfo(dtype).max
    mine = torch.tensor([largest, -largest, largest, 1e-3, 0.0, -0.0, torch.inf])
    other = torch.tensor([largest, -largest, largest / 32, -1e-3, -0.0, -0.0, -torch.inf])
    pair = [narrowed(mine, dtype), narrowed(other, dtype)]

    def body(comm):
        return comm.allreduce(pair[comm.rank].clone()).float().tolist()

    expected = narrowed(pair[0].float() + pair[1].float(), dtype).float()
    for found in with_shm(body, 2):
        assert torch.equal(torch.tensor(found).nan_to_num(7e9), expected.nan_to_num(7e9))


@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_wins_in_max_and_min_on_any_rank(with_shm, op):
    def body(comm):
        tensor = torch.full((3,), float(comm.rank))
        tensor[comm.rank] = torch.nan
        return comm.allreduce(tensor, op).isnan().tolist()

    assert with_shm(body, 3) == [[True] * 3] * 3


def test_whole_numbers_wrap_as_in_torch(with_shm):
    def body(comm):
        return comm.allreduce(torch.tensor([100 + comm.rank], dtype=torch.int8)).item()

    assert with_shm(body, 2) == [torch.tensor(201).to(torch.int8).item()] * 2


def test_tensors_larger_than_the_segment_pass_through_it(with_shm):
    count = 5_000_011

    def body(comm):
        ramp = torch.arange(count, dtype=torch.float32) % 97
        tensor = comm.allreduce(ramp + comm.rank)
        gathered = comm.allgather(ramp + comm.rank)
        sent = comm.broadcast((ramp + comm.rank).clone(), 1)
        rows = torch.stack([ramp + rank for rank in range(comm.world_size)])
        return (
            torch.equal(tensor, 3 * ramp + 3),
            torch.equal(gathered, rows),
            torch.equal(sent, ramp + 1),
            torch.equal(comm.reduce_scatter(rows), 3 * (ramp + comm.rank)),
            torch.equal(comm.alltoall(rows + comm.rank), rows - rows[0] + ramp + comm.rank),
        )

    assert with_shm(body, 3) == [(True,) * 5] * 3


def test_many_groups_of_one_process_do_not_meet(ranks):
    def body(info):
        with Coordinator(info) as coor:
            pairs = [coor.split(ranks) for ranks in ([0, 1], [1, 2], [2, 3], [3, 0], [0, 1, 2, 3])]
            comms = [Communicator(pair, backend="shm") for pair in pairs if pair is not None]
            found = [comm.allreduce(torch.tensor([info.rank])).item() for comm in comms]
            for comm in comms:
                comm.close()
            return found

    assert ranks(body, 4) == [[1, 3, 6], [1, 3, 6], [3, 5, 6], [5, 3, 6]]


MISMATCHES = {
    ("7 float32, sum", "8 float32, sum"): (
        lambda comm: comm.allreduce(torch.ones(7)),
        lambda comm: comm.allreduce(torch.ones(8)),
    ),
    ("0 float32, sum", "4 float32, sum"): (  # the empty call used to be left out
        lambda comm: comm.allreduce(torch.ones(0)),
        lambda comm: comm.allreduce(torch.ones(4)),
    ),
    ("(2, 3) float32, sum", "(3, 2) float32, sum"): (
        lambda comm: comm.allreduce(torch.ones(2, 3)),
        lambda comm: comm.allreduce(torch.ones(3, 2)),
    ),
    ("(1, 1, 1, 1, ...) int8", "(1, 1, 1, 1) int8"): (
        lambda comm: comm.allgather(torch.ones(1, 1, 1, 1, 1, dtype=torch.int8)),
        lambda comm: comm.allgather(torch.ones(1, 1, 1, 1, dtype=torch.int8)),
    ),
    ("4 float32, sum", "4 int64, sum"): (
        lambda comm: comm.allreduce(torch.ones(4)),
        lambda comm: comm.allreduce(torch.ones(4, dtype=torch.int64)),
    ),
    ("float32, sum", "float32, max"): (
        lambda comm: comm.allreduce(torch.ones(4)),
        lambda comm: comm.allreduce(torch.ones(4), "max"),
    ),
    ("called barrier", "broadcast of 4 float32, from rank 2"): (
        lambda comm: comm.barrier(),
        lambda comm: comm.broadcast(torch.ones(4), 2),
    ),
    ("4 float32, to rank 0", "4 float32, to rank 1"): (  # it gave nothing to nobody
        lambda comm: comm.gather(torch.ones(4), 0),
        lambda comm: comm.gather(torch.ones(4), 1),
    ),
    ("gather of 0 float32", "gather of 4 float32"): (
        lambda comm: comm.gather(torch.ones(0)),
        lambda comm: comm.gather(torch.ones(4)),
    ),
    ("scatter of 4 float32, from rank 0", "scatter of 4 float32, from rank 1"): (
        lambda comm: comm.scatter(torch.ones(4), torch.ones(3, 4), 0),
        lambda comm: comm.scatter(torch.ones(4), torch.ones(3, 4), 1),
    ),
    ("allgatherv of 10 float32, in parts with the digest",): (
        lambda comm: comm.allgather(torch.ones(3), sizes=[3, 4, 3]),
        lambda comm: comm.allgather(torch.ones(3), sizes=[4, 3, 3]),
    ),
    ("reduce_scatterv of 10 float32, sum", "reduce_scatterv of 10 float32, max"): (
        lambda comm: comm.reduce_scatter(torch.ones(10), sizes=[3, 4, 3]),
        lambda comm: comm.reduce_scatter(torch.ones(10), "max", sizes=[3, 4, 3]),
    ),
    ("from rank 0", "from rank 1"): (
        lambda comm: comm.broadcast(torch.ones(4), 0),
        lambda comm: comm.broadcast(torch.ones(4), 1),
    ),
}


@pytest.mark.parametrize("words", MISMATCHES, ids=" or ".join)
def test_a_mismatch_raises_on_every_rank_with_the_calls_of_both(with_shm, words):
    def body(comm):
        comm.barrier()
        with pytest.raises(CommunicatorError) as caught:
            MISMATCHES[words][comm.rank == 1](comm)
        assert "call 2: rank" in str(caught.value)
        assert all(word in str(caught.value) for word in words)
        return comm.allreduce(torch.ones(1)).item()  # and the group goes on

    assert with_shm(body, 3) == [3.0] * 3


@pytest.mark.parametrize("sizes", [[0, 200_001, 70_000], [1, 0, 0], [90_000, 5]])
def test_parts_of_other_sizes_go_in_one_call_of_many_rounds(with_shm, sizes):
    def body(comm):
        ranks = [torch.full((size,), float(rank)) for rank, size in enumerate(sizes)]
        joined = comm.allgather(ranks[comm.rank], sizes=sizes)
        whole = torch.arange(sum(sizes), dtype=torch.float32)
        part = comm.reduce_scatter(whole + comm.rank, sizes=sizes)
        added = sum(range(len(sizes)))
        expected = torch.split(whole * len(sizes) + added, sizes)[comm.rank]
        return torch.equal(joined, torch.cat(ranks)) and torch.equal(part, expected)

    assert with_shm(body, len(sizes)) == [True] * len(sizes)


@pytest.mark.parametrize("count", [1, 1000, 3_000_000])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_call_that_the_peers_gave_up_fails_on_the_late_rank_too(ranks, world_size, count):
    """The others had arrived before their deadline, so the late one completed it alone."""

    def rank(info):
        with Coordinator(info, timeout_s=30) as coor:
            comm = Communicator(coor, "shm", timeout_s=30, checked_calls=0)
            comm.barrier()
            comm.set_timeout(0.2)
            last = coor.rank == world_size - 1
            if last:
                coor.barrier()
            with pytest.raises(PeerLost if last else (CommunicatorTimeout, PeerLost)):
                comm.allreduce(torch.ones(count))
            if not last:
                coor.barrier()
            coor.barrier()
            comm.close()

    ranks(rank, world_size)


@pytest.mark.parametrize("error", [CommunicatorTimeout, PeerLost])
def test_a_rank_that_failed_in_a_call_still_sends_until_it_closes(ranks, error):
    """After a deadline it was lost at once; after another error its close was not noticed."""

    def rank(info):
        with Coordinator(info, timeout_s=30) as coor:
            comm = Communicator(coor, "shm", timeout_s=30, checked_calls=0)
            came = torch.zeros(1)
            comm.barrier()
            if coor.rank == 2 and error is PeerLost:
                comm.close()
            if coor.rank == 0:
                comm.set_timeout(0.2 if error is CommunicatorTimeout else 30)
                with pytest.raises(error):
                    comm.allreduce(came)
            coor.barrier()
            if coor.rank == 1:
                handle = comm.irecv(came, 0)
                with pytest.raises(CommunicatorTimeout):
                    handle.wait(timeout_s=0.5)
            coor.barrier()
            if coor.rank == 0:
                comm.isend(torch.ones(1), 1).wait()
                comm.close()
            if coor.rank == 1:
                handle.wait()
                assert came.item() == 1
                with pytest.raises(PeerLost):
                    comm.irecv(came, 0).wait()
            coor.barrier()
            comm.close()

    ranks(rank, 3)
