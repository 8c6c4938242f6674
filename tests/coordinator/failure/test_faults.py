"""What survivors hear when a rank fails: every call, every way to fail, on any rank.

One launch for each way and place: all calls are made in it at once, each on its own Coordinator.
"""

import json
import multiprocessing
import os
import re
import runpy
import signal
import threading
import time
from pathlib import Path

import pytest

from coordinator.errors import PeerLost
from coordinator.failure import stack_dump
from coordinator.timings import CoordinatorTimings
from coordinator.transport import (
    gloo_transport,  # noqa: F401 - so that no rank has to import torch
    joining,
)
from coordinator.transport.group import Exchange
from tests.cases import soak

EVERY = runpy.run_path(str(Path(__file__).with_name("every_call.py")))
LARGE = EVERY["LARGE"]
CALLS, COLLECTIVE, MEETING, TURNS = (
    EVERY["CALLS"], list(EVERY["COLLECTIVE"]), list(EVERY["MEETING"]), list(EVERY["TURNS"])
)  # fmt: skip
WHOLE = [name for name in COLLECTIVE if name != "local_barrier"]  # of the whole group
LAYOUTS = {"one node": [3], "two nodes": [2, 2]}
PLACES = [
    ("one node", 0), ("one node", 1), ("two nodes", 3), soak("two nodes", 0), soak("two nodes", 2)
]  # fmt: skip
every_place = pytest.mark.parametrize("layout, victim", PLACES)
SOME = [("one node", 1), ("two nodes", 0), soak("two nodes", 3)]
some_places = pytest.mark.parametrize("layout, victim", SOME)  # where others cover the rest
THREADS = [([3], 0), ([3], 1), ([2, 2], 0), ([2, 2], 3)]
among_threads = pytest.mark.parametrize("nodes, victim", THREADS)
DEADLINE_S = 2.4
SLACK_S = 10  # beyond a deadline, on a busy machine
OVER_GLOO = {"transport": "gloo", "reason_s": 10.0, "linger_s": 11.0}  # only rank 0 can name ranks
PATIENT = {"answer_s": 5.0, "last_answer_s": 5.0, "stack_s": 5.0}  # where all answer


def among_processes(
    fork, layout, victim, whole, names=CALLS, timeout_s=20.0, stopped=False, at_end=None, **timings
):
    """(call, rank, error, text, seconds it took, seconds after the fault) of all that waited.

    at_end: called on one rank when all others than the victim have what they waited for.
    """
    nodes = LAYOUTS[layout]
    reading, writing = os.pipe()
    survivors = multiprocessing.get_context("fork").Barrier(sum(nodes) - 1, at_end, 20)

    def fall():
        time.sleep(min(0.5, timeout_s / 20))  # the others wait, and have most of it left
        os.write(writing, json.dumps(time.time()).encode())
        whole()

    def body(info):
        return EVERY["run"](info, names, victim, None, timeout_s, fall, survivors.wait, **timings)

    outcomes = fork(body, sum(nodes), nodes).outcomes(stragglers=[victim] if stopped else [])
    fell_at = json.loads(os.read(reading, 100))
    os.close(reading)
    os.close(writing)
    assert all(each.error == "" for rank, each in enumerate(outcomes) if rank != victim), outcomes
    yield from _rows(
        ((rank, each.value or {}) for rank, each in enumerate(outcomes)), names, fell_at
    )


def _rows(results, names, fell_at):
    seen = set()
    for rank, calls in results:
        for name, (error, text, took_s, at) in calls.items():
            seen.add(name)
            yield name, rank, error, text, took_s, at - fell_at
    assert seen >= set(names) & {*WHOLE, *MEETING}, "nobody waited"


def is_in_call(name, text):
    return re.search(
        rf"rank \d+ (waited|was|entered) .*in {name.split()[0]} #\d+ \(every_call.py:\d+", text
    )


@every_place
def test_a_killed_rank_is_named_by_every_survivor_at_once(fork, layout, victim):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    for row in among_processes(fork, layout, victim, die):
        name, _, error, text, _, late_s = row
        assert error == "PeerLost", row
        assert f"rank {victim} (host" in text and is_in_call(name, text), row
        assert "exited with SIGKILL" in text or layout == "two nodes", row
        assert late_s < SLACK_S, row


@pytest.mark.parametrize("layout, victim", [("one node", 1), ("two nodes", 0)])
def test_a_killed_rank_is_named_over_gloo(fork, layout, victim):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    for row in among_processes(fork, layout, victim, die, [*WHOLE, *MEETING], **OVER_GLOO):
        name, _, error, text, _, late_s = row
        assert error == "PeerLost", row
        assert f"rank {victim} (host" in text and is_in_call(name, text), row
        assert late_s < SLACK_S, row


@some_places
def test_an_early_exit_is_named(fork, layout, victim):
    for row in among_processes(fork, layout, victim, lambda: os._exit(3)):
        _, _, error, text, _, late_s = row
        assert error == "PeerLost" and f"rank {victim} (host" in text, row
        assert "exited with code 3" in text or layout == "two nodes", row
        assert late_s < SLACK_S, row


@every_place
def test_a_stopped_rank_is_named_as_such_at_the_deadline(fork, layout, victim):
    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)

    for row in among_processes(fork, layout, victim, stop, CALLS, DEADLINE_S, stopped=True):
        name, _, error, text, took_s, _ = row
        assert error == "CoordinatorTimeout", row
        assert f"rank {victim} (host" in text and is_in_call(name, text), row
        assert "suspended" in text, row
        assert DEADLINE_S - 0.5 < took_s < DEADLINE_S + SLACK_S, row


@pytest.mark.soak
@pytest.mark.parametrize("layout, victim", [("one node", 1), ("two nodes", 0), ("two nodes", 3)])
def test_a_stopped_rank_is_named_at_the_deadline_over_gloo(fork, layout, victim):
    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)

    calls = [*WHOLE, *MEETING]
    rows = among_processes(fork, layout, victim, stop, calls, DEADLINE_S, stopped=True, **OVER_GLOO)
    for row in rows:
        name, _, error, text, took_s, _ = row
        assert error == "CoordinatorTimeout", row
        assert f"rank {victim} (host" in text and is_in_call(name, text), row
        assert "suspended" in text, row
        assert DEADLINE_S - 0.5 < took_s < DEADLINE_S + SLACK_S, row


@some_places
def test_a_slow_rank_is_shown_where_it_was_last_seen(fork, layout, victim):
    over, others_gave_up = os.pipe()

    def dawdle():
        os.read(over, 1)

    stack_dump.stack_memory(os.getpid())  # whose handler the ranks inherit
    at_end = lambda: os.write(others_gave_up, b"x")  # noqa: E731
    options = {"at_end": at_end, **PATIENT}
    rows = list(among_processes(fork, layout, victim, dawdle, CALLS, DEADLINE_S, **options))
    os.close(over)
    os.close(others_gave_up)
    assert any("is here:" in row[3] and "in dawdle: os.read(over, 1)" in row[3] for row in rows)
    for row in rows:
        name, _, error, text, took_s, _ = row
        assert error == "CoordinatorTimeout", row
        assert f"rank {victim} (host" in text and is_in_call(name, text), row
        assert re.search(r"seen [\d.]+ s ago in \w*barrier #\d, every_call.py:\d+", text), row
        assert "suspended" not in text and "exited" not in text, row
        assert took_s < DEADLINE_S + SLACK_S, row


def fail(_):
    raise ZeroDivisionError("by nothing")


def check_told_of_exception(row, victim):
    name, _, error, text, _, _ = row
    assert error == ("CoordinatorError" if name in TURNS else "PeerLost"), row
    assert f"rank {victim} (host" in text, row
    assert (
        "by nothing" in text and "in fail" in text and "/coordinator/store/sequencer.py" not in text
    ), row


def check_told_of_leaving(row, victim):
    _, _, error, text, _, _ = row
    assert error == "PeerLost" and f"rank {victim} (host" in text, row


def stray(coor):
    coor._exchange("else", Exchange(b""), None)


def check_told_of_difference(row, _):
    name, _, error, text, _, _ = row
    assert error == "CoordinatorError" and "in else #" in text, row
    assert f"in {name.split()[0]} #" in text, row


ALIVE = {
    "exception": (fail, CALLS, check_told_of_exception),
    "close": (lambda coor: coor.close(timeout_s=5), [*COLLECTIVE, *MEETING], check_told_of_leaving),
    "drop": (lambda coor: coor.__del__(), ["barrier", "gather", "split"], check_told_of_leaving),
    "another call": (stray, WHOLE, check_told_of_difference),
}
every_fault = pytest.mark.parametrize("fault", ALIVE)


@every_fault
@every_place
def test_what_a_living_rank_does_wrong_reaches_the_others(fork, layout, victim, fault):
    what, names, check = ALIVE[fault]
    nodes = LAYOUTS[layout]
    body = lambda info: EVERY["run"](info, names, victim, what, 20.0)  # noqa: E731
    outcomes = fork(body, sum(nodes), nodes).outcomes()
    assert all(each.error == "" for each in outcomes), outcomes
    for row in _rows(((rank, each.value) for rank, each in enumerate(outcomes)), names, 0.0):
        check(row, victim)
        assert row[4] < SLACK_S, row


@every_fault
@among_threads
def test_what_a_thread_as_a_rank_does_wrong_reaches_the_others(ranks, nodes, victim, fault):
    what, names, check = ALIVE[fault]
    results = ranks(lambda info: EVERY["run"](info, names, victim, what, 20.0), sum(nodes), nodes)
    for row in _rows(enumerate(results), names, 0.0):
        check(row, victim)
        assert row[4] < SLACK_S, row


@pytest.mark.parametrize("victim", [0, 1])
def test_who_leaves_after_a_call_does_not_take_it_from_the_others(ranks, victim):
    """It came, and all had what they waited for; then it left, while another had looked away."""
    left = threading.Event()

    def body(info):
        coor = EVERY["Coordinator"](info)
        detector = coor._group.detector
        check = detector.check

        def check_late(pending):
            left.wait(20)
            check(pending)

        if info.rank == victim:
            time.sleep(0.3)  # the others wait, and look around
        else:
            detector.check = check_late
        gathered = coor.allgather(b"%d" % info.rank)
        if info.rank == victim:
            detector.abandon("its own error", "afterwards")
            left.set()
        with pytest.raises(PeerLost, match="its own error"):
            coor.barrier()
        coor.__del__()
        return gathered

    assert ranks(body, 3) == [[b"0", b"1", b"2"]] * 3


@pytest.mark.parametrize("nodes", [[2, 2], [1, 1, 1, 1]])
@pytest.mark.parametrize("large", [0, LARGE])
def test_who_leaves_after_a_call_does_not_take_it_from_other_nodes(ranks, nodes, large):
    """A rank that had the result was slow to hand it on: to its node, or to one further down."""
    left = threading.Event()
    timings = CoordinatorTimings(lost_grace_s=15.0)

    def body(info):
        coor = EVERY["Coordinator"](info, timings=timings)
        detector, tree = coor._group.detector, coor._group._tree
        if info.rank == 2:
            receive = tree._receive

            def receive_late(index, *args):
                message = receive(index, *args)
                if index == 0:  # from the root, which has left by now
                    assert left.wait(20)
                    while detector.group_failure() is None:
                        time.sleep(0.01)
                    time.sleep(0.3)  # the others look around, and hear of it
                return message

            tree._receive = receive_late
        gathered = coor.allgather(b"%d" % info.rank + bytes(large))
        if info.rank == 0:
            detector.abandon("its own error", "afterwards")
            left.set()
        with pytest.raises(PeerLost, match="its own error"):
            coor.barrier()
        coor.__del__()
        return [data[:1] for data in gathered], {len(data) for data in gathered}

    assert ranks(body, 4, nodes) == [([b"0", b"1", b"2", b"3"], {1 + large})] * 4


@pytest.mark.parametrize("slow", [2, 3])
def test_who_leaves_after_a_group_was_made_does_not_take_it_from_the_others(
    ranks, monkeypatch, slow
):
    """All had joined. One was slow to hand on who they are, or looked away meanwhile."""
    timings = CoordinatorTimings(lost_grace_s=15.0)
    go_down, check = joining._Joining._down_the_tree, joining._Joining._check

    def await_failure(self):
        while self.rank == slow and self.rendezvous.parent.group_failure() is None:
            time.sleep(0.01)

    def go_down_late(self, *args):
        packed = go_down(self, *args)
        if not self.is_launch and self.rank == 2:
            await_failure(self)
            time.sleep(0.3)  # rank 3 waits, and looks around
        return packed

    def check_late(self):
        if not self.is_launch:
            await_failure(self)
        check(self)

    def body(info):
        coor = EVERY["Coordinator"](info, timings=timings)
        part = coor.split(range(4))
        if info.rank == 1:
            coor._group.detector.abandon("its own error", "afterwards")
        with pytest.raises(PeerLost, match="its own error"):
            coor.barrier()
        part.__del__()
        coor.__del__()
        return part.ranks

    monkeypatch.setattr(joining._Joining, "_down_the_tree", go_down_late)
    monkeypatch.setattr(joining._Joining, "_check", check_late)
    assert ranks(body, 4, [2, 2]) == [(0, 1, 2, 3)] * 4


@among_threads
def test_a_slow_thread_is_named_at_the_deadline(ranks, nodes, victim):
    gave_up = threading.Event()
    others = threading.Barrier(sum(nodes) - 1, action=gave_up.set)

    def body(info):
        stay = lambda _: gave_up.wait(20)  # noqa: E731
        return EVERY["run"](info, CALLS, victim, stay, 1.0, meet_survivors=lambda: others.wait(20))

    results = ranks(body, sum(nodes), nodes)
    for row in _rows(enumerate(results), CALLS, 0.0):
        name, _, error, text, took_s, _ = row
        assert error == "CoordinatorTimeout" and f"rank {victim} (host" in text, row
        assert is_in_call(name, text) and took_s < 1.0 + SLACK_S, row


@pytest.mark.parametrize("layout", LAYOUTS)
def test_different_arguments_are_a_different_call(coordinated, layout):
    outcomes = coordinated(
        lambda coor: coor.broadcast(b"x", coor.rank % 2), sum(LAYOUTS[layout]), LAYOUTS[layout]
    )
    assert {outcome.error for outcome in outcomes} == {"CoordinatorError"}, outcomes
    assert all("src" in outcome.text for outcome in outcomes), outcomes


def test_a_long_error_of_long_characters_reaches_the_others(coordinated):
    """The record was cut in the middle, and they raised what could not read it: ValueError."""

    def body(coor):
        if coor.rank == 1:
            raise ValueError("\u5b57" * 3000)
        coor.barrier()

    first, _ = coordinated(body, 2)
    assert first.error == "PeerLost", first
    assert re.search(r"rank 1 \(host .* left because of ValueError: \u5b57{99}", first.text), first


def test_a_late_rank_hears_that_the_others_have_given_up(coordinated):
    meeting = multiprocessing.get_context("fork").Barrier(3, timeout=20)

    def body(coor):
        if coor.is_master():
            meeting.wait()
        try:
            coor.barrier(timeout_s=0.3)
        finally:
            if not coor.is_master():
                meeting.wait()

    late, *_ = coordinated(body, 3)
    assert "had already given up" in late.text, late


def asks_rank_0(coor):
    for _ in range(100_000):
        coor.get("key")


def tells_rank_0(coor):
    for _ in range(100_000):
        coor.put("key", b"")


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_who_asks_rank_0_does_not_outlive_it(fork, how):
    """A child of rank 0 keeps what it inherited open: it must not hide the death."""
    reading, writing = os.pipe()

    def body(info):
        with EVERY["Coordinator"](info, timeout_s=30) as coor:
            coor.barrier()
            coor.timeout_s = 1.5 if how == "stopped" else 30
            if info.rank == 0:
                child = os.fork()
                if child == 0:
                    time.sleep(30)
                    os._exit(0)
                time.sleep(0.3)
                os.write(writing, json.dumps(time.time()).encode())
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            (asks_rank_0 if info.rank == 1 else tells_rank_0)(coor)

    _, *others = fork(body, 3).outcomes(stragglers=[0])
    os.close(writing)  # or what was never written would be waited for
    fell_at = json.loads(os.read(reading, 100))
    os.close(reading)
    for name, each in zip(("get", "put"), others, strict=True):
        assert each.error == ("PeerLost" if how == "killed" else "CoordinatorTimeout"), each
        assert re.search(
            rf"rank \d (waited|was) .*in {name} #\d+ \(test_faults.py:\d+\)", each.text
        )
        assert "rank 0 (host" in each.text, each
        assert ("exited with SIGKILL" if how == "killed" else "suspended") in each.text, each
        assert each.at - fell_at < SLACK_S, each
