"""What survivors hear when a rank fails: every operation, every way to fail, on any rank."""

import json
import os
import re
import signal
import time
from functools import partial

import pytest

from coordinator import Coordinator

OPERATIONS = {
    "barrier": lambda coor: coor.barrier(),
    "broadcast": lambda coor: coor.broadcast(b"x" * 100, 0),
    "allgather": lambda coor: coor.allgather(b"x"),
    "gather": lambda coor: coor.gather(b"x" * 10, 1),
    "scatter": lambda coor: coor.scatter([b"x"] * coor.world_size if coor.rank == 1 else None, 1),
    "agree": lambda coor: coor.agree("same"),
    "vote": lambda coor: coor.vote(True),
    "allgather large": lambda coor: coor.allgather(bytes(3_000_000)),
}
LAYOUTS = {"one node": [3], "two nodes": [2, 2]}
PLACES = [("one node", 0), ("one node", 1), ("two nodes", 0), ("two nodes", 2), ("two nodes", 3)]
every_place = pytest.mark.parametrize("layout, victim", PLACES)


def failures(fork, layout, victim, fault, operations=OPERATIONS, timeout_s=20.0, stopped=False):
    """What happens when victim meets its fate before its second call, for each operation.

    Gives (name of the operation, outcomes of the others, outcome of the victim, time of the fault).
    """
    nodes = LAYOUTS[layout]
    reading, writing = os.pipe()

    def body(name, info):
        with Coordinator(info, timeout_s=timeout_s) as coor:
            OPERATIONS[name](coor)
            if coor.rank == victim:
                time.sleep(0.2)
                os.write(writing, json.dumps([name, time.time()]).encode() + b"\n")
                return fault(coor)
            for _ in range(2):
                OPERATIONS[name](coor)

    launches = {name: fork(partial(body, name), sum(nodes), nodes) for name in operations}
    found = {
        name: ranks.outcomes(stragglers=[victim] if stopped else [])
        for name, ranks in launches.items()
    }
    times = dict(json.loads(line) for line in os.read(reading, 1 << 16).splitlines())
    os.close(reading)
    os.close(writing)
    for name, outcomes in found.items():
        own = outcomes.pop(victim)
        yield name, outcomes, own, times[name]


@every_place
def test_a_killed_rank_is_named_by_every_survivor_within_two_seconds(fork, layout, victim):
    def die(_):
        os.kill(os.getpid(), signal.SIGKILL)

    for name, others, _, died in failures(fork, layout, victim, die):
        for outcome in others:
            assert outcome.error == "PeerLost", outcome
            assert f"rank {victim} (host" in outcome.text, outcome
            assert re.search(rf"in {name.split()[0]} #2 \(test_faults.py:\d+\)", outcome.text)
            assert "exited with SIGKILL" in outcome.text or layout == "two nodes", outcome
            assert outcome.at - died < 2, outcome


@every_place
def test_a_stopped_rank_is_named_as_such(fork, layout, victim):
    def stop(_):
        os.kill(os.getpid(), signal.SIGSTOP)

    some = ["barrier", "broadcast"]
    for _, others, _, _ in failures(fork, layout, victim, stop, some, 1.5, stopped=True):
        for outcome in others:
            assert outcome.error == "CoordinatorTimeout", outcome
            assert f"rank {victim} (host" in outcome.text, outcome
            assert "stopped" in outcome.text, outcome


@every_place
def test_a_slow_rank_is_shown_where_it_was_last_seen(fork, layout, victim):
    def dawdle(coor):
        time.sleep(2.5)
        coor.barrier()

    for _, others, own, _ in failures(fork, layout, victim, dawdle, ["barrier"], 1.5):
        for outcome in others:
            assert outcome.error == "CoordinatorTimeout", outcome
            assert f"rank {victim} (host" in outcome.text, outcome
            assert re.search(r"seen [\d.]+ s ago in barrier #1, test_faults.py:\d+", outcome.text)
            assert "stopped" not in outcome.text and "exited" not in outcome.text, outcome
        assert "had already given up" in own.text, own


@every_place
def test_an_exception_reaches_the_others_with_its_traceback(fork, layout, victim):
    def fail(_):
        raise ZeroDivisionError("by nothing")

    for _, others, own, _ in failures(fork, layout, victim, fail):
        assert own.error == "ZeroDivisionError"
        for outcome in others:
            assert outcome.error == "PeerLost", outcome
            assert f"rank {victim} (host" in outcome.text, outcome
            assert "by nothing" in outcome.text and "in fail" in outcome.text, outcome


@every_place
def test_an_early_exit_is_named(fork, layout, victim):
    some = ["barrier", "gather"]
    for _, others, _, _ in failures(fork, layout, victim, lambda _: os._exit(3), some):
        for outcome in others:
            assert outcome.error == "PeerLost", outcome
            assert f"rank {victim} (host" in outcome.text, outcome
            assert "exited with code 3" in outcome.text or layout == "two nodes", outcome


@every_place
def test_a_rank_that_closes_early_is_named(fork, layout, victim):
    def leave(coor):
        coor.close(timeout_s=5)

    for _, others, _, _ in failures(fork, layout, victim, leave, ["barrier", "vote"]):
        for outcome in others:
            assert outcome.error == "PeerLost", outcome
            assert f"rank {victim} (host" in outcome.text, outcome


@every_place
def test_ranks_in_different_calls_all_hear_who_was_where(fork, layout, victim):
    def stray(coor):
        coor.allgather_object(1)

    some = ["barrier", "broadcast", "gather", "vote"]
    for name, others, own, _ in failures(fork, layout, victim, stray, some):
        for outcome in [*others, own]:
            assert outcome.error == "CoordinatorError", outcome
            assert "in allgather #2" in outcome.text and f"in {name} #2" in outcome.text, outcome


@pytest.mark.parametrize("layout", LAYOUTS)
def test_different_arguments_are_a_different_call(coordinated, layout):
    found = coordinated(
        lambda coor: coor.broadcast(b"x", coor.rank % 2), sum(LAYOUTS[layout]), LAYOUTS[layout]
    )
    assert {outcome.error for outcome in found} == {"CoordinatorError"}, found
    assert all("src" in outcome.text for outcome in found), found
