"""Subscribers to failures of ranks: nobody needs to be in a call."""

import os
import signal
import threading
import time

import pytest

from coordinator import (
    Coordinator,
    CoordinatorError,
    CoordinatorTimings,
    FailureReason,
    PeerLost,
    RankFailure,
    _node_shm,
)
from coordinator.call_site import begin_call
from coordinator.failure.peer_monitor import ObservedRank

LIMIT_S = 30.0
LAYOUTS = {"one node": None, "two nodes": [2, 1]}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
SPEAKER = {**LAYOUTS, "its node's speaker": [2, 2]}  # of rank 2, whose failure it is
QUICK = CoordinatorTimings(suspended_s=0.6)
PATIENT = CoordinatorTimings(exit_notice_s=LIMIT_S, master_silent_s=LIMIT_S)


class Log:
    """The failures that a rank was called for; `wait` until there are so many."""

    def __init__(self):
        self.failures, self._changed = [], threading.Condition()

    def __call__(self, failure):
        with self._changed:
            self.failures.append((failure, time.time()))
            self._changed.notify_all()

    def wait(self, count=1):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.failures) >= count, LIMIT_S)
            return [failure for failure, _ in self.failures]

    def wait_for(self, rank):
        """The failure of this rank, and when (time.time())."""
        of_rank = lambda: [row for row in self.failures if row[0].rank == rank]  # noqa: E731
        with self._changed:
            assert self._changed.wait_for(of_rank, LIMIT_S)
            return of_rank()[0]


def failing(fork, layout, fail, timings=QUICK):
    """Reason, exit status, text and delay of rank 2's failure by fail(coor), on the others."""
    reading, writing = os.pipe()
    heard, hearing = os.pipe()

    def body(info):
        coor, log = Coordinator(info, timeout_s=20, timings=timings), Log()
        with coor.on_failure(log):
            coor.barrier()
            if coor.rank == 2:
                os.write(writing, str(time.time()).encode())
                fail(coor)
            failure, at = log.wait_for(2)
            os.write(hearing, b".")
            if coor.rank == 0:  # its server tells the others
                for _ in range(coor.world_size - 1):
                    os.read(heard, 1)
            return [failure.reason.value, failure.exit_status, failure.text, at]

    nodes = SPEAKER[layout]
    outcomes = fork(body, sum(nodes or [3]), nodes).outcomes(stragglers=[2])
    failed_at = float(os.read(reading, 100))
    for end in (reading, writing, heard, hearing):
        os.close(end)
    for outcome in (*outcomes[:2], *outcomes[3:]):
        assert not outcome.error, outcome.text
        *facts, at = outcome.value
        yield *facts, at - failed_at


@pytest.mark.parametrize("layout", SPEAKER)
def test_a_killed_rank_is_reported_to_all(fork, layout):
    for reason, status, text, _ in failing(
        fork, layout, lambda coor: os.kill(os.getpid(), signal.SIGKILL)
    ):
        assert (reason, status) == ("exited", -signal.SIGKILL)
        assert text.startswith("rank 2 (host") and "SIGKILL" in text


@every_layout
def test_an_exit_before_close_is_reported_with_its_code(fork, layout):
    for reason, status, *_ in failing(fork, layout, lambda coor: os._exit(3)):
        assert (reason, status) == ("exited", 3)


def close_and_exit(coor):
    coor.close()
    os._exit(0)


@every_layout
def test_a_clean_close_is_no_death(fork, layout):
    for reason, status, *_ in failing(fork, layout, close_and_exit, PATIENT):
        assert (reason, status) == ("left", None)


@pytest.mark.parametrize("layout", SPEAKER)
def test_a_suspended_rank_is_reported(fork, layout):
    for reason, _, text, after_s in failing(
        fork, layout, lambda coor: os.kill(os.getpid(), signal.SIGSTOP)
    ):
        assert reason == "suspended" and "suspended" in text
        assert after_s > 0.5


STOPPED_S = 1.5


def stop_for_a_while():
    """Suspend this process, and have a child let it go on."""
    if os.fork() == 0:
        time.sleep(STOPPED_S)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


@every_layout
def test_a_rank_that_is_suspended_for_less_than_the_patience_goes_on(fork, layout, monkeypatch):
    """A stall of 10 s, or a laptop's lid, ended a run, whatever its deadline was."""
    monkeypatch.setenv("DRUMLINE_PATIENCE", "20")

    def body(info):
        quick = CoordinatorTimings().scaled(0.3)
        with Coordinator(info, timeout_s=20, timings=quick) as coor:
            log = Log()
            with coor.on_failure(log):
                coor.barrier()
                if coor.rank == 2:
                    stop_for_a_while()
                begin = time.monotonic()
                coor.barrier()
                took_s = time.monotonic() - begin
            left = FailureReason.LEFT  # which a rank may do before another's block ends
            return [failure.text for failure, _ in log.failures if failure.reason != left], took_s

    outcomes = fork(body, 3, LAYOUTS[layout]).outcomes()
    for outcome in outcomes:
        assert not outcome.error, outcome.text
        assert outcome.value[0] == []
    assert outcomes[0].value[1] > STOPPED_S / 2


@every_layout
def test_what_any_rank_reports_all_ranks_hear(fork, layout):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            log = Log()
            with coor.on_failure(log) as subscription:
                coor.barrier()
                if coor.rank == 1:
                    coor.report_failure(2, "on fire")
                if coor.rank == 2:
                    return coor.wait("never", timeout_s=LIMIT_S)
                failure, _ = log.wait_for(2)
                assert failure in subscription.failures
                return [failure.rank, failure.reason.value, "on fire" in failure.text]

    zero, one, two = fork(body, 3, LAYOUTS[layout]).outcomes()
    assert zero.value == one.value == [2, "reported", True], (zero, one)
    assert two.error == "PeerLost" and "on fire" in two.text


def test_a_rank_that_only_others_cannot_reach_is_reported_after_the_time_that_was_asked_for(ranks):
    """At each look it seemed to have become unreachable at that moment."""
    is_over = threading.Event()

    def body(info):
        with Coordinator(info) as coor:
            coor.barrier()
            if coor.is_master():
                reason = FailureReason.UNREACHABLE
                lost = ObservedRank(coor.peers[1], "is cut off", None, reason)
                coor._detector.fail(PeerLost, [lost], begin_call("recv", 1, 1.0))
                with coor.on_failure(log := Log(), unreachable_s=0.6):
                    (failure,) = log.wait()
                is_over.set()
                assert failure.reason is reason and failure.since_s >= 0.6
            assert is_over.wait(2 * LIMIT_S)

    ranks(body, 2)


def test_an_exception_of_one_rank_is_reported_with_its_cause(ranks):
    """Rank 2 left because it lost rank 3: rank 3 is named first."""
    with_cause = []

    def body(info):
        log = Log()
        with Coordinator(info) as coor, coor.on_failure(log):
            coor.barrier()
            if coor.rank == 2:
                peer = coor.peers[3]
                failure = RankFailure(3, peer, FailureReason.EXITED)
                raise ValueError("no more") from PeerLost("lost rank 3", [failure])
            first = log.wait(1 if coor.rank == 3 else 2)
            with_cause.append([failure.rank for failure in first if failure.rank in (2, 3)])
            raise KeyError("over")

    def quiet(info):
        with pytest.raises((ValueError, KeyError)):
            body(info)

    ranks(quiet, 4)
    assert sorted(with_cause) == [[2], [3, 2], [3, 2]]


def test_a_subgroup_numbers_its_ranks_itself(fork):
    def body(info):
        coor, log = Coordinator(info, timeout_s=20), Log()
        group = coor.split([3, 1]) if coor.rank in (1, 3) else None
        coor.barrier()
        if coor.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if group is not None:
            with group.on_failure(log):
                failure = log.wait()[0]
                return [failure.rank, failure.peer.rank]

    assert fork(body, 4).outcomes()[3].value == [1, 1]


def test_the_first_failure_is_first(fork):
    def body(info):
        coor = Coordinator(info, timeout_s=20)
        coor.barrier()
        if coor.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if coor.rank == 1:
            assert coor.failures(wait_s=LIMIT_S)
            os._exit(1)
        log = Log()
        with coor.on_failure(log):
            return [failure.rank for failure in log.wait(2)]

    assert fork(body, 3).outcomes()[0].value == [2, 1]


def test_a_rank_that_is_suspended_while_nobody_waits_is_not_reported(fork):
    def body(info):
        coor, log, is_waiting = Coordinator(info, timeout_s=20, timings=QUICK), Log(), []
        with coor.on_failure(log, is_waiting=lambda: bool(is_waiting)):
            coor.barrier()
            if coor.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
                coor.barrier()  # it runs again
                coor.barrier()  # rank 0 has seen so
                return None
            peer = coor.peers[1]
            time.sleep(1.5)
            early = len(log.failures)
            is_waiting.append(True)
            reported = [failure.reason.value for failure in log.wait()]
            os.kill(peer.pid, signal.SIGCONT)
            coor.barrier()
            deadline = time.monotonic() + LIMIT_S
            while coor.failures() and time.monotonic() < deadline:
                time.sleep(0.05)
            last = len(coor.failures())
            coor.barrier()
            return [early, reported, last]

    zero, _ = fork(body, 2).outcomes()
    assert zero.value == [0, ["suspended"], 0], zero


def test_rank_0_of_a_failed_group_does_not_wait_for_a_suspended_rank(fork):
    """It lingered for all that were still there, though one could not hear why it failed."""
    patient = CoordinatorTimings(suspended_s=0.6, linger_s=10 * LIMIT_S)

    def body(info):
        with Coordinator(info, timeout_s=20, timings=patient) as coor:
            coor.barrier()
            if coor.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            raise PeerLost("planned", coor.failures(wait_s=LIMIT_S))

    zero, _, two = fork(body, 3).outcomes(stragglers=[1])
    assert (zero.text, two.text) == ("planned", "planned")


def test_a_group_without_the_reported_rank_that_is_closed_last_does_not_wait_for_it(ranks):
    """Rank 0 knew it by the group of all alone, which it had closed before."""
    has_closed = threading.Event()

    def body(info):
        coor = Coordinator(info, timeout_s=20)
        group = coor.split([0, 1])
        if coor.rank == 2:
            has_closed.wait(20)
        else:
            group.barrier()
        if coor.rank == 0:
            coor.report_failure(2, "suspended")
        coor.close()
        if group is not None:
            group.close()
        if info.rank == 0:
            has_closed.set()
        return has_closed.is_set()

    assert ranks(body, 3)[2]


def test_without_subscribers_no_thread_runs(ranks):
    def body(info):
        with Coordinator(info) as coor:
            coor.barrier()
            name = "drumline-failures"
            before = sum(thread.name == name for thread in threading.enumerate())
            coor.barrier()
            with coor.on_failure(lambda failure: None):
                coor.barrier()
                during = sum(thread.name == name for thread in threading.enumerate())
                coor.barrier()
            coor.barrier()
            return before, during, sum(thread.name == name for thread in threading.enumerate())

    assert ranks(body, 3) == [(0, 3, 0)] * 3


def test_who_subscribes_while_the_last_other_leaves_is_told_of_failures(ranks):
    """The thread was ended for the one that left, and the other was never called."""
    has_subscribed = threading.Event()

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            if coor.rank == 1:
                return has_subscribed.wait(20)  # and closes its Coordinator
            log, first, notifier = Log(), coor.on_failure(print), coor._detector.notifier
            stop = notifier._stop
            notifier._stop = lambda: (coor.on_failure(log), stop())
            first.close()
            notifier._stop = stop
            has_subscribed.set()
            return [failure.rank for failure in log.wait()]

    assert ranks(body, 2) == [[1], True]


def test_a_subscriber_that_raises_does_not_silence_the_others(fork):
    def body(info):
        coor, log = Coordinator(info, timeout_s=20), Log()

        def fail(failure):
            raise ValueError("no")

        with coor.on_failure(fail), coor.on_failure(log):
            coor.barrier()
            if coor.rank == 1:
                os._exit(1)
            return log.wait()[0].rank

    assert fork(body, 2).outcomes()[0].value == 1


def test_a_callback_may_close_the_coordinator(fork):
    def body(info):
        coor, closed = Coordinator(info, timeout_s=20), threading.Event()

        def close(failure):
            coor.close(timeout_s=1)
            closed.set()

        coor.on_failure(close)
        coor.barrier()
        if coor.rank == 1:
            os._exit(1)
        assert closed.wait(LIMIT_S)
        with pytest.raises(CoordinatorError, match="closed"):
            coor.on_failure(close)
        return True

    assert fork(body, 2).outcomes()[0].value


def test_only_a_rank_of_the_group_can_be_reported(ranks):
    """-1 was the last one, and others an IndexError."""

    def body(info):
        with Coordinator(info) as coor:
            for rank in (-1, 2):
                with pytest.raises(ValueError, match="not a rank of this group"):
                    coor.report_failure(rank, "late")
            coor.barrier()

    ranks(body, 2)


def test_a_single_rank_never_fails(ranks):
    def body(info):
        with Coordinator(info) as coor, coor.on_failure(lambda failure: None):
            return coor.failures(wait_s=0.1)

    assert ranks(body, 1) == [()]


@every_layout
def test_a_lost_peer_is_data(fork, layout):
    def body(info):
        coor = Coordinator(info, timeout_s=20)
        coor.barrier()
        if coor.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost) as caught:
            coor.barrier()
        error = caught.value
        return [error.rank, error.peer.rank, error.failures[0].reason.value, error.call]

    zero, one, _ = fork(body, 3, LAYOUTS[layout]).outcomes()
    for outcome in (zero, one):
        rank, of_launch, reason, call = outcome.value
        assert (rank, of_launch, reason) == (2, 2, "exited"), outcome
        assert call.startswith("barrier #1 (test_detector.py:") or layout == "two nodes", outcome


def test_call_that_was_interrupted_gives_no_result_to_the_next_of_a_failed_group():
    file = _node_shm.create(2)
    segments = [_node_shm.NodeSegment(file, 2, rank, False) for rank in range(2)]
    os.close(file)

    def call(rank, number):
        return segments[rank].exchange("call", number, 0, "", b"%d" % number, True, False, 0.0)

    assert call(0, 1) is None
    assert call(1, 1) == [b"1", b"1"]
    assert segments[1].publish_failure(b"gone")
    assert call(0, 2) is None and segments[0].resume(0.0) is None
