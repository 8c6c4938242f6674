"""Random operations, one after another on one communicator, never disagree with torch."""

import socket
import uuid
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from communicator import Communicator
from coordinator import Coordinator
from launcher import LaunchInfo

FLOATS = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
REDUCTIONS = [
    *((dtype, op) for dtype in FLOATS for op in ("sum", "prod", "max", "min", "avg")),
    *((dtype, op) for dtype in INTEGERS for op in ("sum", "prod", "max", "min")),
    *((torch.bool, op) for op in ("prod", "max", "min")),
    (torch.complex64, "sum"),
    (torch.complex128, "sum"),
]
MOVED = (torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *MOVED)
NODES = [[2], [3], [4], [5], [6], [7], [1, 2], [3, 2], [2, 2, 3]]

shapes = st.one_of(
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.integers(1000, 40_000).map(lambda count: (count,)),
)
seeds = st.integers(0, 2**20)
steps = st.integers(0, 6)


class Ranks:
    """A thread for each rank, with a communicator; run(fn) is fn(comm) on each, by rank."""

    def __init__(self, nodes, backend):
        self.world_size = sum(nodes)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        port, launch_id = self.listener.getsockname()[1], uuid.uuid4().hex
        places = [(local, size) for size in nodes for local in range(size)]
        infos = [
            LaunchInfo(launch_id, self.world_size, size, rank, local, "127.0.0.1", port, extras)
            for rank, (local, size) in enumerate(places)
            for extras in [{"master_fd": str(self.listener.fileno())} if rank == 0 else {}]
        ]
        self.threads = [ThreadPoolExecutor(1) for _ in infos]
        self.coors = self.each(lambda info: Coordinator(info, timeout_s=30), infos)
        self.comms = self.each(lambda coor: Communicator(coor, backend), self.coors)

    def each(self, fn, arguments):
        futures = [
            thread.submit(fn, argument)
            for thread, argument in zip(self.threads, arguments, strict=True)
        ]
        return [future.result(timeout=60) for future in futures]

    def run(self, fn):
        return self.each(fn, self.comms)

    def close(self):
        self.each(lambda comm: comm.close(), self.comms)
        self.each(lambda coor: coor.close(), self.coors)
        for thread in self.threads:
            thread.shutdown()
        self.listener.close()


def values(seed, rank, shape, dtype):
    """Small whole numbers: every order of adding gives the same."""
    generator = torch.Generator().manual_seed(seed + 7919 * rank)
    if dtype.is_complex:
        parts = torch.randint(-2, 3, (*shape, 2), generator=generator).to(dtype.to_real())
        return torch.view_as_complex(parts)
    low = -2 if dtype.is_signed else 0
    return torch.randint(low, 3, shape, generator=generator).to(dtype)


def reduced(parts, op):
    """The plain answer, rounded once."""
    dtype = parts[0].dtype
    if dtype.is_complex:
        return torch.stack(parts).sum(0)
    wide = torch.stack(parts).to(torch.float64 if dtype.is_floating_point else torch.int64)
    if op == "avg":
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        return (wide.sum(0).to(exact) / len(parts)).to(dtype)
    found = {
        "sum": lambda: wide.sum(0),
        "prod": lambda: wide.prod(0),
        "max": lambda: wide.amax(0),
        "min": lambda: wide.amin(0),
    }[op]()
    return found.to(dtype)


def same(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    return torch.equal(found, expected)


class RandomOperations(RuleBasedStateMachine):
    @initialize(nodes=st.sampled_from(NODES), slow=st.booleans())
    def open(self, nodes, slow):
        backend = "hybrid" if len(nodes) > 1 else "gloo" if slow else "shm"
        self.ranks = Ranks(nodes, backend)
        self.world_size = self.ranks.world_size

    def teardown(self):
        if hasattr(self, "ranks"):
            self.ranks.close()

    def parts(self, seed, shape, dtype):
        return [values(seed, rank, shape, dtype) for rank in range(self.world_size)]

    @rule(seed=seeds, shape=shapes, reduction=st.sampled_from(REDUCTIONS), in_place=st.booleans())
    def allreduce(self, seed, shape, reduction, in_place):
        dtype, op = reduction
        parts = self.parts(seed, shape, dtype)
        expected = reduced(parts, op)

        def body(comm):
            mine = parts[comm.rank].clone()
            out = None if in_place else torch.empty_like(mine)
            found = comm.allreduce(mine, op, out=out)
            return same(found, expected) and (in_place or same(mine, parts[comm.rank]))

        assert all(self.ranks.run(body))

    @rule(seed=seeds, shape=shapes, reduction=st.sampled_from(REDUCTIONS), step=steps)
    def reduce(self, seed, shape, reduction, step):
        dtype, op = reduction
        parts, dst = self.parts(seed, shape, dtype), step % self.world_size

        def body(comm):
            found = comm.reduce(parts[comm.rank].clone(), dst, op)
            return same(found, reduced(parts, op) if comm.rank == dst else parts[comm.rank])

        assert all(self.ranks.run(body))

    @rule(seed=seeds, shape=shapes, reduction=st.sampled_from(REDUCTIONS))
    def reduce_scatter(self, seed, shape, reduction):
        dtype, op = reduction
        parts = self.parts(seed, (self.world_size, *shape), dtype)
        expected = reduced(parts, op)
        assert all(
            self.ranks.run(
                lambda comm: same(comm.reduce_scatter(parts[comm.rank], op), expected[comm.rank])
            )
        )

    @rule(seed=seeds, shape=shapes, dtype=st.sampled_from(DTYPES), step=steps)
    def broadcast(self, seed, shape, dtype, step):
        parts, src = self.parts(seed, shape, dtype), step % self.world_size
        assert all(
            self.ranks.run(
                lambda comm: same(comm.broadcast(parts[comm.rank].clone(), src), parts[src])
            )
        )

    @rule(seed=seeds, shape=shapes, dtype=st.sampled_from(DTYPES))
    def allgather(self, seed, shape, dtype):
        parts = self.parts(seed, shape, dtype)
        rows = torch.stack(parts)
        assert all(self.ranks.run(lambda comm: same(comm.allgather(parts[comm.rank]), rows)))

    @rule(seed=seeds, shape=shapes, dtype=st.sampled_from(DTYPES))
    def alltoall(self, seed, shape, dtype):
        parts = self.parts(seed, (self.world_size, *shape), dtype)
        crossed = torch.stack(parts).transpose(0, 1)
        assert all(
            self.ranks.run(lambda comm: same(comm.alltoall(parts[comm.rank]), crossed[comm.rank]))
        )

    @rule(seed=seeds, shape=shapes, dtype=st.sampled_from(DTYPES), step=steps)
    def everyone_passes_on(self, seed, shape, dtype, step):
        """Each rank to the one that is some steps on, in one group."""
        parts, step = self.parts(seed, shape, dtype), 1 + step % (self.world_size - 1)

        def body(comm):
            found = torch.zeros_like(parts[0])
            src = (comm.rank - step) % self.world_size
            with comm.group():
                comm.send(parts[comm.rank], (comm.rank + step) % self.world_size)
                comm.recv(found, src)
            return same(found, parts[src])

        assert all(self.ranks.run(body))

    @rule(seed=seeds, shape=shapes, dtype=st.sampled_from(DTYPES), pair=st.tuples(steps, steps))
    def one_sends_to_another(self, seed, shape, dtype, pair):
        src = pair[0] % self.world_size
        dst = (src + 1 + pair[1] % (self.world_size - 1)) % self.world_size
        sent = values(seed, src, shape, dtype)

        def body(comm):
            if comm.rank == src:
                comm.send(sent, dst)
            return comm.rank != dst or same(comm.recv(torch.zeros_like(sent), src), sent)

        assert all(self.ranks.run(body))

    @rule()
    def barrier(self):
        self.ranks.run(lambda comm: comm.barrier())


TestRandomOperations = RandomOperations.TestCase
TestRandomOperations.settings = settings(
    max_examples=15,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
