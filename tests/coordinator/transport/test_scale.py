"""Many ranks: how fast they meet, and how the tree of nodes grows."""

import queue
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import Coordinator
from coordinator.binomial_tree import children_of, parent_of, subtree_of
from coordinator.control.framing import pack, unpack
from coordinator.transport.tree import ALL_NODES, Entry, Tree
from launcher.authentication.framed_connection import noop


@given(st.integers(1, 1024))
def test_every_node_hangs_once_below_the_root(size):
    below = {child: node for node in range(size) for child in children_of(node, size)}
    assert sorted(below) == list(range(1, size))
    assert all(parent_of(child) == node for child, node in below.items())


@given(st.integers(1, 1024), st.data())
def test_a_subtree_is_a_node_and_what_hangs_below(size, data):
    node = data.draw(st.integers(0, size - 1))
    nodes, waiting = set(), [node]
    while waiting:
        nodes.add(waiting[-1])
        waiting += children_of(waiting.pop(), size)
    assert nodes == set(subtree_of(node, size))


def test_a_thousand_and_twenty_four_nodes_are_ten_steps_from_the_root():
    def depth(node):
        return 0 if node == 0 else 1 + depth(parent_of(node))

    assert max(map(depth, range(1024))) == 10
    assert max(len(children_of(node, 1024)) for node in range(1024)) == 10


class CountedEnd:
    """One end of a connection within this process, which counts the messages that it sends."""

    def __init__(self, outgoing, incoming):
        self.sizes, self._outgoing, self._incoming = [], outgoing, incoming

    def send(self, message, deadline, idle):
        self.sizes.append(len(pack(message)))
        self._outgoing.put(pack(message))

    def receive(self, deadline, idle):
        return unpack(self._incoming.get(timeout=60))


def sizes_sent(num_nodes, nbytes):
    """The sizes of the messages that each node sends in a call in which the root gives so much."""
    ends = {}
    for child in range(1, num_nodes):
        up, down = queue.Queue(), queue.Queue()
        ends[child, parent_of(child)] = CountedEnd(up, down)
        ends[parent_of(child), child] = CountedEnd(down, up)

    def call(node):
        neighbours = {child: ends[node, child] for child in children_of(node, num_nodes)}
        parent = ends[node, parent_of(node)] if node else None
        header = (("broadcast", 7, 0), ("broadcast", 7, "train.py:12"))
        entries = [Entry(0, 0, ALL_NODES, bytes(nbytes))] if node == 0 and nbytes else []
        tree = Tree(node, num_nodes, parent, neighbours)
        headers, received = tree.exchange(header, entries, lambda _: ALL_NODES, 0, noop)
        assert len(headers) == 1 and [entry.data for entry in received] == [bytes(nbytes)] * bool(
            nbytes
        )
        return [size for end in (parent, *neighbours.values()) if end for size in end.sizes]

    with ThreadPoolExecutor(num_nodes) as pool:
        return list(pool.map(call, range(num_nodes)))


@pytest.mark.parametrize("num_nodes", [8, 64, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("nbytes", [0, 1024], ids=["barrier", "broadcast"])
def test_a_node_sends_a_logarithm_of_messages_of_one_size(num_nodes, nbytes):
    """Of the nodes nothing is listed: a barrier of 1,000 has the messages of one of 8."""
    sizes = sizes_sent(num_nodes, nbytes)
    assert max(map(len, sizes)) <= num_nodes.bit_length()
    assert sum(map(len, sizes)) == 2 * (num_nodes - 1)
    assert max(map(max, sizes)) < 100 + nbytes


@pytest.mark.parametrize(
    "nodes", [[16], [4] * 4, pytest.param([64], marks=pytest.mark.soak)], ids=str
)
def test_many_ranks_meet_in_two_seconds(fork, nodes):
    """From the last rank's first line on: what comes before is the forking."""

    def body(info):
        begun = time.time()
        with Coordinator(info, timeout_s=30) as coor:
            coor.barrier()
            return begun, time.time()

    outcomes = fork(body, sum(nodes), nodes).outcomes()
    assert all(outcome.error == "" for outcome in outcomes), outcomes
    begun, met = (
        max(times) for times in zip(*(outcome.value for outcome in outcomes), strict=True)
    )
    assert met - begun < 2 + 2  # and what else the machine does
