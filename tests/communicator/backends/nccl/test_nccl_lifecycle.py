"""How a communicator over NCCL begins and ends, with a stand-in library that moves nothing."""

import contextlib
import ctypes
import gc
import json
import threading
import time
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

from communicator import (
    Communicator,
    CommunicatorError,
    CommunicatorTimeout,
    PeerLost,
    Unsupported,
    timings,
)
from communicator.backends import nccl
from communicator.backends.nccl import Nccl
from coordinator import Coordinator, FailureReason, RankFailure
from tests.communicator.backends.nccl import cuda_on_cpu, nccl_host

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a real device would not do for the stand-in"
)
SOON_S = 10.0


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return str(nccl_host.compile_stand_in(tmp_path_factory.mktemp("stand_in")))


@pytest.fixture
def path(built):
    """A stand-in that has been asked nothing yet."""
    library = ctypes.CDLL(built)
    library.stand_in_forget()
    library.stand_in_fail_with(0)
    return built


def log_of(path):
    """What the stand-in was asked since the last time."""
    library = ctypes.CDLL(path)
    library.stand_in_log.restype = ctypes.c_char_p
    lines = library.stand_in_log().decode().splitlines()
    library.stand_in_forget()
    return lines


def test_close_finalizes_and_destroys_once(path):
    with Coordinator() as coor:
        comm = Communicator._of(Nccl, coor, library=path)
        comm.close()
        comm.close()
    assert log_of(path) == ["CommInitRankConfig nranks=1 rank=0", "CommFinalize", "CommDestroy"]


def test_a_forgotten_communicator_warns_and_asks_nothing_of_nccl(path):
    with Coordinator() as coor:
        comm = Communicator._of(Nccl, coor, library=path)
        log_of(path)
        with pytest.warns(ResourceWarning, match="rank 0: .* was forgotten without close"):
            del comm
            gc.collect()
    assert log_of(path) == []


def test_leaving_because_of_an_error_aborts_and_waits_for_nobody(path):
    with (
        Coordinator() as coor,
        pytest.raises(ZeroDivisionError),
        Communicator._of(Nccl, coor, library=path),
    ):
        log_of(path)
        raise ZeroDivisionError
    assert log_of(path) == ["CommAbort"]


class FailsToStart(Nccl):
    """On rank 1 fails once NCCL has started."""

    def _init(self, name, unique_id, options):
        super()._init(name, unique_id, options)
        if self.rank == 1:
            raise CommunicatorError("no more room")


def test_if_one_rank_cannot_start_the_others_take_theirs_back(path, ranks):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            with pytest.raises(CommunicatorError, match="no more room"):
                Communicator._of(FailsToStart, coor, library=path)
            return "told"

    assert ranks(body, 3) == ["told"] * 3
    assert log_of(path).count("CommAbort") == 3


def test_a_peer_that_is_lost_before_the_watchdog_starts_leaves_nothing_open(path, monkeypatch):
    """NCCL's communicator was, with its memory of the device."""

    def fail(coor):
        raise PeerLost("rank 1 has died.")

    monkeypatch.setattr(nccl, "ExitNotice", fail)
    with Coordinator() as coor, pytest.raises(PeerLost, match=r"rank 1 has died\."):
        Communicator._of(Nccl, coor, library=path)
    assert log_of(path)[1:] == ["CommAbort"]


def test_a_call_that_nccl_puts_off_waits_as_long_as_was_set_last(path):
    """It waited as long as was said when the communicator was made."""
    library = ctypes.CDLL(path)
    with (
        Coordinator() as coor,
        Communicator._of(Nccl, coor, library=path, timeout_s=3) as comm,
    ):
        comm.set_timeout(0.2)
        library.stand_in_polls(1 << 30)
        try:
            with pytest.raises(CommunicatorTimeout, match="did not complete within 200 ms"):
                comm.split([0])
        finally:
            library.stand_in_polls(3)
            comm.abort()


def test_after_abort_every_call_says_why_and_close_is_quiet(path):
    with Coordinator() as coor:
        comm = Communicator._of(Nccl, coor, library=path)
        comm.abort()
        with pytest.raises(PeerLost, match=r"rank 0: this communicator has ended: abort\(\) was"):
            comm.allreduce(torch.ones(3))
        comm.close()
    assert log_of(path)[1:] == ["CommAbort"]


def test_a_dead_peer_ends_the_communicator_and_is_named(path, ranks):
    def body(info):
        with (
            Coordinator(info, timeout_s=20) as coor,
            Communicator._of(Nccl, coor, library=path) as comm,
        ):
            lose_the_other(comm)
            with pytest.raises(PeerLost, match=rf"a peer died\. Lost: rank {1 - info.rank} "):
                comm.allreduce(torch.ones(3))
            return True

    assert ranks(body, 2) == [True, True]


RANK_9 = RankFailure(9, types.SimpleNamespace(rank=9), FailureReason.EXITED, text="rank 9")


def lost_peers_of(comm, rank):
    peer = comm.coor.peers[rank]
    return (RankFailure(rank, peer, FailureReason.EXITED, text=str(peer)),)


def lose_the_other(comm):
    lose(comm, 1 - comm.rank)


def lose(comm, rank):
    """Let the watch see a rank dead, and wait until it has ended the communicator."""
    comm._backend._lost_peers = lambda: lost_peers_of(comm, rank)
    deadline = time.monotonic() + SOON_S
    while not comm._backend._end_reason and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.parametrize("flags", [(), ("REVOKE_TAKES=2",)])
def test_a_revoked_communicator_is_shrunk_to_the_ranks_that_are_left(flags, tmp_path, ranks):
    path = str(nccl_host.compile_stand_in(tmp_path, *flags))

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, contextlib.ExitStack() as stack:
            options = {"library": path, "revoke": True}
            old = stack.enter_context(Communicator._of(Nccl, coor, **options))
            part = coor.split([0, 2])
            if part is None:
                return old.abort()
            stack.enter_context(part)
            lose(old, 1)
            with pytest.raises(PeerLost, match=r"a peer died\. Lost: rank 1 "):
                old.allreduce(torch.ones(3))
            new = stack.enter_context(Communicator._of(Nccl, part, shrink_of=old, **options))
            new.check()
            new.close()
            old.close()
            return new.rank, new.world_size

    assert ranks(body, 3) == [(0, 2), None, (1, 2)]
    calls = Counter(line.split()[0] for line in log_of(path))
    assert calls["CommInitRankConfig"] == calls["CommRevoke"] == calls["CommAbort"] == 3
    assert calls["CommShrink"] == calls["CommFinalize"] == calls["CommDestroy"] == 2


def test_a_rank_that_hears_of_a_loss_last_shrinks_with_the_others(path, ranks):
    """It was refused, and the others waited for it."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, contextlib.ExitStack() as stack:
            options = {"library": path, "revoke": True}
            old = stack.enter_context(Communicator._of(Nccl, coor, **options))
            part = coor.split([0, 2])
            if part is None:
                return old.abort()
            stack.enter_context(part)
            delay_s = timings.TIMINGS.watchdog_grace_s / 2 if info.rank == 2 else 0
            threading.Timer(delay_s, lose, (old, 1)).start()
            new = stack.enter_context(Communicator._of(Nccl, part, shrink_of=old, **options))
            new.close()
            with pytest.raises(PeerLost, match="a peer died"):
                old.close()
            return new.world_size

    assert ranks(body, 3) == [2, None, 2]


def test_a_library_that_cannot_revoke_is_refused_on_every_rank(tmp_path, ranks):
    library = str(nccl_host.compile_stand_in(tmp_path, "NO_REVOKE"))

    def body(info):
        with (
            Coordinator(info, timeout_s=20) as coor,
            pytest.raises(Unsupported, match=r"revoke is not supported by NCCL 2\.28\.9"),
        ):
            Communicator._of(Nccl, coor, library=library, revoke=True)
        return True

    assert ranks(body, 2) == [True, True]


def test_where_revoking_fails_the_communicator_is_aborted_and_cannot_be_shrunk(tmp_path, ranks):
    library = str(nccl_host.compile_stand_in(tmp_path, "REVOKE_ANSWERS=3"))

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, coor.split([info.rank]) as alone:
            old = Communicator._of(Nccl, coor, library=library, revoke=True)
            lose(old, 1 - info.rank)
            with pytest.raises(CommunicatorError, match="could not be revoked: stand-in error"):
                Communicator._of(Nccl, alone, library=library, shrink_of=old)
            with pytest.raises(PeerLost, match="a peer died"):
                old.close()
            with pytest.raises(CommunicatorError, match="before it is closed"):
                Communicator._of(Nccl, alone, library=library, shrink_of=old)
        return True

    assert ranks(body, 2) == [True, True]


def test_only_what_has_lost_ranks_is_shrunk(path):
    with (
        Coordinator() as coor,
        Communicator._of(Nccl, coor, library=path, revoke=True) as whole,
        Communicator(coor, "gloo") as other,
    ):
        for old in (whole, other):
            with pytest.raises(CommunicatorError, match=r"its ranks \[0\] of 1, over (nccl|gloo)"):
                Communicator._of(Nccl, coor, library=path, shrink_of=old)


def test_leaving_after_a_loss_does_not_hide_the_error_that_is_under_way(path):
    with Coordinator() as coor:
        warned = pytest.warns(RuntimeWarning, match=r"rank 0: .* a peer died\. Lost: rank 9\.")
        with (
            warned,
            pytest.raises(ZeroDivisionError),
            Communicator._of(Nccl, coor, library=path) as comm,
        ):
            comm.abort_because(PeerLost("a peer died. Lost: rank 9."))
            raise ZeroDivisionError
        comm = Communicator._of(Nccl, coor, library=path)
        with pytest.warns(RuntimeWarning), pytest.raises(ZeroDivisionError):
            try:
                comm.abort_because(PeerLost("a peer died. Lost: rank 9."))
                raise ZeroDivisionError
            finally:
                comm.close()
        assert comm._closed


def test_an_end_that_fails_names_the_dead_and_closes(path):
    with Coordinator() as coor:
        comm = Communicator._of(Nccl, coor, library=path)
        comm._backend._comm = types.SimpleNamespace(finalize=fail, abort=quietly, close=quietly)
        comm._backend._await_lost_peers = lambda: (RANK_9,)
        with pytest.raises(PeerLost, match=r"remote error\. Lost: rank 9\.$"):
            comm.close()
        assert comm._closed


def test_close_names_peers_that_died_and_none_that_had_closed(warm, path):
    """Rank 1 is a process that closes and exits, is killed, or exits without closing."""
    program = Path(__file__).parents[2] / "programs" / "nccl_ends.py"
    done = warm.run(program, path)
    said = dict(map(json.loads, done.stdout.splitlines()))
    assert said.pop("leave", None) == "" and len(said) == 2, (said, done.stderr)
    for text in said.values():
        assert text.startswith("rank 0: this communicator has ended: a peer died. Lost: rank 1 (")


def fail(*values):
    raise PeerLost("rank 0: remote error.")


def quietly():
    pass


def test_an_allreduce_that_fails_names_the_dead_or_says_what_ended_the_communicator(path):
    with Coordinator() as coor, Communicator._of(Nccl, coor, library=path) as comm:
        kept, comm._backend._comm = comm._backend._comm, types.SimpleNamespace(allreduce=fail)
        allreduce, comm._backend._comm = nccl._fast_allreduce(comm._backend), kept
        comm._backend._await_lost_peers = lambda: (RANK_9,)
        with pytest.raises(PeerLost, match=r"remote error\. Lost: rank 9\.$"):
            allreduce(torch.ones(3))
        comm.abort()
        with pytest.raises(PeerLost, match=r"this communicator has ended: abort\(\) was called"):
            allreduce(torch.ones(3))


def test_an_error_that_nccl_meets_by_itself_ends_the_communicator_and_names_the_dead(path, ranks):
    """Who is gone may be seen a moment after its sockets are closed."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            comm = Communicator._of(Nccl, coor, library=path)
            comm._backend._lost_peers = lambda: ()
            comm._backend._await_lost_peers = lambda: (RANK_9,)
            coor.barrier()
            ctypes.CDLL(path).stand_in_fail_with(6)
            deadline = time.monotonic() + SOON_S
            while not comm._backend._end_reason and time.monotonic() < deadline:
                time.sleep(0.02)
            coor.barrier()
            with pytest.raises(PeerLost, match=r"remote error.*Lost: rank 9\."):
                comm.close()
            return True

    assert ranks(body, 2) == [True, True]


def test_split_makes_a_child_with_ranks_of_its_own(path):
    with Coordinator() as coor, Communicator._of(Nccl, coor, library=path) as comm:
        child = comm.split([0])
        assert (child.rank, child.world_size) == (0, 1)
        child.close()
        with pytest.raises(CommunicatorError, match="split on a closed Communicator"):
            child.split([0])
        assert log_of(path)[1:] == ["CommSplit color=0 key=0", "CommFinalize", "CommDestroy"]


def test_a_part_is_revoked_and_asks_ras_as_the_whole_does(path):
    """It was aborted, and could not be shrunk."""
    options = {"library": path, "revoke": True, "ras": "localhost:28028"}
    with Coordinator() as coor, Communicator._of(Nccl, coor, **options) as comm:
        with comm.split([0]) as part:
            log_of(path)
            part.abort()
            assert log_of(path)[0].startswith("CommRevoke")
        assert part._backend._ras_address == "localhost:28028"


def test_ranks_that_split_into_parts_of_their_own_at_once_are_not_one_part(path, ranks):
    """As tensor groups of an engine: NCCL made one communicator of all ranks with a color."""

    def body(info):
        with (
            Coordinator(info, timeout_s=20) as coor,
            Communicator._of(Nccl, coor, library=path) as comm,
        ):
            coor.barrier()
            if coor.is_master():
                log_of(path)
            coor.barrier()
            comm.split([2, 0] if comm.rank in (0, 2) else [1, 3]).close()
            coor.barrier()
            return [line for line in log_of(path) if "Split" in line] if coor.is_master() else None

    lines = [f"CommSplit color={color} key={key}" for color in (0, 1) for key in (0, 1)]
    assert sorted(ranks(body, 4)[0]) == lines


@pytest.mark.parametrize("call", ["empty", "split", "synchronize"])
def test_what_would_break_a_capture_is_refused_inside_of_one(path, monkeypatch, call):
    with Coordinator() as coor, Communicator._of(Nccl, coor, library=path) as comm:
        log_of(path)
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_available", lambda: True)
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(CommunicatorError, match=f"rank 0: {call} inside the capture"):
                getattr(comm, call)([0])
        assert log_of(path) == []


def test_a_scaled_sum_is_made_in_the_dtype_it_is_for(path):
    with Coordinator() as coor, Communicator._of(Nccl, coor, library=path) as comm:
        log_of(path)
        assert comm.scaled_sum(0.5, torch.float32) == 5
        assert log_of(path) == ["RedOpCreatePreMulSum scale=0.5 dtype=7 residence=1"]


def test_a_tensor_on_the_cpu_is_refused(path):
    with Coordinator() as coor, Communicator._of(Nccl, coor, library=path) as comm:
        log_of(path)
        with pytest.raises(ValueError, match=r"rank 0, allreduce: the tensor is on cpu, .*cuda:0"):
            comm.allreduce(torch.ones(3))
        assert log_of(path) == []


def test_mismatched_calls_raise_before_nccl_is_called(path, ranks):
    def body(info):
        with (
            Coordinator(info, timeout_s=20) as coor,
            Communicator._of(Nccl, coor, library=path) as comm,
        ):
            comm._backend.check_tensor = lambda call, tensor: (
                None
            )  # there is no GPU whose tensors to give
            coor.barrier()
            log_of(path)
            coor.barrier()
            with pytest.raises(CommunicatorError, match=r"call 1: .* of \(3,\).* of \(4,\)"):
                comm.allreduce(torch.ones(3 + info.rank))
            coor.barrier()
            assert log_of(path) == []
            coor.barrier()

    ranks(body, 2)


def test_a_capture_is_not_compared(path, ranks):
    def body(info):
        with (
            Coordinator(info, timeout_s=20) as coor,
            Communicator._of(Nccl, coor, library=path) as comm,
        ):
            comm._backend.is_capturing = lambda: True
            if info.rank == 0:
                with pytest.raises(ValueError, match="the tensor is on cpu"):  # by the library
                    comm.allreduce(torch.ones(3))
            return comm._backend.call_checker._number

    assert ranks(body, 2) == [0, 0]


@pytest.mark.parametrize("name", ["allreduce", "gather"])
def test_a_call_that_others_capture_raises_long_before_the_deadline(path, ranks, name):
    """Who captures compares nothing, so the rank that does not would wait for a word from it."""

    def body(info):
        with (
            Coordinator(info, timeout_s=60) as coor,
            Communicator._of(Nccl, coor, library=path) as comm,
        ):
            comm._backend.check_tensor = lambda call, tensor: None
            if info.rank == 1:
                comm._backend.is_capturing = lambda: True
                with pytest.raises(ValueError, match="the tensor is on cpu"):  # by the library
                    getattr(comm, name)(torch.ones(3))
            else:
                start = time.monotonic()
                words = rf"rank 0: call 1, {name} .* and rank 1 .*captured a call in a CUDA graph"
                with pytest.raises(CommunicatorError, match=words):
                    getattr(comm, name)(torch.ones(3))
                assert time.monotonic() - start < SOON_S
            coor.barrier()
            comm._backend.is_capturing = lambda: False
            if info.rank == 1:
                with pytest.raises(CommunicatorError, match="outside of any capture"):
                    getattr(comm, name)(torch.ones(3))

    ranks(body, 2)


def test_ranks_that_have_captured_wait_for_those_that_still_do(path, ranks):
    def body(info):
        with (
            Coordinator(info, timeout_s=20) as coor,
            Communicator._of(Nccl, coor, library=path) as comm,
        ):
            comm._backend.check_tensor = lambda call, tensor: None
            comm._backend.is_capturing = lambda: True
            with pytest.raises(ValueError, match="the tensor is on cpu"):
                comm.allreduce(torch.ones(3))
            comm._backend.is_capturing = lambda: False
            if info.rank == 1:
                time.sleep(1.5 * timings.TIMINGS.call_check_poll_s)
            with pytest.raises(ValueError, match="the tensor is on cpu"):  # compared, and passed on
                comm.allreduce(torch.ones(3))

    ranks(body, 2)


@pytest.mark.parametrize("end", ["abort", "death"])
def test_a_comparison_that_waits_ends_with_the_communicator(path, ranks, end):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            comm = Communicator._of(Nccl, coor, library=path)
            comm._backend.check_tensor = lambda call, tensor: None
            if info.rank == 0:
                if end == "death":
                    comm._backend._lost_peers = lambda: lost_peers_of(comm, 1)
                else:
                    threading.Timer(0.1, comm.abort).start()
                start = time.monotonic()
                words = "abort" if end == "abort" else "Lost: rank 1 "
                with pytest.raises(PeerLost, match=words):
                    comm.allreduce(torch.ones(3))
                assert time.monotonic() - start < SOON_S
                assert comm._interceptors == ()
            coor.barrier()
            comm.abort()
            comm.close()

    ranks(body, 2)


def test_if_one_rank_has_no_free_memory_no_rank_registers_and_all_raise(path, ranks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)

    def body(info):
        with (
            Coordinator(info, timeout_s=20) as coor,
            Communicator._of(Nccl, coor, library=path) as comm,
        ):
            if info.rank == 1:
                attempt = comm.library.try_mem_alloc
                comm.library.try_mem_alloc = lambda nbytes: attempt(1 << 41)
            coor.barrier()
            log_of(path)
            coor.barrier()
            with pytest.raises(
                CommunicatorError, match=r"rank 1.* all ranks or none: ncclMemAlloc"
            ):
                comm.empty(10)
            coor.barrier()
            asked = [line.split()[0] for line in log_of(path)] if info.rank == 0 else None
            coor.barrier()
            return asked

    assert sorted(ranks(body, 2)[0]) == ["MemAlloc", "MemAlloc", "MemFree"]


def test_python_that_runs_while_an_error_is_raised_may_call_the_same_communicator(path):
    """As garbage may. The error was raised under the lock of the call, for which it then waited."""

    def describe_failure():
        ctypes.CDLL(path).stand_in_fail_with(0)
        comm._backend._comm.mem_free(address)
        return "asked"

    def fail():
        with contextlib.suppress(PeerLost):
            comm._backend._comm.scaled_sum(torch.tensor(1.0))

    with Coordinator() as coor, Communicator._of(Nccl, coor, library=path) as comm:
        address = comm.mem_alloc(4096)
        coor.describe_failure = describe_failure
        ctypes.CDLL(path).stand_in_fail_with(6)
        log_of(path)
        thread = threading.Thread(target=fail, daemon=True)
        thread.start()
        thread.join(SOON_S)
        assert not thread.is_alive() and log_of(path)[-1] == "MemFree"


def test_an_error_that_is_looked_for_is_raised_once_other_calls_may_be_made(path, monkeypatch):
    """It was raised under the lock of the calls, which garbage and the error itself may make."""

    def init(error, text):
        init_before(error, text)
        ctypes.CDLL(path).stand_in_fail_with(0)
        comm._backend._comm.mem_free(address)

    def look():
        try:
            raise KeyError  # within whose handler Python makes the next one at once
        except KeyError:
            with contextlib.suppress(PeerLost):
                comm._backend._comm.async_error()

    with Coordinator() as coor, Communicator._of(Nccl, coor, library=path) as comm:
        address = comm.mem_alloc(4096)
        init_before = PeerLost.__init__
        monkeypatch.setattr(PeerLost, "__init__", init)
        ctypes.CDLL(path).stand_in_fail_with(6)
        log_of(path)
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(SOON_S)
        assert not thread.is_alive() and log_of(path)[-1] == "MemFree"


def test_memory_that_is_dropped_waits_for_a_call_that_may_wait_for_the_device(path, monkeypatch):
    """Garbage may be collected while any thread captures, and waiting would end that capture."""
    cuda_on_cpu.install(monkeypatch)
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    with Coordinator() as coor, Communicator._of(Nccl, coor, library=path) as comm:
        memory = comm._backend._memory
        monkeypatch.setattr(memory, "empty", lambda shape, dtype: "made")
        addresses = [comm.mem_alloc(4096) for _ in range(3)]
        log_of(path)
        memory.drop(addresses[0])
        assert log_of(path) == [] == waits
        assert comm.empty(1) == "made"
        assert log_of(path) == ["CommWindowDeregister", "MemFree"] and len(waits) == 1
        memory.drop(addresses[1])
        comm.close()
        assert log_of(path)[:3] == ["CommWindowDeregister", "MemFree", "CommWindowDeregister"]
        memory.drop(addresses[2])
        assert log_of(path) == ["MemFree"] and len(waits) == 3


def test_after_close_memory_is_not_freed_while_its_thread_captures(path, monkeypatch):
    cuda = cuda_on_cpu.install(monkeypatch)
    with Coordinator() as coor, Communicator._of(Nccl, coor, library=path) as comm:
        memory, address = comm._backend._memory, comm.mem_alloc(4096)
        comm.close()
        log_of(path)
        cuda.current.is_capturing = True
        memory.drop(address)
        assert log_of(path) == []
        cuda.current.is_capturing = False
        memory.free_dropped()
        assert log_of(path) == ["MemFree"]


def test_the_last_views_may_end_on_two_threads_after_close(path, monkeypatch):
    cuda_on_cpu.install(monkeypatch)
    with Coordinator() as coor, Communicator._of(Nccl, coor, library=path) as comm:
        memory, address = comm._backend._memory, comm.mem_alloc(4096)
        comm.close()
        other = [comm.library.mem_free]  # the other thread comes when this one has looked
        monkeypatch.setattr(
            torch.cuda,
            "is_current_stream_capturing",
            lambda: other.pop()(memory._dropped.pop()) is not None if other else False,
        )
        log_of(path)
        memory.drop(address)
        assert log_of(path) == ["MemFree"]


def test_what_was_dropped_before_an_abort_is_freed_by_close(path, monkeypatch):
    cuda_on_cpu.install(monkeypatch)
    with Coordinator() as coor, Communicator._of(Nccl, coor, library=path) as comm:
        comm._backend._memory.drop(comm.mem_alloc(4096))
        comm.abort()
        log_of(path)
        comm.close()
        assert log_of(path) == ["MemFree"]


def test_free_memory_is_probed_and_freed(path):
    library = nccl.NcclLibrary(path)
    library.try_mem_alloc(4096)
    with pytest.raises(Unsupported, match=r"ncclMemAlloc of NCCL 2\.28\.9"):
        library.try_mem_alloc(1 << 41)
    assert log_of(path) == ["MemAlloc 4096", "MemFree", f"MemAlloc {1 << 41}"]
