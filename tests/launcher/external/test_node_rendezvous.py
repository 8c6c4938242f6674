"""Nodes with a launch command each: on two hosts, made of network namespaces, and on this one."""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from launcher import errors, ports, timings
from launcher.authentication.framed_connection import ConnectionBroken, FramedConnection
from launcher.authentication.handshake import (
    GREETING,
    MAGIC,
    VERSION,
    AuthenticatedListener,
    Hello,
    LaunchFailed,
    SecretRejected,
    authenticate,
)
from launcher.authentication.launch_token import LaunchToken
from launcher.backends import torch_rendezvous, torchrun
from launcher.external import (
    backend_launcher,
    failed_rank,
    node_follower,
    node_leader,
    node_messages,
    node_rendezvous,
)
from launcher.external.node_messages import ASKS, NodeChannel, NodeDescription
from launcher.job import Job, Target
from launcher.launch_info import MAX_PORT
from launcher.local import launch_local
from launcher.system import stop_signals

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
TOKEN = LaunchToken.draw()


def start(hosts, node, *options, token=TOKEN):
    options = ["--node-rank", f"{node}", "--master-addr", FIRST, *options]
    command = hosts.command(node, [sys.executable, "-c", NODE, *options])
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DRUMLINE_TOKEN": str(token)},
    )


def ends(*nodes):
    outputs = [node.communicate(timeout=60) for node in nodes]
    return [(node.returncode, out, err) for node, (out, err) in zip(nodes, outputs, strict=True)]


def test_a_missing_node_is_named_every_few_seconds_and_at_the_deadline(hosts):
    ((code, _, err),) = ends(start(hosts, 0, "--timeout", "2.8"))
    where = f"node 1 of 2 at {FIRST}:{ports.NODES_PORT}"
    assert 1 < err.count(f"[launcher] waiting for {where}; nodes seen: 0\n") < 6
    assert f"{where} did not come within 2.8 s (nodes seen: 0)" in err
    assert code == 124


def test_a_node_says_that_it_waits_for_the_first(hosts):
    options = ("--master-port", "29500", "--timeout", "2.4")
    ((code, _, err),) = ends(start(hosts, 1, *options))
    assert f"waiting for the first node at {FIRST}:29500 (Connection refused), for " in err
    assert f"no first machine of a launch was at {FIRST}:29500 within 2.4 s (Connection" in err
    assert code == 124


def test_a_node_with_another_token_is_told_at_once_and_one_with_the_right_token_joins(hosts):
    first = start(hosts, 0, "--timeout", "20")
    ((code, out, err),) = ends(start(hosts, 1, "--timeout", "20", token=LaunchToken.draw()))
    assert f"the token is not that of the first node at {FIRST}:{ports.NODES_PORT}" in err
    assert "type the one that it printed" in err and code == 1 and out == ""
    second = start(hosts, 1, "--timeout", "20")
    ended = ends(first, second)
    assert [(code, "all nodes are here" in out) for code, out, _ in ended] == [(0, True)] * 2
    assert ended[0][2].count("does not know the launch secret") == 1


def test_a_name_that_is_loopback_to_its_own_host_is_no_trap(hosts):
    words = ("--timeout", "20", "--master-addr", hosts.names[0])
    ended = ends(start(hosts, 0, *words), start(hosts, 1, *words))
    assert [(code, "all nodes are here" in out) for code, out, _ in ended] == [(0, True)] * 2


def job(node, **values):
    fields = {"nprocs": 2, "nnodes": 3, "launch_id": "three", "master_port": PORT, "token": TOKEN}
    return Job(Target("module", "this"), node_rank=node, timeout_s=20, **{**fields, **values})


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(timings, "TIMINGS", timings.TIMINGS.scaled(0.05))


class Nodes:
    """Nodes of one launch, each in a thread; the jobs of their ranks, or errors, by node rank."""

    def __init__(self):
        self.outcomes, self.threads = {}, []

    def start(self, *nodes, **values):
        for node in nodes:
            thread = threading.Thread(target=self.meet, args=(job(node, **values),))
            self.threads.append(thread)
            thread.start()

    def meet(self, job):
        try:
            self.outcomes[job.node_rank] = node_rendezvous.meet(job)
        except errors.LaunchError as error:
            self.outcomes[job.node_rank] = error

    def join(self):
        for thread in self.threads:
            thread.join(30)
        jobs = [self.outcomes[node] for node in range(3)]
        assert all(isinstance(job, Job) for job in jobs), self.outcomes
        (secret,) = {job.secret for job in jobs}
        assert len(secret) == 32 and {job.launch_id for job in jobs} == {"three"}
        return jobs


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


def test_nodes_with_different_numbers_of_ranks_number_these_in_order(nodes):
    nodes.start(1, nprocs=3, launch_id="drawn by itself")
    nodes.start(2, nprocs=1)
    jobs = nodes.join()
    assert [job.first_rank for job in jobs] == [0, 2, 5]
    assert [job.world_size for job in jobs] == [6] * 3


@pytest.mark.parametrize(
    "values, text",
    [
        ({"nnodes": 2}, "--nnodes is 3 on node 0"),
        ({"node_rank": 0}, "--node-rank 0 is host"),
        ({"node_rank": 3}, "--node-rank 3 is not in [1, 2]"),
        ({"node_rank": -2}, "--node-rank -2 is not in [1, 2]"),
        ({"version": "9.9"}, "the version of drumline is"),
    ],
)
def test_a_node_that_does_not_belong_is_told_why_and_the_others_meet(nodes, values, text):
    assert text in problem_of(dataclasses.replace(NodeDescription.of(1, 3, 2), **values))
    nodes.start(1, 2)


def test_nodes_that_gave_up_before_they_heard_that_all_are_here_are_waited_for(nodes):
    """The first node had read that they were here, and started alone."""
    with connected() as one, connected() as two:
        for rank, channel in ((1, one), (2, two)):
            channel.send(node=vars(NodeDescription.of(rank, 3, 2)))
            assert channel.next(10)["problem"] == ""
    nodes.start(1, 2)


def problem_of(node):
    """The problem that the first node has with a node."""
    return answer_to(node)["problem"]


def answer_to(node):
    with connected() as channel:
        channel.send(node=vars(node))
        return channel.next(10)


@contextlib.contextmanager
def connected(token=TOKEN):
    """A connection to the first node that has proved the token."""
    while True:
        try:
            address = ("127.0.0.1", PORT)
            until = time.monotonic() + 10
            channel = node_follower.connected_to_first(address, token, until)
            with contextlib.closing(channel):
                yield channel
            return
        except ConnectionRefusedError:
            pass


@contextlib.contextmanager
def leading(**values):
    """A first node that stays, and is served by a thread meanwhile."""

    def serve():
        while not has_ended.wait(0):
            leader.step(0.05)

    has_ended = threading.Event()
    with contextlib.closing(node_leader.NodeLeader(job(0, **values))) as leader:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield leader
        finally:
            has_ended.set()
            thread.join()


def test_nodes_are_numbered_as_they_come_and_a_number_that_was_left_is_given_again():
    def asks(pid, node_rank=ASKS):
        return answer_to(dataclasses.replace(NodeDescription.of(node_rank, 0, 0), pid=pid))

    with leading(command=("serve", "--model", "x")):
        answers = [asks(1), asks(1), asks(2), asks(3), asks(4, node_rank=2)]
    assert [answer["node_rank"] for answer in answers] == [1, 1, 2, 1, 2]
    assert answers[0]["command"] == ["serve", "--model", "x"]
    assert not any(answer["problem"] for answer in answers)


def test_a_node_that_waited_for_a_command_that_has_ended_does_not_join_the_next_one():
    """Its ranks ran with the arguments of the first command, beside those of the second."""
    with leading(command=("run", "who.py", "new")):
        problems = [
            problem_of(NodeDescription.of(1, 3, 2, ("run", "who.py", word)))
            for word in ("old", "new")
        ]
    assert "ran another command, and has ended since" in problems[0] and not problems[1]


def test_a_node_more_than_there_are_places_is_told():
    with leading(nnodes=2), connected() as channel:
        channel.send(node=vars(NodeDescription.of(1, 2, 2)))
        channel.next(10)
        problem = problem_of(NodeDescription.of(ASKS, 0, 0))
    assert problem == "all 2 nodes of the launch are there"


def test_what_a_node_runs_is_what_the_first_was_given_and_is_shown_as_text():
    """A line's end in an argument was a question mark on all machines but the first."""
    words = ("run", "who.py", "a\nb\t\u00a0c", "\udcff")
    with leading(command=words):
        place = node_follower.ask_to_join(("127.0.0.1", PORT), TOKEN)
    assert place.command == words and "drumline run who.py 'a?b??c' '?'" in str(place)


@pytest.mark.parametrize("method", ["meet", "_note_return"])
@pytest.mark.parametrize("number", stop_signals.STOP_SIGNALS)
def test_nodes_that_wait_hear_of_a_signal_to_the_first(quick, monkeypatch, number, method):
    """They waited for its return until their deadline, five minutes. One that came while the first
    served a connection was taken for an error of that, and lost."""

    def stopped_once_a_node_waits(leader, _):
        while not leader.nodes:
            leader.step(0.05)
        signal.raise_signal(number)

    stopped_in = {"meet": stopped_once_a_node_waits}
    stopped_in["_note_return"] = lambda *_: signal.raise_signal(number)
    monkeypatch.setattr(node_leader.NodeLeader, method, stopped_in[method])
    handler = signal.signal(number, lambda *_: None)  # of a test's own, which ends nothing
    nodes = Nodes()
    nodes.start(1)
    try:
        nodes.meet(job(0))
    finally:
        signal.signal(number, handler)
    nodes.threads[0].join(10)
    assert nodes.outcomes[0].exit_code == 128 + number
    stopped = f"the command of the first node was stopped by {signal.Signals(number).name}"
    assert stopped in str(nodes.outcomes[1])


def test_machines_that_are_missing_are_not_told_to_join_without_a_token(quick):
    """`drumline join` obeys nobody who has proved no token."""
    first = node_leader.NodeLeader(job(0, token=LaunchToken.insecure()))
    with contextlib.closing(first), pytest.raises(errors.LaunchTimeout) as caught:
        first.meet(0.1)
    assert "Type the same command with its own --node-rank" in str(caught.value)


# ---- strangers: they have the port, the addresses and the launch id, and not the token ----


class Wire:
    """Whoever sits between a node and the first one: what passed in each direction."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.to_first, self.to_node = b"", b""
        self.thread = threading.Thread(target=self._relay)
        self.thread.start()

    def _relay(self):
        with (
            self.listener,
            self.listener.accept()[0] as node,
            raw_connection() as first,
        ):
            back = threading.Thread(target=self._copy, args=(first, node, "to_node"))
            back.start()
            self._copy(node, first, "to_first")
            back.join()

    def _copy(self, source, sink, name):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                setattr(self, name, getattr(self, name) + data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def test_whoever_reads_the_wire_learns_nothing_and_cannot_join_by_repeating_it(nodes):
    """The port told everybody the launch id, of which the secret of the ranks was made."""
    wire = Wire()
    nodes.start(1)
    nodes.start(2, master_port=wire.port)
    jobs = nodes.join()
    wire.thread.join(30)
    both = wire.to_first + wire.to_node
    for secret in (TOKEN.key, TOKEN.credentials().secret, jobs[0].secret):
        assert secret not in both and secret.hex().encode() not in both
    assert b"three" not in both and b"node_rank" not in both and b"secret" not in both
    assert str(TOKEN).encode() not in both
    again = Nodes()
    again.start(0)
    answer = b""
    with raw_connection() as repeated, contextlib.suppress(OSError):
        repeated.sendall(wire.to_first)
        while data := repeated.recv(1 << 16):
            answer += data
    assert b"three" not in answer and len(answer) < len(wire.to_node)
    again.start(1, 2)
    assert again.join()[0].secret != jobs[0].secret


def test_a_stranger_without_the_token_is_sent_away_and_hears_nothing(nodes):
    for token in (LaunchToken.draw(), LaunchToken.insecure()):
        refused = pytest.raises(errors.LaunchError, match="the token is not that of the first node")
        with refused, connected(token):
            pass
    nodes.start(1, 2)


def test_a_first_node_that_does_not_know_the_token_is_not_obeyed():
    """Whoever answered in place of the first one chose what ranks run beside whom."""
    with leading(token=LaunchToken.draw()):
        follower = node_follower.NodeFollower(job(1), stays=True)
        with contextlib.closing(follower), pytest.raises(errors.LaunchError, match="not that of"):
            follower.join(10)


def test_what_is_altered_on_the_way_to_a_node_is_no_command_for_it(monkeypatch):
    """A joining machine runs what the first one says, so that nobody in between may say it."""
    wire, copy = None, Wire._copy

    def alter(self, source, sink, name):
        if name == "to_first":
            return copy(self, source, sink, name)
        with contextlib.suppress(OSError):
            sink.sendall(source.recv(4096))  # the greeting
            sink.sendall(source.recv(4096))  # the welcome
            sink.sendall(bytes(byte ^ 1 for byte in source.recv(4096)))
        return None

    monkeypatch.setattr(Wire, "_copy", alter)
    with leading(command=("run", "x.py")):
        wire = Wire()
        address = ("127.0.0.1", wire.port)
        deadline = time.monotonic() + 10
        connection = node_follower.connected_to_first(address, TOKEN, deadline)
        with contextlib.closing(connection) as channel:
            channel.send(node=vars(NodeDescription.of(ASKS, 0, 0)))
            with pytest.raises(ConnectionBroken):
                channel.next(10)
        wire.thread.join(10)


def raw_connection():
    while True:
        try:
            return socket.create_connection(("127.0.0.1", PORT), 10)
        except ConnectionRefusedError:
            pass


STRANGERS = {
    "http": b"GET / HTTP/1.0\n" + b" " * 400,
    "json": json.dumps(vars(NodeDescription.of(1, 3, 2))).encode() + b"\n" * 400,
    "long": b"x" * 9999,
    "cut": b"x",
}


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS)
def test_a_crowd_of_strangers_leaves_one_short_line_and_keeps_no_node_out(
    nodes, data, capfd, caplog
):
    """300 connections left 300 lines of what they had sent, 408 kB, on the terminal."""
    for _ in range(300):
        with raw_connection() as connection, contextlib.suppress(OSError):
            connection.sendall(data)
    nodes.start(1, 2)
    nodes.join()
    lines = [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"]
    assert len(lines) <= 1 and all(len(line) < 200 for line in lines)
    said = [line for line in capfd.readouterr().err.splitlines() if "waiting for" not in line]
    assert len(said) <= 1


@pytest.mark.parametrize("change", [{"nnodes": 2}, {"host": "h" * 100_000, "version": "9"}, {}])
def test_a_crowd_without_a_token_writes_a_short_line_a_second(capfd, change):
    """Every machine may come with --insecure: 300 left 300 lines, of any length, or two each."""
    since = time.monotonic()
    node = dataclasses.replace(NodeDescription.of(1, 3, 2), **change)
    token = LaunchToken.insecure()
    with leading(token=token):
        for _ in range(300):
            with connected(token) as channel:
                channel.send(node=vars(node))
                channel.next(10)
    said = [line for line in capfd.readouterr().err.splitlines() if "waiting for" not in line]
    assert 1 <= len(said) <= 1 + time.monotonic() - since
    assert all(len(line) < 600 for line in said)


def test_many_idle_connections_keep_no_node_out(nodes):
    idle = [raw_connection() for _ in range(256)]
    nodes.start(1, 2)
    nodes.join()
    for connection in idle:
        connection.close()


# ---- a node and what the first one says ----


@contextlib.contextmanager
def followed(*messages, stays=True):
    """A node that follows what has the token and answers with these in place of the first one."""

    def answer(accepted, _):
        channel = NodeChannel(accepted)
        channels.append(channel)
        for message in messages:
            channel.send(**message)

    def serve(listener):
        selector = node_leader.selectors.DefaultSelector()
        authenticator = AuthenticatedListener(listener, TOKEN.credentials(), selector, answer)
        while not has_ended.is_set():
            authenticator.handle(selector.select(0.05))
        authenticator.close()
        for channel in channels:
            channel.socket.close()

    channels, has_ended = [], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        fields = {"master_port": listener.getsockname()[1]}
        follower = node_follower.NodeFollower(job(1, **fields), stays)
        with contextlib.closing(follower):
            yield follower
        has_ended.set()
        thread.join()


PLACE = {"launch_id": "a", "nnodes": 2, "master_port": 2, "torch_port": 3, "node_rank": 1}
GO = {"go": {**PLACE, "ranks_of_nodes": [3, 2], "secret": "ab" * 32}}


def test_the_first_node_decides_the_place_of_ranks_and_nothing_else():
    more = {"go": {**GO["go"], "target": "x", "preload": ["x"]}}
    with followed({"problem": ""}, more) as follower:
        attempt = follower.join()
    place = {**PLACE, "ranks_of_nodes": (3, 2), "secret": b"\xab" * 32}
    assert attempt == dataclasses.replace(follower.job, **place)


def test_messages_that_come_at_once_are_obeyed_at_once():
    """A stop behind another line lay in a buffer until more came, seconds later."""
    with followed({"problem": ""}, GO, {"stop": True}) as follower:
        follower.join()
        assert follower.is_over(1)


def test_a_node_whose_connection_is_lost_between_two_attempts_joins_anew():
    """It wrote to the old one until the time was over, and never connected."""
    with followed({"problem": ""}, GO) as follower:
        follower.join()
        follower._channel.socket.shutdown(socket.SHUT_RDWR)
        assert follower.join(5).launch_id == "a"


@pytest.mark.parametrize("patience_s", [0, 60])
def test_silence_between_nodes_is_borne_for_the_patience(monkeypatch, patience_s):
    """After 15 s of a suspended host, and 10 s of a first one, a server ended, whatever was set."""
    monkeypatch.setenv("DRUMLINE_PATIENCE", f"{patience_s}")
    monkeypatch.setattr(timings, "TIMINGS", dataclasses.replace(timings.TIMINGS, node_status_s=0.1))
    with leading(nnodes=2) as leader, connected() as channel:
        channel.send(node=vars(NodeDescription.of(1, 2, 2)))
        assert channel.next(10)["problem"] == ""
        time.sleep(1)
        assert (1 in leader.nodes) == (patience_s > 0)
    with followed({"problem": ""}, GO) as follower:
        follower.join()
        time.sleep(0.5)
        assert follower.is_over(0.1) == (patience_s == 0)


@pytest.mark.parametrize("message", [{"node": 1}, {"problem": "", "x": 1}])
def test_what_answers_as_no_launch_does_is_not_blamed_on_the_address(message):
    with followed(message, {"go": 1}) as follower:
        assert (
            follower._try_to_join(time.monotonic() + 60)
            == "the process listening there is not a drumline launch"
        )


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, b""])
def test_a_port_at_which_something_else_listens_is_not_called_a_first_node(words):
    """A server of HTTP at that port was "the first node", and had "closed the connection"."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        follower = node_follower.NodeFollower(job(1, master_port=listener.getsockname()[1]))
        accepting = threading.Thread(target=lambda: answered_with(listener, words))
        accepting.start()
        try:
            why = follower._try_to_join(time.monotonic() + 60)
        except errors.LaunchError as error:
            why = str(error)
        accepting.join()
    assert "not a first node" in why or "does not answer as a first node" in why


def test_a_node_waits_while_ranks_of_the_attempt_before_listen_at_the_port():
    """Each restart found them there, and all of --max-restarts were used up at once."""
    greeting = GREETING.pack(MAGIC, VERSION, 4, bytes(16), b"")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        follower = node_follower.NodeFollower(job(1, master_port=listener.getsockname()[1]))
        accepting = threading.Thread(target=lambda: answered_with(listener, greeting))
        accepting.start()
        try:
            why = follower._try_to_join(time.monotonic() + 60)
        finally:
            accepting.join()
    assert why == "what listens there is not a first node: the launch there has 4 ranks"


def answered_with(listener, words):
    with listener.accept()[0] as accepted, contextlib.suppress(OSError):
        accepted.sendall(words)
        accepted.shutdown(socket.SHUT_WR)
        accepted.recv(1 << 16)


def test_nodes_that_are_missing_by_the_hundred_take_one_short_line():
    with leading(nnodes=1000) as leader:
        names = leader._names(leader.missing)
    assert names.startswith("nodes 1, 2, 3, ") and " 16 and 983 others of 1000 at" in names


def test_the_last_word_of_the_first_node_is_an_error_and_no_command_of_the_terminal():
    end = {"end": "\u001b[2Jover", "code": float("inf")}
    with followed({"problem": ""}, end) as follower, pytest.raises(errors.LaunchError) as caught:
        follower.join()
    assert (str(caught.value), caught.value.exit_code) == ("?[2Jover", 1)


@pytest.mark.parametrize("address", ["0", "::", "::ffff:0.0.0.0"])
def test_the_first_node_listens_on_no_address_that_is_every_interface(address):
    with pytest.raises(OSError, match="it is every interface"):
        node_leader.NodeLeader(job(0, master_addr=address))


def test_a_launch_of_several_nodes_without_a_token_is_refused():
    """A script was told of a prompt and an option, which launch() has not."""
    for node in (0, 1):
        with pytest.raises(ValueError, match=r"has no token, so .*openssl.*before each launch"):
            node_rendezvous.meet(job(node, token=None))


def test_ranks_get_a_port_where_the_nodes_meet_at_the_last_one():
    with leading(nnodes=2) as leader, connected() as channel:
        channel.send(node=vars(NodeDescription.of(1, 2, 2)))
        assert channel.next(10)["problem"] == ""
        leader.port = MAX_PORT
        assert ports.FIRST_PORT <= leader.begin([0, 1]).master_port < MAX_PORT


def test_nodes_that_give_other_ports_to_connections_have_the_ports_of_the_first(monkeypatch):
    """Each computed them from its own ip_local_port_range, and they did not meet."""
    found = []
    with contextlib.closing(node_leader.NodeLeader(job(0, nnodes=1))) as leader:
        values = leader._values("some id", [0], 0)
    for node, reserved in enumerate([range(32_768, 61_000), range(1024, 30_000)]):
        monkeypatch.setattr(ports.linux, "ephemeral_ports", lambda reserved=reserved: reserved)
        placed = node_messages.placed(
            job(node), {**values, "nnodes": 2, "ranks_of_nodes": [2, 2], "node_rank": node}
        )
        with contextlib.ExitStack() as opened:
            plan, _ = launch_local._prepare(placed, [], False, opened)
        found += [(setup.info.master_port, setup.torch_port) for setup in plan.ranks]
    assert len(found) == 4 and len({*found}) == 1 and 0 not in found[0]


def test_ranks_of_srun_on_all_nodes_are_told_the_ports():
    told = dataclasses.replace(job(0), **ports.of_nodes("some id", 0))
    variables = torch_rendezvous.environment(told)
    assert variables["MASTER_PORT"] == str(told.master_port)
    assert variables["DRUMLINE_TORCH_PORT"] == str(told.torch_port) != "0"


def test_a_node_whose_packets_are_dropped_says_so_every_few_seconds(monkeypatch, capfd):
    """Connections that neither succeed nor fail took the time of four of these lines."""
    connect, attempts_s = socket.create_connection, []

    def connect_within(address, timeout_s):
        attempts_s.append(timeout_s)
        return connect(address, timeout_s)

    monkeypatch.setattr(timings, "TIMINGS", timings.TIMINGS.scaled(0.02))
    with full_listener() as port:
        monkeypatch.setattr(socket, "create_connection", connect_within)
        with pytest.raises(errors.LaunchTimeout, match="timed out"):
            node_rendezvous.meet(dataclasses.replace(job(1), timeout_s=0.5, master_port=port))
    assert f"127.0.0.1:{port} (Connection timed out)" in capfd.readouterr().err
    assert 2 * max(attempts_s) < timings.TIMINGS.node_status_s


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


def test_a_machine_that_joins_where_no_command_runs_says_so_soon(monkeypatch, capfd):
    """It waited for five minutes for a command that had ended, and said to type the same there."""
    quick = dataclasses.replace(timings.TIMINGS, node_join_s=0.1)
    monkeypatch.setattr(timings, "TIMINGS", quick)
    refused = r"no first machine .* within 0.1 s \(Connection refused\): its command has ended, or"
    with pytest.raises(errors.LaunchError, match=refused):
        node_follower.ask_to_join(("127.0.0.1", PORT), TOKEN)
    assert "(Connection refused), for 0 s at most" in capfd.readouterr().err


def test_a_name_that_no_host_can_have_is_an_error_at_once(quick):
    with pytest.raises(errors.LaunchError, match="is not a name of a host"):
        node_rendezvous.meet(dataclasses.replace(job(1), master_addr="a..b"))


@pytest.mark.parametrize(
    ("start", "values", "text"),
    [
        (launch_local.launch_local, {"log_dir": "/proc/none"}, "log folder '/proc/none' cannot be"),
        (launch_local.launch_local, {"bind": True}, "2 ranks cannot be bound to 1 cores"),
        (
            functools.partial(backend_launcher.run, torchrun),
            {"log_dir": "/proc/none"},
            "log folder '/proc/none' cannot be",
        ),
    ],
)
def test_a_node_that_cannot_start_ranks_says_so_before_it_meets_the_others(
    monkeypatch, start, values, text
):
    """They started theirs, and waited for its ranks until their deadline."""
    monkeypatch.setattr(node_rendezvous, "meet", lambda _: pytest.fail("it has met them"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.raises((OSError, ValueError), match=text):
        start(job(1, **values))


# ---- the launcher that starts the ranks of each node itself ----

WHO = """
import os, signal, sys
from launcher.system import linux
if sys.argv[1:] == ["early", os.environ["RANK"]]:
    sys.exit(7)
if sys.argv[1:] == ["server", os.environ["GROUP_RANK"]]:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
if sys.argv[1:] == ["stopped", os.environ["GROUP_RANK"]]:
    if os.environ["LOCAL_RANK"] == "0":
        os.kill(linux.process_stat(os.getppid()).parent, signal.SIGINT)
    signal.pause()
from coordinator import Coordinator
with Coordinator(timeout_s=20) as coor:
    assert os.environ["GROUP_RANK"] == str(coor.node_index)
    if coor.allgather_object(coor.rank) == list(range(3)):
        print(coor.rank, [len(node) for node in coor.nodes], flush=True)
    if sys.argv[1:]:
        coor.barrier() if coor.rank else sys.exit(7)
"""


ENDS = ["well", "failing", "early 2", "early 0", "server 1", "server 0", "stopped 1", "stopped 0"]


@pytest.mark.parametrize("end", ENDS)
def test_our_own_launcher_starts_the_ranks_of_each_node(tmp_path, end):
    """Of the second node's two ranks one had GROUP_RANK 0, and one 1. And a node waited for its
    deadline where a rank of the other, or its fork server for lack of memory, had failed before
    all had joined, or where somebody had stopped it."""
    (tmp_path / "who.py").write_text(WHO)
    place = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", f"{PORT}"]
    words = ["who.py", *(end.split() if end != "well" else ())]
    launches = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "launcher", "run", "--launcher", "multiprocessing", *place),
                *("--node-rank", f"{node}", "-n", f"{node + 1}", *words),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "DRUMLINE_TOKEN": str(TOKEN)},
        )
        for node in (0, 1)
    ]
    (first, told), (second, other) = (launch.communicate(timeout=60) for launch in launches)
    if end == "early 2":
        assert "when rank 2 (host" in told and "before all of launch" in told
        assert launches[1].returncode == 7
        return
    if end == "server 1":
        assert "when rank 1 (host" in told and "killed from outside" in other
        assert [launch.returncode for launch in launches] == [1, 137]
        return
    if end == "server 0":
        assert "but rank 0 (host" in other and "killed from outside" in other
        assert [launch.returncode for launch in launches] == [137, 1]
        return
    if end == "stopped 1":
        assert "when rank 1 (host" in told and "stopped by SIGINT" in other
        assert [launch.returncode for launch in launches] == [1, 130]
        return
    if end == "stopped 0":
        assert "but rank 0 (host" in other and "was stopped by SIGINT before all had" in other
        assert [launch.returncode for launch in launches] == [130, 1]
        return
    if end == "early 0":
        assert "but rank 0 (host" in other and "exited with code 7 before all had joined" in other
        assert launches[0].returncode == 7
        return
    assert first.count("0 [1, 2]") == 1 and second.count("[1, 2]") == 2, told + other
    codes = [launch.returncode for launch in launches]
    assert codes == [0, 0] if end == "well" else codes[0] == 7 and codes[1] > 0
    assert end == "well" or "rank 0" in other


def join_in_vain(failed, rank):
    """The error by which a rank of another node hears of the failure; nobody may listen yet."""
    place, deadline = failed_rank._MeetingPoint(failed), time.monotonic() + 10
    while True:
        assert time.monotonic() < deadline
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(place.address) as plain,
        ):
            hello = Hello(rank, failed_rank.CONTROL)
            try:
                authenticate(FramedConnection(plain), place.credentials, hello, deadline)
            except LaunchFailed as error:
                return str(error)


def test_the_launcher_in_place_of_rank_0_ends_once_each_other_node_has_heard():
    """A long reason was cut within a word; one that is not UTF-8 was not told."""
    failed = job(0, secret=bytes(32), ranks_of_nodes=(1, 2, 2))
    message = "\udcff " + "no weights " * 9
    failure = errors.Failure(0, host="a", pid=7, type="ValueError", message=message)
    begun = time.monotonic()
    with failed_rank.telling_other_nodes(failed) as tell:
        tell(failure)
        stranger = dataclasses.replace(failed, secret=bytes(range(32)))
        with pytest.raises(SecretRejected):
            join_in_vain(stranger, 1)
        for rank in (1, 4):
            heard = join_in_vain(failed, rank)
            assert heard.startswith("rank 0 (host a, pid 7) raised ValueError: ? no weights no")
            assert heard.endswith((" no ...", " weights ...")), heard
    assert time.monotonic() - begun < timings.TIMINGS.node_end_s / 2


def test_the_first_launcher_ends_once_the_others_have_heard_though_two_of_its_ranks_failed():
    """The second failure waited ten seconds for nodes which had heard of the first."""
    begun = time.monotonic()
    failed = job(0, secret=bytes(32), ranks_of_nodes=(2, 1, 1))
    with failed_rank.telling_other_nodes(failed) as tell:
        tell(errors.Failure(0, type="ImportError"))
        tell(errors.Failure(1, type="ImportError"))
        assert all("rank 0 (" in join_in_vain(failed, rank) for rank in (2, 3))
    assert time.monotonic() - begun < timings.TIMINGS.node_end_s / 2


def test_a_node_whose_own_rank_is_the_cause_is_not_told():
    """The first launcher of two ended 10 s late, when rank 0 had raised for a rank of the other."""
    begun = time.monotonic()
    failed = job(0, nnodes=2, secret=bytes(32), ranks_of_nodes=(1, 2))
    with failed_rank.telling_other_nodes(failed) as tell:
        tell(errors.Failure(0, blames=[2]))
    assert time.monotonic() - begun < timings.TIMINGS.node_end_s / 2


def test_a_launcher_says_that_it_waits_for_other_nodes_to_hear_of_a_failure(quick, capsys):
    """It ended ten seconds after its ranks without a word, where these made no Coordinator."""
    failed = job(0, secret=bytes(32), ranks_of_nodes=(2, 2, 2))
    with failed_rank.telling_other_nodes(failed) as tell:
        tell(errors.Failure(0))
    assert "telling the other nodes why this one ends: 0.5 s" in capsys.readouterr().err


def test_ctrl_c_while_other_nodes_are_told_leaves_the_failure(quick, monkeypatch):
    """The report of the failed rank was lost to KeyboardInterrupt."""
    failed = job(0, secret=bytes(32), ranks_of_nodes=(2, 2, 2))
    before = {*threading.enumerate()}
    monkeypatch.setattr(failed_rank, "notice", lambda _: signal.raise_signal(signal.SIGINT))
    with (
        pytest.raises(errors.LaunchError, match="planned"),
        failed_rank.telling_other_nodes(failed) as tell,
    ):
        tell(errors.Failure(0))
        raise errors.LaunchError("planned")
    for thread in {*threading.enumerate()} - before:
        assert thread.daemon, "it keeps the command from its end"
        thread.join()
