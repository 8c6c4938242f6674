"""The shared-memory backend with ranks as processes: who is told what when one of them dies."""

import json
from pathlib import Path

import pytest

from tests.cases import soak

SCRIPT = Path(__file__).with_name("shm_processes.py")


@pytest.fixture
def run(warm):
    """run(body, world_size): what the ranks said, and their pids."""

    def run(body, world_size, backend="shm"):
        done = warm.run(SCRIPT, body, world_size, backend)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        return found["said"], found["pids"]

    return run


pytestmark = pytest.mark.usefixtures("no_memory_left")


@pytest.mark.parametrize("world_size", [2, soak(4)])
def test_processes_conform(run, world_size):
    said, _ = run("conforms", world_size)
    assert said == [[]] * world_size


@pytest.mark.parametrize("body", ["a_rank_dies", "a_sender_dies", "a_receiver_dies"])
def test_a_killed_peer_is_named_at_once(run, body):
    said, pids = run(body, 3)
    assert said[2] == "died"
    for kind, text, seconds in said[:2]:
        assert kind == "PeerLost"
        assert f"rank 2 (pid {pids[2]}" in text and "has died" in text
        assert seconds < 15  # of a minute


def test_a_rank_without_descriptors_takes_no_living_peer_for_dead(run):
    """It could not read /proc, and so ended the communicator of all."""
    said, _ = run("waits_without_descriptors", 2)
    assert said == [[2.0, [False, False]]] * 2


def test_a_rank_that_is_late_is_named_with_the_call_it_is_missed_in(run):
    said, pids = run("a_rank_is_late", 3)
    for kind, text, seconds in said[:2]:
        assert kind == "CommunicatorTimeout" and seconds > 0.9
        assert "timed out after 1.00 s in call 2 (broadcast of 5 float32, from rank 1)" in text
        assert f"Missing: rank 2 (pid {pids[2]}, last seen in call 1, barrier)" in text


def test_no_core_is_burnt_while_a_rank_is_waited_for(run):
    said, _ = run("waits_idly", 4)
    assert max(said[:3]) < 0.3  # of a second


def test_a_letter_is_looked_for_no_longer_than_a_millisecond(run):
    (seconds, found), _ = run("waits_for_letters", 2)[0]
    assert seconds < 0.3  # of half a second
    assert found == [*range(25)]


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_forked_child_does_not_speak_for_its_rank(run, backend):
    """Its steps passed for the rank's own, so that sums were wrong, and others on every rank."""
    said, _ = run("forks_a_child_that_takes_part", 2, backend)
    for rank, (told, *sums) in enumerate(said):
        assert told.startswith(f"rank {rank}: process ") and "was forked from the rank" in told
        assert sums == [2.0, 2.0]


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_forked_child_does_not_wait_for_a_call_that_its_rank_started(run, backend):
    """It waited without end, for a thread and for a lock of one, which only the rank has."""
    (of_rank_0, of_rank_1), _ = run("forks_while_a_call_runs", 2, backend)
    *refusals, total = of_rank_0
    assert all(" was forked from " in text for text in refusals) and len(refusals) == 3
    assert total == of_rank_1 == 2.0


def test_a_forked_child_does_not_take_the_bell_of_its_rank(run):
    seconds, _ = run("forks_a_child_that_disarms", 2)[0]
    assert seconds < 3  # of five


def test_memory_that_is_not_there_is_an_error_with_the_bytes_needed(run):
    said, _ = run("has_little_memory", 2)
    for kind, text, _ in said:
        assert kind == "CommunicatorError"
        assert int(text.partition("allocate ")[2].split()[0]) > 9 << 20  # for the largest layout
        assert "bytes of shared memory" in text and "gloo" in text
