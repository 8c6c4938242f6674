"""The shared-memory backend with ranks as processes: who is told what when one of them dies."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("shm_processes.py")
ROOT = Path(__file__).parents[2]


def run(body, world_size, times=1):
    """What the ranks said, and their pids; each of the times."""
    done = subprocess.run(
        [sys.executable, SCRIPT, body, str(world_size), str(times)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        timeout=100,
        check=True,
    )
    return [(found["said"], found["pids"]) for found in json.loads(done.stdout)]


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    before = set(os.listdir("/dev/shm"))
    yield
    left = {name for name in set(os.listdir("/dev/shm")) - before if "drumline" in name}
    assert not left


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_conform(world_size):
    [(said, _)] = run("conforms", world_size)
    assert said == [[]] * world_size


@pytest.mark.parametrize("body", ["a_rank_dies", "a_sender_dies", "a_receiver_dies"])
def test_a_killed_peer_is_named_within_two_seconds(body):
    [(said, pids)] = run(body, 3)
    assert said[2] == "died"
    for kind, text, seconds in said[:2]:
        assert kind == "PeerLost"
        assert f"rank 2 (pid {pids[2]}" in text and "has died" in text
        assert seconds < 2


def test_whoever_dies_whenever_all_survivors_are_told():
    for said, pids in run("dies_at_random", 3, times=5):
        told = [what for what in said if what != "died"]
        assert len(told) == 2
        for kind, text, seconds, victim in told:
            assert kind == "PeerLost" and seconds < 2
            assert f"rank {victim} (pid {pids[victim]}" in text and "has died" in text


def test_a_rank_that_is_late_is_named_with_the_call_it_is_missed_in():
    [(said, pids)] = run("a_rank_is_late", 3)
    for kind, text, seconds in said[:2]:
        assert kind == "CommunicatorTimeout" and 0.9 < seconds < 2.5
        assert "waited 1.00 s in call 2 (broadcast of 5 float32, from rank 1)" in text
        assert f"Not there yet: rank 2 (pid {pids[2]}, last seen in call 1, barrier)" in text


def test_no_core_is_burnt_while_a_rank_is_waited_for():
    [(said, _)] = run("waits_idly", 4)
    assert max(said[:3]) < 0.1


def test_a_forked_child_does_not_speak_for_its_rank():
    [(said, _)] = run("forks_a_child_that_closes", 2)
    assert said == [2.0, 2.0]


def test_memory_that_is_not_there_is_an_error_with_the_bytes_needed():
    [(said, _)] = run("has_little_memory", 2)
    for kind, text, _ in said:
        assert kind == "CommunicatorError"
        assert "bytes of shared memory" in text and "gloo" in text
