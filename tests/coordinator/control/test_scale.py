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
from coordinator.control.framing import pack, pack_for_many, unpack_answer
from coordinator.control.membership import RankReport
from coordinator.control.operations import Op
from coordinator.control.server import CONTROL, PING, ControlServer
from coordinator.peers import Peer
from coordinator.timings import DEFAULT, HEARTBEATS_PER_S
from launcher.authentication.credentials import Credentials
from launcher.authentication.framed_connection import LENGTH
from launcher.authentication.handshake import Hello

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
        return connect(self.server.address, self.credentials, hello, deadline)

    def members(self):
        return self.server._membership.members.values()

    def ask_by_all(self, request, ranks=None):
        """The answers to what all ranks, or these, ask at once; request(rank): the operation, its
        arguments. And the seconds of processor time that rank 0 took, and its answers' bytes."""
        clock = time.pthread_getcpuclockid(self.server._thread.ident)
        before, deadline = time.clock_gettime(clock), time.monotonic() + 60
        ranks = ranks or range(1, len(self.connections) + 1)
        connections = [self.connections[rank - 1] for rank in ranks]
        for rank, connection in zip(ranks, connections, strict=True):
            connection.send((1, *request(rank)), deadline)
        answers = [self.packed_answer(connection, deadline) for connection in connections]
        cpu_s = time.clock_gettime(clock) - before
        distinct = {
            packed: unpack_answer(packed)[1] for packed in set(answers)
        }  # most are the same
        return [distinct[packed] for packed in answers], cpu_s, sum(map(len, answers))

    def packed_answer(self, connection, deadline):
        while True:
            (nbytes,) = LENGTH.unpack(connection.read_exactly(LENGTH.size, deadline))
            packed = connection.read_exactly(nbytes, deadline)
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


def states_of(launch, call=1, suspended=()):
    """The heartbeats of the ranks, by the first of each host; from the others nothing comes."""
    firsts = range(1, launch.num_ranks, RANKS_PER_NODE)
    calls = {"c0/": ("barrier", call, "a.py:1", 0.1)}
    return {
        first: {
            rank: (0.0, rank in suspended, calls)
            for rank in range(first, min(first + RANKS_PER_NODE, launch.num_ranks))
        }
        for first in firsts
    }


def send_heartbeats(launch, states, groups=("c0/",)):
    return launch.ask_by_all(lambda rank: (Op.HEARTBEAT, 0, list(groups), states[rank]), states)


def test_heartbeats_take_rank_0_little(launch):
    """One comes from each host: 1,024 in a second at most, of however many ranks."""
    states = states_of(launch)
    _, cpu_s, _ = send_heartbeats(launch, states)
    print(f"{launch.num_ranks} ranks: {1e6 * cpu_s / len(states):.0f} us a heartbeat")
    assert all(not member.is_silent(time.monotonic(), 60) for member in launch.members())
    assert cpu_s * HEARTBEATS_PER_S / len(states) < 0.5


def test_all_ranks_may_ask_at_once_who_is_late(launch):
    """Near the deadline of a call. Rank 0 said all that it knows of every rank to each of them."""
    last = launch.num_ranks - 1
    states = states_of(launch)
    states[1][2] = (0.0, True, states[1][2][2])
    states[last - (last - 1) % RANKS_PER_NODE][last] = (
        0.0,
        False,
        {"c0/": ("get", 7, "b.py", 0.1)},
    )
    send_heartbeats(launch, states)
    answers, cpu_s, nbytes = launch.ask_by_all(lambda rank: (Op.UNWELL, "c0/", "barrier", 1))
    assert all(list(answer) == [2, last] for answer in answers)
    reports = [RankReport.from_wire(answers[0][rank]) for rank in (2, last)]
    assert reports[0].note == "suspended" and not reports[1].note
    assert reports[1].calls["c0/"].call == "get #7 (b.py)"
    assert nbytes < 150 * launch.num_ranks
    print(f"{launch.num_ranks} ranks: {nbytes / 1e6:.2f} MB, {cpu_s:.2f} s of processor time")


def test_of_many_late_ranks_as_many_are_told_as_an_error_shows(launch):
    send_heartbeats(launch, states_of(launch))
    answers, _, nbytes = launch.ask_by_all(lambda rank: (Op.UNWELL, "c0/", "barrier", 2))
    assert all(len(answer) == 64 for answer in answers)
    assert nbytes < 4000 * launch.num_ranks


def test_of_a_failed_group_its_members_are_told_alone(launch):
    """Where a host dies, a group of every rank fails, and all ranks heard of all of them."""
    text = b"rank 7 (host node-0, pid 4711) was found dead: killed by SIGKILL. " * 5
    launch.ask_by_all(lambda rank: (Op.REPORT, f"c0/{rank}/", text))
    answers, _, nbytes = launch.ask_by_all(
        lambda rank: (Op.HEARTBEAT, 0, ["c0/", f"c0/{rank}/"], {})
    )
    for rank, answer in enumerate(answers, 1):
        assert answer == [[], {f"c0/{rank}/": text}, 0.0]
    assert nbytes < 2 * len(text) * launch.num_ranks


def test_an_answer_about_ranks_is_of_this_moment(launch):
    """It serves all that ask for a tenth of a second, and no longer."""
    send_heartbeats(launch, states_of(launch))
    leaver = launch.connections.pop()
    launch.connections[0].send((2, Op.UNWELL, "c0/", "", 0), time.monotonic() + 5)
    launch.packed_answer(launch.connections[0], time.monotonic() + 20)
    leaver.send((0, Op.LEAVE), time.monotonic() + 5)
    leaver.close()
    time.sleep(2 * launch.server.timings.reports_s)
    (answer, *_), _, _ = launch.ask_by_all(lambda rank: (Op.UNWELL, "c0/", "", 0))
    assert RankReport.from_wire(answer[launch.num_ranks - 1]).note == "left"


@pytest.mark.parametrize("world_size", [2, 512, 1000, 10_000])
@pytest.mark.parametrize("ranks_per_node", [1, 8])
def test_pauses_and_limits_grow_with_the_ranks(world_size, ranks_per_node):
    """From 1,300 ranks on, all of them and rank 0 seemed silent between two heartbeats."""
    num_nodes = max(world_size // ranks_per_node, 1)
    timings = DEFAULT.for_ranks(world_size, num_nodes)
    assert num_nodes / timings.heartbeat_s <= HEARTBEATS_PER_S
    assert world_size / timings.membership_s <= HEARTBEATS_PER_S
    assert timings.ping_after_s > 2 * timings.heartbeat_s
    assert timings.silent_s > timings.ping_after_s + timings.acknowledged_s
    assert timings.master_silent_s > max(timings.silent_s, 2 * timings.membership_s)
    assert timings.reports_s < timings.silent_s / 5
