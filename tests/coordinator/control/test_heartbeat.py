"""One rank of a node speaks to rank 0 for all: which, what it says, and how the others hear it."""

import contextlib
import os
import signal
import socket
from dataclasses import replace

import pytest

from coordinator.call_site import CallStatus
from coordinator.control.client import Client
from coordinator.control.heartbeat import Heartbeat, Neighbour, NodeRecord, OwnRecord
from coordinator.control.membership import RankReport
from coordinator.control.operations import Op
from coordinator.control.server import CONTROL, ControlServer
from coordinator.peers import Peer, start_ticks
from coordinator.timings import DEFAULT
from launcher import LaunchInfo
from launcher.authentication.credentials import Credentials
from launcher.authentication.handshake import Hello

LIMIT_S = 30.0
CREDENTIALS = Credentials(bytes(range(32)), "heartbeats", 8)
BY_HAND = replace(DEFAULT, heartbeat_s=1000.0, answer_s=LIMIT_S)  # and so records are always fresh


def peer_of(rank, pid):
    me = Peer.me(LaunchInfo("heartbeats", 8, 3, rank, rank - 1, master_port=1))
    return replace(me, pid=pid, start_ticks=start_ticks(pid))


class Group:
    def __init__(self, key):
        self.key, self.number = key, 1

    def call_status(self):
        return CallStatus("barrier", self.number, "a.py:1", 0.0)


class Rank:
    """The heartbeats of one rank, each on request, over a connection of its own."""

    def __init__(self, server, rank, keys):
        hello = Hello(rank, CONTROL, token=rank.to_bytes(8, "big"), process=f"rank {rank}")
        addresses = [server.address]
        self.client = Client(lambda: addresses, CREDENTIALS, hello, LIMIT_S)
        self.num_asked = 0
        self.heartbeat = Heartbeat(rank, self.ask, BY_HAND)
        self.heartbeat.groups.update({key: Group(key) for key in keys})
        self.heartbeat._own = OwnRecord()

    def ask(self, op, *arguments, timeout_s):
        self.num_asked += 1
        return self.client.ask(op, *arguments, timeout_s=timeout_s)

    def close(self):
        self.heartbeat.close()
        self.client.close()


@pytest.fixture
def server():
    server = ControlServer(socket.create_server(("127.0.0.1", 0)), CREDENTIALS, BY_HAND)
    server.open(0)
    yield server
    server.begin_closing()
    assert server.wait(5)


@pytest.fixture
def node(server):
    """Ranks 1, 2 and 3, on one node: all in one group, and 2 and 3 in one of their own."""
    keys = {1: ["c0/"], 2: ["c0/", "s/"], 3: ["c0/", "s/"]}
    ranks = [Rank(server, rank, keys[rank]) for rank in keys]
    fds = {1 + index: rank.heartbeat.record_fd for index, rank in enumerate(ranks)}
    for index, rank in enumerate(ranks):
        others = [Neighbour(peer_of(other, os.getpid()), fd) for other, fd in fds.items()]
        rank.heartbeat.set_node(others[:index], others[index + 1 :])
    yield ranks
    for rank in ranks:
        with contextlib.suppress(ValueError):  # closed already
            rank.close()


def beat(ranks):
    """The ranks that asked rank 0, of these."""
    before = [rank.num_asked for rank in ranks]
    for rank in ranks:
        rank.heartbeat._beat()
    return [index for index, rank in enumerate(ranks) if rank.num_asked > before[index]]


def reports_of(server, *ranks):
    reports = server.ask(Op.REPORTS, ranks, timeout_s=LIMIT_S)
    return [RankReport.from_wire(reports[rank]) for rank in ranks]


def test_the_first_rank_speaks_for_all(server, node):
    node[2].heartbeat.groups["s/"].number = 5
    node[2].heartbeat._beat()
    assert beat(node) == [0]
    one, two, three = reports_of(server, 1, 2, 3)
    assert list(one.calls) == ["c0/"] and list(two.calls) == ["c0/", "s/"]
    assert three.calls["s/"].number == 5


def test_the_next_rank_speaks_where_the_first_has_left(server, node):
    node[0].close()
    assert beat(node[1:]) == [0]
    assert list(reports_of(server, 3)[0].calls) == ["c0/", "s/"]


def test_the_others_hear_of_lost_ranks_and_of_failures_of_their_groups(server, node):
    Rank(server, 7, []).client._idle[0].close()
    server.ask(Op.REPORT, "s/", b"why", timeout_s=LIMIT_S)
    server.ask(Op.REPORT, "another/", b"why", timeout_s=LIMIT_S)
    while 7 not in node[2].heartbeat.lost:
        assert beat(node) == [0]
    for rank in node[1:]:
        rank.heartbeat.sync()
        assert rank.heartbeat.group_failures == {"s/": b"why"} and list(rank.heartbeat.lost) == [7]


def test_a_record_shows_the_call_that_a_rank_waits_in(node):
    """Not only that of its last heartbeat: near a deadline the others ask."""
    heartbeat, seen = node[2].heartbeat, node[0].heartbeat._neighbours[1]
    heartbeat._beat()
    heartbeat.groups["c0/"].number = 2
    heartbeat._written_at = 0.0
    heartbeat.sync()
    assert seen.read().calls["c0/"][1] == 2


def test_who_has_lost_rank_0_does_not_speak(node):
    node[0].heartbeat.lost[0] = 0.0
    assert beat(node) == [0, 1]
    assert 0 not in node[1].heartbeat.lost, "it asked for itself"


@pytest.fixture
def process():
    """A process with a record, as a neighbour."""
    record = OwnRecord()
    fd = os.dup(record.fd)  # that itself the child closes
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    os.close(fd)
    yield record, Neighbour(peer_of(1, pid), fd), pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_rank_that_is_stopped_dead_or_silent_does_not_speak(process):
    record, neighbour, pid = process
    assert neighbour.read() is None and not neighbour.runs(10.0, 1.0)
    record.write(NodeRecord(10.0, {}, [], {}))
    assert neighbour.runs(10.5, 1.0) and not neighbour.runs(11.5, 1.0)
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    assert neighbour.is_suspended() and not neighbour.runs(10.5, 1.0)
    os.kill(pid, signal.SIGCONT)
    os.waitid(os.P_PID, pid, os.WCONTINUED)
    assert neighbour.runs(10.5, 1.0)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert not neighbour.runs(10.5, 1.0)


def test_half_a_record_is_not_read(process):
    record, neighbour, _ = process
    record.write(NodeRecord(1.0, {}, [5], {}))
    assert neighbour.read() == NodeRecord(1.0, {}, [5], {})
    os.pwrite(record.fd, b"half", 6)
    assert neighbour.read().lost == [5]
    record.write(NodeRecord(2.0, {}, [], {}))
    assert neighbour.read().written_at == 2.0
    record.close()
    assert neighbour.read() is None
