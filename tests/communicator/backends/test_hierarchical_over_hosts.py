"""Ranks of several hosts: processes in network namespaces, each with a name of its own."""

import json
from pathlib import Path

import pytest

from tests.cases import soak

PROGRAM = Path(__file__).parents[1] / "programs" / "over_hosts.py"
NO_HOSTS = 77


def codes(warm, what, layout):
    """The exit codes of the ranks of all hosts."""
    done = warm.run(PROGRAM, what, layout)
    if done.returncode == NO_HOSTS:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("layout", ["2+1", soak("3+2"), soak("1+1+1")])
def test_ranks_of_several_hosts_conform(warm, layout):
    found, told = codes(warm, "conforms", layout)
    assert set(found) == {0}, told


@pytest.mark.parametrize("layout", ["2+1+2", soak("4+1"), soak("1+1+1")])
def test_large_calls_give_all_ranks_the_same_bits_each_time(warm, layout):
    found, told = codes(warm, "stays the same", layout)
    assert set(found) == {0}, told


@pytest.mark.parametrize(("what", "killed"), [("rank", 1), ("host", 2)])
def test_what_is_killed_in_a_large_call_is_named_on_all_hosts(warm, what, killed):
    found, told = codes(warm, f"outlives a {what}", "3+2")
    assert found == [0] * (5 - killed) + [-9] * killed, told


def test_a_host_whose_link_is_cut_in_a_large_call_is_named_by_the_others(warm):
    """Within seconds, and not at the deadline."""
    found, told = codes(warm, "outlives a link", "2+2")
    assert set(found) == {0}, told


@pytest.mark.soak
def test_a_host_that_is_stopped_in_a_large_call_is_named_by_all_others(warm):
    """One of them named the rank of its node that waited for the stopped ones."""
    found, told = codes(warm, "outlives a pause", "2+2")
    assert set(found) == {0}, told
