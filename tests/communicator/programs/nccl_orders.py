"""Random orders of what a communicator over NCCL is asked, against a model of what must happen.

    python nccl_orders.py STAND_IN

The stand-in (nccl_stand_in.c, with CUDA) notes when a communicator is used after its end.
"""

import ctypes
import itertools
import sys
from collections import Counter

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.communicator.backends.nccl.nccl_host import STREAM, Host

OK, INVALID_USAGE, REMOTE = 0, 5, 6
SHORT_MS, LONG_MS = 2, 60_000  # a refused end waits that long for graphs, up to a second
FLOAT32, SUM = 7, 0
OTHER_STREAM = 0xBEEF
STREAMS = st.sampled_from([STREAM, OTHER_STREAM])
COUNTS = st.sampled_from([10, 1000, 100_000])
captures = itertools.count(1)


class Model:
    """A communicator, and what is expected of it."""

    def __init__(self, host, handle, nranks):
        self.host, self.handle, self.nranks = host, handle, nranks
        self.number = host.stand_in.stand_in_num_comms() - 1
        self.is_over = False  # aborted, or broken at its end
        self.is_finalized = self.is_peer_dead = False
        self.connected, self.graphs, self.memory = set(), set(), []

    def call(self, entry, *values):
        wide = [ctypes.c_uint64(value) if isinstance(value, int) else value for value in values]
        return self.host.function(entry)(self.handle, *wide)


class Orders(RuleBasedStateMachine):
    comms = Bundle("comms")
    all_comms: list[Model]

    @initialize(
        target=comms,
        polls=st.integers(0, 3),
        num_calm=st.integers(0, 20),
        given_stream=st.sampled_from([0, OTHER_STREAM]),
    )
    def start(self, polls, num_calm, given_stream):
        """polls: how often NCCL answers that each call is in progress. num_calm: steps before the
        first death, abort or end, after which little can happen. given_stream: for all calls,
        instead of the caller's."""
        self.timeout_ms, self.num_calm = LONG_MS if polls else SHORT_MS, num_calm
        ctypes.CDLL(sys.argv[1]).stand_in_polls(polls)
        options = [f"stream={given_stream}"] if given_stream else []
        self.host = Host(sys.argv[1], *options, timeout_ms=self.timeout_ms, mode=ctypes.RTLD_GLOBAL)
        assert self.host.code == OK, self.host.error
        self.host.stand_in.stand_in_misuse.restype = ctypes.c_char_p
        self.given_stream, self.capture, self.captured_stream = given_stream, 0, 0
        self.calls = Counter()  # by stream, and the graph that has them, or 0
        self.all_comms = [Model(self.host, self.host.comm, 4)]
        return self.all_comms[0]

    @rule(comm=comms, count=COUNTS, stream=STREAMS)
    def reduce(self, comm, count, stream):
        if comm.is_finalized:
            return
        code = comm.call("allreduce", 64, 64, count, FLOAT32, SUM, stream)
        if comm.is_over:
            assert code == REMOTE
            return
        stream = self.given_stream or stream
        graph = self.capture if stream == self.captured_stream else 0
        expected = REMOTE if comm.is_peer_dead else OK
        if graph:
            comm.graphs.add(graph)
            if comm.nranks > 1 and count not in comm.connected:
                expected = INVALID_USAGE
        else:
            comm.connected.add(count)
        self.calls[stream, graph] += expected != INVALID_USAGE
        assert code == expected

    @precondition(lambda self: not self.capture)
    @rule(stream=STREAMS)
    def begin_capture(self, stream):
        self.set_capture(stream, next(captures))

    def set_capture(self, stream, graph):
        self.captured_stream, self.capture = stream, graph
        self.host.stand_in.stand_in_capture_on(ctypes.c_void_p(stream), ctypes.c_ulonglong(graph))

    @precondition(lambda self: self.capture)
    @rule(is_kept=st.booleans())
    def end_capture(self, is_kept):
        graph = self.capture
        self.set_capture(self.captured_stream, 0)
        if not is_kept:
            self.end_graph(graph)

    @precondition(lambda self: not self.capture)
    @rule(comm=comms, count=COUNTS, stream=STREAMS)
    def make_graph(self, comm, count, stream):
        """The same call outside of a capture, then inside."""
        self.reduce(comm, count, stream)
        self.begin_capture(self.given_stream or stream)
        self.reduce(comm, count, stream)
        self.end_capture(True)

    def end_graph(self, graph):
        holders = [comm for comm in self.all_comms if graph in comm.graphs]
        ended = self.host.stand_in.stand_in_end_graphs(ctypes.c_ulonglong(graph))
        assert ended == len(holders)
        for comm in holders:
            comm.graphs.remove(graph)

    @precondition(lambda self: any(comm.graphs - {self.capture} for comm in self.all_comms))
    @rule(data=st.data())
    def end_one_graph(self, data):
        graphs = set().union(*(comm.graphs for comm in self.all_comms)) - {self.capture}
        self.end_graph(data.draw(st.sampled_from(sorted(graphs))))

    @precondition(lambda self: any(comm.graphs - {self.capture} for comm in self.all_comms))
    @rule(data=st.data())
    def replay(self, data):
        """Kernels of the graph run, or wait for a dead peer until the communicator is aborted."""
        graphs = set().union(*(comm.graphs for comm in self.all_comms)) - {self.capture}
        graph = data.draw(st.sampled_from(sorted(graphs)))
        self.host.stand_in.stand_in_replay(ctypes.c_ulonglong(graph))

    @precondition(lambda self: not self.capture)
    @rule(comm=comms)
    def allocate(self, comm):
        if comm.is_finalized:
            return
        pointer = ctypes.c_void_p()
        code = comm.call("mem_alloc", 4096, ctypes.byref(pointer))
        assert code == (REMOTE if comm.is_over or comm.is_peer_dead else OK)
        if code == OK:
            comm.memory.append(pointer.value)

    @precondition(lambda self: not self.capture)
    @rule(comm=comms)
    def free(self, comm):
        if comm.memory and not comm.is_finalized:
            code = comm.call("mem_free", comm.memory.pop())
            assert code == (REMOTE if comm.is_over or comm.is_peer_dead else OK)

    @precondition(lambda self: not self.capture and len(self.all_comms) < 4)
    @rule(target=comms, comm=comms)
    def split(self, comm):
        child = ctypes.c_void_p()
        if comm.is_finalized:
            return comm
        code = comm.call("split", 0, 0, ctypes.byref(child))
        assert code == (REMOTE if comm.is_over or comm.is_peer_dead else OK)
        if code != OK:
            return comm
        self.all_comms.append(Model(self.host, child, 1))
        return self.all_comms[-1]

    @precondition(lambda self: self.num_calm < 0)
    @rule(comm=comms)
    def peer_dies(self, comm):
        """Of this communicator; the others do not notice."""
        self.host.stand_in.stand_in_lose_peers_of(comm.number, REMOTE)
        comm.is_peer_dead = True

    @rule(comm=comms)
    def ask_for_errors(self, comm):
        if not comm.is_finalized:
            is_bad = comm.is_over or comm.is_peer_dead
            assert comm.call("async_error") == (REMOTE if is_bad else OK)

    @precondition(lambda self: self.num_calm < 0)
    @rule(comm=comms)
    def abort(self, comm):
        assert comm.call("abort") == OK
        comm.is_over = comm.is_over or not comm.is_finalized

    @precondition(lambda self: not self.capture)
    @rule(comm=comms)
    def finalize(self, comm):
        if self.timeout_ms == LONG_MS if comm.graphs else self.num_calm >= 0:
            return
        code = comm.call("finalize")
        if comm.is_over or comm.is_finalized:
            assert code == OK
        elif comm.graphs:
            assert code == INVALID_USAGE
        elif comm.is_peer_dead:
            assert code == REMOTE
            comm.is_over = comm.is_finalized = True
        else:
            assert code == OK
            comm.is_finalized = True

    @invariant()
    def nothing_is_used_after_its_end(self):
        if hasattr(self, "all_comms"):
            self.num_calm -= 1
            assert self.host.stand_in.stand_in_misuse() == b""

    @invariant()
    def every_call_is_where_it_was_put(self):
        for (stream, graph), count in getattr(self, "calls", {}).items():
            place = ctypes.c_void_p(stream), ctypes.c_ulonglong(graph)
            assert self.host.stand_in.stand_in_calls(*place) == count

    def teardown(self):
        if not hasattr(self, "all_comms"):
            return
        self.set_capture(self.captured_stream, 0)
        for comm in self.all_comms:
            assert comm.call("destroy") == OK
        self.host.stand_in.stand_in_end_graphs(ctypes.c_ulonglong(0))
        misuse = self.host.stand_in.stand_in_misuse()
        self.host.log()  # which forgets it
        assert misuse == b""


if __name__ == "__main__":
    run_state_machine_as_test(
        Orders,
        settings=settings(
            max_examples=300,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # shrinking a failure would outlast the test's time
            suppress_health_check=list(HealthCheck),
        ),
    )
