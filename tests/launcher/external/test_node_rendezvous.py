"""Nodes with a launch command each: on two hosts, made of network namespaces, and on this one."""

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from launcher import errors, ports, timings
from launcher.external import node_rendezvous
from launcher.job import Job, Target
from launcher.launch_info import MAX_PORT

# One node of a launch, with every time a tenth: what its launcher says, and how that ends.
NODE = """
import sys
from launcher import timings
timings.TIMINGS = timings.TIMINGS.scaled(0.1)
from launcher.cli import main
from launcher.external import node_rendezvous, backend_launcher
backend_launcher._watch = lambda *_: print("all nodes are here", flush=True) or 0
sys.exit(main(["run", "--launcher", "torchrun", "--nnodes", "2", *sys.argv[1:], "-m", "this"]))
"""
FIRST = "10.77.0.1"
ROOT = Path(__file__).parents[3]
KEPT = ports.reserve(ports.candidates(uuid.uuid4().hex))  # from the launches of tests beside these
PORT = KEPT.getsockname()[1]


def start(hosts, node, *options):
    options = ["--node-rank", f"{node}", "--master-addr", FIRST, *options]
    command = hosts.command(node, [sys.executable, "-c", NODE, *options])
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def ends(*nodes):
    outputs = [node.communicate(timeout=60) for node in nodes]
    return [(node.returncode, out, err) for node, (out, err) in zip(nodes, outputs, strict=True)]


def test_a_missing_node_is_named_every_few_seconds_and_at_the_deadline(hosts):
    ((code, _, err),) = ends(start(hosts, 0, "--launch-id", "monday", "--timeout", "2.8"))
    where = f"node 1 of 2 at {FIRST}:{ports.of_nodes('monday', 0)}"
    assert 1 < err.count(f"[launcher] waiting for {where}; nodes seen: 0\n") < 6
    assert f"{where} did not come within 2.8 s (nodes seen: 0)" in err
    assert code == 124


def test_a_node_says_that_it_waits_for_the_first(hosts):
    options = ("--launch-id", "monday", "--master-port", "29500", "--timeout", "2.4")
    ((code, _, err),) = ends(start(hosts, 1, *options))
    assert f"waiting for node 0 of 2 at {FIRST}:29500 (Connection refused); nodes seen: 0\n" in err
    assert f"node 0 of 2 at {FIRST}:29500 did not come within 2.4 s (Connection refused)" in err
    assert code == 124


def test_two_launch_ids_at_one_port_are_named_on_both_sides_at_once(hosts):
    port = ("--master-port", "29500", "--timeout", "20")
    first = start(hosts, 0, "--launch-id", "monday", *port)
    ((code, _, err),) = ends(start(hosts, 1, "--launch-id", "tuesday", *port))
    a, b = hosts.names
    both = f"--launch-id is 'monday' on node 0 (host {a}) and 'tuesday' on node 1 (host {b})"
    assert both in err and code == 1
    line = next(line for line in first.stderr if "waiting" not in line)
    assert line == f"[launcher] a node came from 10.77.0.2, and was sent away: {both}\n"
    second = start(hosts, 1, "--launch-id", "monday", *port)  # corrected, it is let in
    assert [(code, "all nodes are here" in out) for code, out, _ in ends(first, second)] == (
        [(0, True)] * 2
    )


def test_two_launch_ids_with_a_port_each_are_named_on_both_sides(hosts):
    first = start(hosts, 0, "--launch-id", "monday", "--timeout", "6")
    second = start(hosts, 1, "--launch-id", "tuesday", "--timeout", "4")
    a, b = hosts.names
    both = f"--launch-id is 'monday' on node 0 (host {a}) and 'tuesday' on node 1 (host {b})"
    for code, _, err in ends(first, second):
        notices, box = err.split("╭")
        assert notices.count(both) == 1 and f"Another launch did come: {both}. " in box, err
        assert "did not come within" in box and "check that a firewall" in box and code == 124, err


def test_a_name_that_is_loopback_to_its_own_host_is_no_trap(hosts):
    words = ("--launch-id", "monday", "--timeout", "20", "--master-addr", hosts.names[0])
    ended = ends(start(hosts, 0, *words), start(hosts, 1, *words))
    assert [(code, "all nodes are here" in out) for code, out, _ in ended] == [(0, True)] * 2


def job(node, **values):
    fields = {"nprocs": 2, "nnodes": 3, "launch_id": "three", "master_port": PORT, **values}
    return Job(Target("module", "this"), node_rank=node, timeout_s=20, **fields)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(timings, "TIMINGS", timings.TIMINGS.scaled(0.05))


class Nodes:
    """Nodes of one launch, each in a thread; their outcomes, by node rank."""

    def __init__(self):
        self.outcomes, self.threads = {}, []

    def start(self, *nodes):
        for node in nodes:
            self.threads.append(threading.Thread(target=self.meet, args=(job(node),)))
            self.threads[-1].start()

    def meet(self, job):
        try:
            node_rendezvous.meet(job, job.master_port)
            self.outcomes[job.node_rank] = "met"
        except errors.LaunchError as error:
            self.outcomes[job.node_rank] = str(error)

    def join(self):
        for thread in self.threads:
            thread.join(30)
        assert self.outcomes == dict.fromkeys(range(3), "met")


@pytest.fixture
def nodes(quick):
    """The first of three nodes waits; in the end, all have met."""
    nodes = Nodes()
    nodes.start(0)
    yield nodes
    nodes.join()


def test_three_nodes_meet_and_each_hears_who_is_missing(nodes, capfd):
    nodes.start(2)
    text = f"waiting for node 1 of 3 at 127.0.0.1:{PORT}; nodes seen: 1"
    seen = ""
    while seen.count(text) < 2:  # by the first, and by the one that waits with it
        seen += capfd.readouterr().err
    nodes.start(1)


@pytest.mark.parametrize(
    "values, text",
    [
        ({"nprocs": 4}, "-n is 2 on node 0"),
        ({"nnodes": 2}, "--nnodes is 3 on node 0"),
        ({"node_rank": 0}, "--node-rank 0 is host"),
    ],
)
def test_a_node_that_does_not_belong_is_told_why_and_the_others_meet(nodes, values, text, capfd):
    stranger = dataclasses.replace(job(1), **{**values, "node_rank": 1})
    described = dataclasses.replace(
        node_rendezvous.NodeDescription.of(stranger), node_rank=values.get("node_rank", 1)
    )
    assert text in said_to(described)
    nodes.start(1, 2)


def test_another_version_is_named(nodes):
    described = node_rendezvous.NodeDescription.of(job(1))
    assert "the version of drumline is" in said_to(dataclasses.replace(described, version="9.9"))
    nodes.start(1, 2)


def test_nodes_that_gave_up_before_they_heard_that_all_are_here_are_waited_for(nodes):
    """The first node had read that they were here, and started alone."""
    with connected() as one, connected() as two:
        for rank, connection in ((1, one), (2, two)):
            introduce(connection, node_rendezvous.NodeDescription.of(job(rank)))
            assert json.loads(connection.makefile().readline())["problem"] == ""
    nodes.start(1, 2)


def said_to(described):
    """The problem that the first node has with a node."""
    with connected() as connection:
        introduce(connection, described)
        return json.loads(connection.makefile().readline())["problem"]


def introduce(connection, described):
    connection.sendall(json.dumps(dataclasses.asdict(described)).encode() + b"\n")


def connected():
    while True:
        try:
            return socket.create_connection(("127.0.0.1", PORT), 10)
        except ConnectionRefusedError:
            pass


def described(**values):
    """A line in which a node says what it launches."""
    node = node_rendezvous.NodeDescription.of(job(1))
    return json.dumps({**dataclasses.asdict(node), **values}).encode() + b"\n"


NO_NODES = {
    "http": b"GET / HTTP/1.0\n",
    "list": b"[]\n",
    "nested": b"[" * 3000 + b"\n",
    "part": b'{"launch_id": 1}\n',
    "long": b"x" * 9999,
    "too_many": described(node_rank=3),
    "negative": described(node_rank=-1),
}


@pytest.mark.parametrize("data", NO_NODES.values(), ids=NO_NODES)
def test_what_is_no_node_is_sent_away_in_silence(nodes, data, capfd):
    with connected() as connection:
        connection.sendall(data)
        try:
            assert connection.recv(1) == b""
        except ConnectionResetError:
            pass
    nodes.start(1, 2)
    assert "came from" not in capfd.readouterr().err


@contextlib.contextmanager
def followed(*lines, stays=True):
    """A node that follows what answers with these lines in place of the first one."""

    def answer():
        with listener.accept()[0] as connection, connection.makefile("rwb") as file:
            file.readline()
            for line in lines:
                file.write(line + b"\n")
            file.flush()
            file.readline()  # until the follower leaves

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answerer = threading.Thread(target=answer)
        answerer.start()
        port = listener.getsockname()[1]
        with contextlib.closing(node_rendezvous.NodeFollower(job(1), port, stays)) as follower:
            yield follower
        answerer.join()


def greeting():
    described = dataclasses.asdict(node_rendezvous.NodeDescription.of(job(0)))
    return json.dumps({"node": described, "problem": ""}).encode()


def test_whoever_listens_for_nodes_decides_the_place_of_ranks_and_nothing_else():
    """Nothing proves who the first node is, so that it must not choose what is run."""
    place = {"launch_id": "a", "nnodes": 2, "master_port": 2, "node_rank": 1}
    go = {"go": {**place, "target": "x", "preload": ["x"]}}
    with followed(greeting(), json.dumps(go).encode()) as follower:
        assert follower.join() == dataclasses.replace(job(1), **place)


def test_lines_that_come_at_once_are_obeyed_at_once():
    """A stop behind another line lay in a buffer until more came, seconds later."""
    go = {"go": {"launch_id": "a", "nnodes": 2, "master_port": 2, "node_rank": 1}}
    with followed(greeting(), json.dumps(go).encode(), b'{"stop": true}') as follower:
        follower.join()
        assert follower.is_over(1)


@pytest.mark.parametrize("line", [b"\xfd\xfe\xfd", b"[" * 3000, b'{"node": 1}'])
def test_what_answers_as_no_launch_does_is_not_blamed_on_the_address(line):
    with followed(line, stays=False) as follower:
        why = follower._try_to_join(time.monotonic() + 60)
    assert why == "what listens there is no launch"


def test_the_last_word_of_the_first_node_is_an_error_and_no_command_of_the_terminal():
    end = b'{"end": "\\u001b[2Jover", "code": Infinity}'
    with followed(greeting(), end) as follower, pytest.raises(errors.LaunchError) as caught:
        follower.join()
    assert (str(caught.value), caught.value.exit_code) == ("?[2Jover", 1)


@pytest.mark.parametrize("address", ["0", "::", ""])
def test_the_first_node_listens_on_no_address_that_is_every_interface(address):
    with pytest.raises(OSError, match="it is every interface"):
        node_rendezvous.NodeLeader(job(0, master_addr=address), PORT)


def test_ranks_get_a_port_where_the_nodes_meet_at_the_last_one():
    leader = node_rendezvous.NodeLeader(job(0), PORT, stays=True)
    with contextlib.closing(leader), connected() as connection:
        introduce(connection, node_rendezvous.NodeDescription.of(job(1)))
        while 1 not in leader.nodes:
            leader.step(60)
        leader.port = MAX_PORT
        assert ports.FIRST_PORT <= leader.begin([0, 1]).master_port < MAX_PORT


def test_many_idle_connections_keep_no_node_out(nodes):
    idle = [connected() for _ in range(2 * node_rendezvous.MAX_STRANGERS)]
    nodes.start(1, 2)
    nodes.join()
    for connection in idle:
        connection.close()


def test_a_node_whose_packets_are_dropped_says_so_every_few_seconds(monkeypatch, capfd):
    """Connections that neither succeed nor fail took the time of four of these lines."""
    connect, attempts_s = socket.create_connection, []

    def connect_within(address, timeout_s):
        attempts_s.append(timeout_s)
        return connect(address, timeout_s)

    monkeypatch.setattr(timings, "TIMINGS", timings.TIMINGS.scaled(0.02))
    with full_listener() as port, full_listener() as common_port:
        monkeypatch.setattr(node_rendezvous, "COMMON_PORT", common_port)
        monkeypatch.setattr(socket, "create_connection", connect_within)
        with pytest.raises(errors.LaunchTimeout, match="timed out"):
            node_rendezvous.meet(dataclasses.replace(job(1), timeout_s=0.5), port)
    assert f"127.0.0.1:{port} (Connection timed out)" in capfd.readouterr().err
    assert 2 * max(attempts_s) < timings.TIMINGS.node_status_s  # one at each port


def test_a_node_that_reaches_another_port_of_the_first_says_so(monkeypatch, nodes):
    """As behind a firewall that lets it reach the port where all launches meet, and no other."""

    class Noticed(Exception):
        pass

    def notice(text):
        if f"(Connection refused, while its port {PORT} answers)" in text:
            raise Noticed

    monkeypatch.setattr(node_rendezvous, "COMMON_PORT", PORT)
    monkeypatch.setattr(node_rendezvous, "_notice", notice)
    with socket.socket() as closed, pytest.raises(Noticed):
        closed.bind(("127.0.0.1", 0))
        node_rendezvous.meet(job(1), closed.getsockname()[1])
    nodes.start(1, 2)


@contextlib.contextmanager
def full_listener():
    """A port that answers no further connection, as behind a firewall that drops packets."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_a_name_that_no_host_can_have_is_an_error_at_once(quick):
    with pytest.raises(errors.LaunchError, match="is no name of a host"):
        node_rendezvous.meet(dataclasses.replace(job(1), master_addr="a..b"), PORT)
