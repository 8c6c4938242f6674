"""Random calls on 2 to 7 ranks, against what torch says on one."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from communicator import Communicator
from coordinator import Coordinator
from tests.conftest import run_threads

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)
COUNTS = (0, 1, 2, 3, 7, 31, 64, 67, 1021, 4096, 40_009)
OPS = ("sum", "prod", "max", "min")
KINDS = (
    "allreduce",
    "allreduce out",
    "broadcast",
    "reduce",
    "allgather",
    "reduce_scatter",
    "alltoall",
    "ring",
    "barrier",
)

calls = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from(DTYPES),
    st.sampled_from(COUNTS),
    st.sampled_from(OPS),
    st.integers(0, 2**30),
)


def tensor_of(rank, seed, shape, dtype):
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def plain(rows, op):
    """Reduced in order of rank. Floats are small whole numbers here, rounded once at the end."""
    dtype = rows[0].dtype
    rows = [row.double() if dtype.is_floating_point else row for row in rows]
    total = rows[0].clone()
    for row in rows[1:]:
        if op == "sum":
            total += row
        elif op == "prod":
            total *= row
        else:
            total = torch.maximum(total, row) if op == "max" else torch.minimum(total, row)
    return total.to(dtype)


def run(comm, call):
    """What the call gave on this rank, and what it should have given."""
    kind, dtype, count, op, seed = call
    world, rank = comm.world_size, comm.rank
    root = seed % world
    shape = (world, count) if kind in ("reduce_scatter", "alltoall") else (count,)
    everyones = [tensor_of(peer, seed, shape, dtype) for peer in range(world)]
    mine = everyones[rank].clone()
    if kind == "allreduce":
        return comm.allreduce(mine, op), plain(everyones, op)
    if kind == "allreduce out":
        return comm.allreduce(mine, op, out=torch.empty_like(mine)), plain(everyones, op)
    if kind == "broadcast":
        return comm.broadcast(mine, root), everyones[root]
    if kind == "reduce":
        return comm.reduce(mine, root, op), plain(everyones, op) if rank == root else mine
    if kind == "allgather":
        return comm.allgather(mine), torch.stack(everyones)
    if kind == "reduce_scatter":
        return comm.reduce_scatter(mine, op), plain(everyones, op)[rank]
    if kind == "alltoall":
        return comm.alltoall(mine), torch.stack([row[rank] for row in everyones])
    if kind == "ring":
        found = torch.empty_like(mine)
        with comm.group():
            comm.send(mine, (rank + 1) % world)
            comm.recv(found, (rank - 1) % world)
        return found, everyones[rank - 1]
    comm.barrier()
    return mine, mine


@settings(max_examples=30, deadline=None)
@given(world_size=st.integers(2, 7), program=st.lists(calls, min_size=1, max_size=25))
def test_any_program_of_calls_gives_what_torch_gives(world_size, program):
    def body(info):
        with Coordinator(info, timeout_s=60) as coor, Communicator(coor, backend="shm") as comm:
            for call in program:
                found, expected = run(comm, call)
                assert torch.equal(found, expected), call

    for result in run_threads(body, world_size):
        if isinstance(result, BaseException):
            raise result


def test_ranks_that_come_and_go_at_random_times_still_agree(ranks):
    """Each rank dawdles at random, so that calls overlap in every way they can."""

    def body(info):
        dice, shared = random.Random(info.rank), random.Random(7)
        with Coordinator(info, timeout_s=60) as coor, Communicator(coor, backend="shm") as comm:
            for _ in range(300):
                call = (
                    shared.choice(KINDS),
                    shared.choice(DTYPES),
                    shared.choice(COUNTS),
                    shared.choice(OPS),
                    shared.randrange(2**30),
                )
                for _ in range(dice.randrange(3) * dice.randrange(200)):
                    pass
                found, expected = run(comm, call)
                assert torch.equal(found, expected), call

    ranks(body, 3)
