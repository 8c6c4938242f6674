"""Rank 0's work for many ranks, simulated: real connections and messages, no processes."""

import os
import random
import socket
import time
import uuid
from dataclasses import replace

import pytest

from coordinator.binomial_tree import children_of, parent_of
from coordinator.control.client import connect
from coordinator.control.credentials import Credentials
from coordinator.control.framing import LENGTH, pack, pack_for_many, unpack_answer
from coordinator.control.handshake import CONTROL, Hello
from coordinator.control.membership import RankReport
from coordinator.control.operations import Op
from coordinator.control.server import PING, ControlServer
from coordinator.peers import Peer
from coordinator.timings import DEFAULT, HEARTBEATS_PER_S

RANKS_PER_NODE = 8
SIZES = [
    200,
    pytest.param(2000, marks=pytest.mark.soak),
    pytest.param(4000, marks=pytest.mark.soak),
]


class SimulatedLaunch:
    """A server, and the connections of ranks that are on 1/8 as many hosts."""

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self.credentials = Credentials(bytes(range(32)), "scale", num_ranks)
        timings = replace(DEFAULT, ping_after_s=1000.0)  # however slow the machine is
        listener = socket.create_server(("127.0.0.1", 0))
        self.server = ControlServer(listener, self.credentials, timings)
        self.server.open(0)
        self.connections = [self.joined(rank) for rank in range(1, num_ranks)]

    def joined(self, rank):
        hello = Hello(rank, CONTROL, token=rank.to_bytes(8, "big"), process=f"rank {rank}")
        deadline = time.monotonic() + 20
        return connect(socket.AF_INET, self.server.address, self.credentials, hello, deadline)

    def ask_by_all(self, request):
        """The answers to what all ranks ask at once; request(rank): the operation, its arguments.
        And the seconds of processor time that rank 0 took, and the bytes of its answers."""
        clock = time.pthread_getcpuclockid(self.server._thread.ident)
        before, deadline = time.clock_gettime(clock), time.monotonic() + 60
        for rank, connection in enumerate(self.connections, 1):
            connection.send((1, *request(rank)), deadline)
        answers = [self.packed_answer(connection, deadline) for connection in self.connections]
        cpu_s = time.clock_gettime(clock) - before
        distinct = {
            packed: unpack_answer(packed)[1] for packed in set(answers)
        }  # most are the same
        return [distinct[packed] for packed in answers], cpu_s, sum(map(len, answers))

    def packed_answer(self, connection, deadline):
        while True:
            (nbytes,) = LENGTH.unpack(connection.read_exactly(LENGTH.size, deadline))
            packed = bytes(connection.read_exactly(nbytes, deadline))
            if packed != pack(PING):
                return packed

    def close(self):
        for connection in self.connections:
            connection.send((0, Op.LEAVE), time.monotonic() + 5)
            connection.close()
        self.server.begin_closing()
        assert self.server.wait(20)


@pytest.fixture(params=SIZES)
def launch(request):
    simulated = SimulatedLaunch(request.param)
    yield simulated
    simulated.close()


def packets_of(num_ranks):
    """What the ranks of so many hosts tell each other when they meet."""
    own = Peer(0, 0, RANKS_PER_NODE, "", "", os.getpid(), 1)
    hosts = [str(uuid.uuid4()) for _ in range(num_ranks // RANKS_PER_NODE)]
    peers = []
    for rank in range(num_ranks):
        node, local_rank = divmod(rank, RANKS_PER_NODE)
        fields = vars(own) | {"rank": rank, "local_rank": local_rank, "host": f"node-{node}"}
        fields |= {"boot_id": hosts[node], "memory": f"{hosts[node]}/pid:[4026531836]/u/0"}
        fields |= {
            "pid": 10_000 + 7 * rank,
            "start_ticks": 10**6 + random.randrange(3000),
            "address": f"10.0.{node // 250}.{node % 250}",
        }
        peers.append(Peer(**fields).pack())
    return peers


def meet(launch):
    """The bytes that rank 0 sends until every rank knows all others, and its processor time.

    The steps of coordinator/transport/joining.py; the root of the tree is here a rank as any other.
    """
    packets = packets_of(launch.num_ranks)[:-1]
    size = len(packets)
    nodes = [range(i, min(i + RANKS_PER_NODE, size)) for i in range(0, size, RANKS_PER_NODE)]
    spent = []

    def ask(request):
        answers, *work = launch.ask_by_all(lambda rank: request(rank - 1))
        spent.append(work)
        return answers

    def in_node(name, data):
        def request(place):
            node = nodes[place // RANKS_PER_NODE]
            key = f"{name}/{node[0]}"
            return Op.RENDEZVOUS, key, node.index(place), len(node), data, ""

        return ask(request)

    machine = [Peer.unpack(packet).machine for packet in packets]
    answers = ask(
        lambda place: (Op.RENDEZVOUS, "peers", place, size, packets[place], machine[place])
    )
    for place, answer in enumerate(answers):
        node = nodes[place // RANKS_PER_NODE]
        assert answer == {other: packets[other] for other in node}
    in_node("memory", pack((7, "", list(range(64)))))
    in_node("attached", b"")
    firsts = {
        node[0]: pack((("10.0.0.1", 30_000), {place: packets[place] for place in node}))
        for node in nodes
    }
    answers = ask(lambda place: (Op.NUMBER, "nodes", place, size, firsts.get(place, b"")))
    assert answers[0] == [0, len(nodes), dict(enumerate(firsts.values()))]
    for index, node in enumerate(nodes[1:], 1):
        near = {parent_of(index), *children_of(index, len(nodes))}
        assert answers[node[0]] == [index, len(nodes), {i: firsts[nodes[i][0]] for i in near}]
    assert ask(lambda place: (Op.RENDEZVOUS, "tree", place, size, b"", ""))[-1] == {}
    down_the_tree = len(pack_for_many(answers[0][2])) * len(children_of(0, len(nodes)))
    cpu_s, nbytes = map(sum, zip(*spent, strict=True))
    return nbytes + down_the_tree, cpu_s


MOST = pytest.param(9904, marks=pytest.mark.soak)  # as many files as one process may open


@pytest.mark.parametrize("launch", [*SIZES, MOST], indirect=True)
def test_the_work_to_meet_grows_in_step_with_the_ranks(launch):
    """Every rank learns of every other, but rank 0 does not say it to each."""
    nbytes, cpu_s = meet(launch)
    print(f"{launch.num_ranks} ranks: {nbytes / 1e6:.1f} MB, {cpu_s:.2f} s of processor time")
    assert nbytes < 6000 * launch.num_ranks


def test_all_ranks_may_ask_for_the_membership_at_once(launch):
    launch.ask_by_all(lambda rank: (Op.HEARTBEAT, 0, {"c0/": ("barrier", 1, "a.py:1", 0.1)}, []))
    answers, cpu_s, _ = launch.ask_by_all(lambda rank: (Op.MEMBERSHIP, "", []))
    for answer in answers:
        assert sorted(answer) == list(range(1, launch.num_ranks))
    report = RankReport.from_wire(answers[-1][launch.num_ranks - 1])
    assert report.calls["c0/"].call == "barrier #1 (a.py:1)" and not report.note
    if launch.num_ranks == 2000:
        assert cpu_s < 0.5, cpu_s


def test_the_failures_of_many_groups_are_told_in_few_bytes(launch):
    """Where a host dies, a group of every rank fails, and all ranks hear of all of them."""
    text = b"rank 7 (host node-0, pid 4711) was found dead: killed by SIGKILL. " * 5
    launch.ask_by_all(lambda rank: (Op.REPORT, f"c0/{rank}/", text))
    answers, cpu_s, nbytes = launch.ask_by_all(lambda rank: (Op.HEARTBEAT, 0, {}, []))
    groups = sorted(f"c0/{rank}/" for rank in range(1, launch.num_ranks))
    assert all(sorted(group for group, _ in answer) == groups for answer in answers)
    assert nbytes < launch.num_ranks**2 * len(text) / 10
    if launch.num_ranks == 2000:
        assert cpu_s < 1, cpu_s


def test_an_answer_about_the_membership_is_of_this_moment(launch):
    """It serves all that ask for a tenth of a second, and no longer."""
    launch.ask_by_all(lambda rank: (Op.HEARTBEAT, 0, {}, []))
    leaver = launch.connections.pop()
    launch.connections[0].send((2, Op.MEMBERSHIP, "", []), time.monotonic() + 5)
    launch.packed_answer(launch.connections[0], time.monotonic() + 20)
    leaver.send((0, Op.LEAVE), time.monotonic() + 5)
    leaver.close()
    time.sleep(2 * launch.server._timings.reports_s)
    (answer, *_), _, _ = launch.ask_by_all(lambda rank: (Op.MEMBERSHIP, "", []))
    assert RankReport.from_wire(answer[launch.num_ranks - 1]).note == "left"


def test_ranks_that_are_well_are_not_told_of(launch):
    """All ranks with subscribers ask again and again: of every rank, it was as many bytes each."""
    status, last = ("barrier", 1, "a.py:1", 0.1), launch.num_ranks - 1

    def heartbeat(rank):
        groups = {"c1/" if rank == last else "c0/": status}
        return Op.HEARTBEAT, 0, groups, [2] if rank == 1 else []

    launch.ask_by_all(heartbeat)
    answers, _, nbytes = launch.ask_by_all(lambda rank: (Op.MEMBERSHIP, "c0/", []))
    assert all(sorted(answer) == [2, last] for answer in answers)
    assert RankReport.from_wire(answers[0][2]).note == "suspended"
    assert nbytes < 150 * launch.num_ranks
    answers, _, _ = launch.ask_by_all(lambda rank: (Op.MEMBERSHIP, "c0/", [2, 3]))
    assert all(sorted(answer) == [2] for answer in answers)


@pytest.mark.parametrize("world_size", [2, 512, 1000, 10_000])
def test_pauses_and_limits_grow_with_the_ranks(world_size):
    """From 1,300 ranks on, all of them and rank 0 seemed silent between two heartbeats."""
    timings = DEFAULT.for_ranks(world_size)
    assert world_size / timings.heartbeat_s <= HEARTBEATS_PER_S
    assert timings.ping_after_s > 2 * timings.heartbeat_s
    assert timings.silent_s > timings.ping_after_s + timings.acknowledged_s
    assert timings.master_silent_s > max(timings.silent_s, 2 * timings.membership_s)
    assert timings.reports_s < timings.silent_s / 5
