"""Many ranks: how fast they meet, and how the tree of nodes grows."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.binomial_tree import children_of, parent_of, subtree_of


@given(st.integers(1, 1024))
def test_every_node_hangs_once_below_the_root(size):
    below = {child: node for node in range(size) for child in children_of(node, size)}
    assert sorted(below) == list(range(1, size))
    assert all(parent_of(child) == node for child, node in below.items())


@given(st.integers(1, 1024), st.data())
def test_a_subtree_is_a_node_and_what_hangs_below(size, data):
    node = data.draw(st.integers(0, size - 1))
    found, waiting = set(), [node]
    while waiting:
        found.add(waiting[-1])
        waiting += children_of(waiting.pop(), size)
    assert found == set(subtree_of(node, size))


def test_a_thousand_and_twenty_four_nodes_are_ten_steps_from_the_root():
    def depth(node):
        return 0 if node == 0 else 1 + depth(parent_of(node))

    assert max(map(depth, range(1024))) == 10
    assert max(len(children_of(node, 1024)) for node in range(1024)) == 10


@pytest.mark.parametrize(
    "nodes", [[16], [4] * 4, pytest.param([64], marks=pytest.mark.soak)], ids=str
)
def test_many_ranks_meet_in_two_seconds(coordinated, nodes):
    """From the last rank's first line on: what comes before is the forking."""
    begun = time.time()

    def body(coor):
        coor.barrier()
        return time.time()

    found = coordinated(body, sum(nodes), nodes, timeout_s=30)
    assert all(outcome.error == "" for outcome in found), found
    assert max(outcome.value for outcome in found) - begun < 2 + 4  # and the forking of 64
