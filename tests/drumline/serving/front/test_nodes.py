"""A server over two hosts, of which ranks, commands and links are lost, as its clients see it.

SOAK_STRANGER_S=600 make soak TESTS="tests/drumline/serving/front/test_nodes.py -k stranger"
"""

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import launcher
from tests.communicator.test_encryption_over_hosts import CAPTURE, END, SAY_END
from tests.drumline.serving.conftest import expected

ROOT = Path(__file__).parents[4]
LIMIT_S = 400  # for whatever must happen at all
STRANGER_S = float(os.environ.get("SOAK_STRANGER_S", "5"))  # beside a server that has clients
REQUESTS = [
    {
        "model": "llama",
        "prompt": "5 6 7",
        "max_tokens": 150,
        "ignore_eos": True,
        "stream": True,
        **sampling,
    }
    for sampling in ({"temperature": 0}, {"temperature": 1.2, "seed": 5})
]


class Cluster:
    """`drumline serve` on two hosts, with one rank and with two, and clients on the first."""

    ranks_there = 2

    def __init__(self, hosts, path, log, *options):
        self.hosts, self.nodes, self.log = hosts, {}, log
        self.token = secrets.token_hex(32)
        self.options = ["--model", str(path), "-n", "1", "--max-length", "200", *options]
        self.options += ["--port", "0", "--nnodes", "2", "--master-addr", hosts.addresses[0]]

    def start(self, node):
        join = ["join", self.hosts.addresses[0], "-n", str(self.ranks_there)]
        words = join if node else ["serve", *self.options]
        self.nodes[node] = subprocess.Popen(
            self.hosts.command(node, [sys.executable, "-m", "drumline", *words]),
            stdout=subprocess.PIPE,
            stderr=self.log.open("a"),
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "DRUMLINE_TOKEN": self.token},
        )

    def await_address(self):
        self.url = re.search(r"http://[\d.:]+", self.nodes[0].stdout.readline())[0]

    def await_line(self, text):
        """Wait until a command has written the text to standard error."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def curl(self, path, body=None):
        data = [] if body is None else ["--data", json.dumps(body)]
        command = ["curl", "--silent", "--no-buffer", "--max-time", f"{LIMIT_S}", *data]
        out = subprocess.run(
            self.hosts.command(0, [*command, self.url + path]), stdout=subprocess.PIPE, check=True
        )
        return out.stdout.decode()

    def complete(self, body):
        answer = self.curl("/v1/completions", body).splitlines()
        lines = [line for line in answer if line.startswith("data: ")]  # others are comments
        assert lines.pop() == "data: [DONE]"
        parsed = [json.loads(line.removeprefix("data: ")) for line in lines]
        return "".join(message["choices"][0]["text"] for message in parsed)

    def metric(self, name):
        return int(float(re.search(rf"^drumline_{name} (.*)$", self.curl("/metrics"), re.M)[1]))

    def await_state(self, restarts, missing):
        """Wait until ranks have been started so often again, and serve, with so many missing."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            health = json.loads(self.curl("/health"))
            state = (self.metric("restarts_total"), health["ranks_missing"], health["status"])
            if state[0] >= restarts and state[1:] == (missing, "ok"):
                return
            assert time.monotonic() < deadline, state
            time.sleep(0.1)

    def ranks(self, node):
        """The pids of the node's ranks."""
        below = launcher.linux.descendants(self.nodes[node].pid)
        return [pid for pid in below if launcher.linux.process_name(pid).startswith("rank ")]

    def kill(self):
        for process in self.nodes.values():
            process.kill()
        self.hosts.kill_processes()


@contextmanager
def clients(cluster, number, pause_s=0.0):
    """Clients that ask again and again; every answer must be that of an undisturbed server."""
    expected = [cluster.complete(request) for request in REQUESTS]
    assert len(set(expected)) == 2
    has_ended = threading.Event()

    def ask(which):
        count = 0
        while not has_ended.is_set():
            assert cluster.complete(REQUESTS[which]) == expected[which]
            count += 1
            has_ended.wait(pause_s)
        return count

    with ThreadPoolExecutor(number) as threads:
        asking = [threads.submit(ask, which % 2) for which in range(number)]
        try:
            yield
        finally:
            has_ended.set()
        assert all(client.result() for client in asking)


@contextmanager
def frames(hosts, file):
    """Write what passes at the second host's link into a file."""
    capture = [sys.executable, "-S", "-c", CAPTURE, str(file)]
    process = subprocess.Popen(hosts.command(1, capture), stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    try:
        yield
        say_end = [sys.executable, "-S", "-c", SAY_END.format(END), hosts.addresses[1]]
        subprocess.run(hosts.command(0, say_end), check=True, timeout=20)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.soak
@pytest.mark.parametrize("options", [["--encrypt"], []], ids=["encrypted", "plain"])
def test_nothing_of_an_encrypted_server_over_two_hosts_is_found_on_the_network(
    hosts, plain, warm, tmp_path, options
):
    """What is looked for is found where the same server does not encrypt."""
    cluster = Cluster(hosts, plain[1], tmp_path / "log", *options)
    lines = [shlex.join(["drumline", "serve", *cluster.options]), "drumline join 10.0.0.1"]
    try:
        with frames(hosts, tmp_path / "frames"):
            for node, line in enumerate(lines):
                cluster.nodes[node] = hosts.warm(warm, node, line, DRUMLINE_TOKEN=cluster.token)
            cluster.await_address()
            text = cluster.complete({**REQUESTS[0], "max_tokens": 12})
            os.kill(cluster.nodes[0].pid, signal.SIGTERM)
            assert [cluster.nodes[node].wait(LIMIT_S) for node in (0, 1)] == [0, 0]
        passed = (tmp_path / "frames").read_bytes()
    finally:
        cluster.kill()
    assert text.strip() == expected(plain, "5 6 7")[0]
    readable = [word in passed for word in (b"LlamaForCausalLM", b"model.layers.4", b" uint8")]
    assert readable == [not options] * 3 and cluster.token.encode() not in passed


def nothing_is_left(hosts):
    deadline = time.monotonic() + LIMIT_S
    while any(launcher_pids(hosts)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(launcher_pids(hosts))


def launcher_pids(hosts):
    from tests.network_hosts import ip

    return [ip("netns", "pids", name).split() for name in hosts.names]


@pytest.fixture
def cluster(hosts, plain, tmp_path):
    cluster = Cluster(hosts, plain[1], tmp_path / "log", "--restarts", "100")
    cluster.start(0)
    cluster.start(1)
    try:
        cluster.await_address()
        yield cluster
    finally:
        cluster.kill()
        print(cluster.log.read_text())


# It has all but the token: addresses, ports, launch ids, the protocol, and what others have sent.
STRANGER = r"""
import collections, hashlib, json, os, select, socket, sys, time
from launcher import ports
from launcher.authentication.credentials import Credentials
from launcher.authentication.framed_connection import ConnectionBroken, FramedConnection
from launcher.authentication.handshake import Hello, NotReady, Rejected, authenticate, purpose_of
from launcher.authentication.launch_token import LaunchToken
from launcher.external.node_messages import NodeDescription

address, heard, attempts = sys.argv[1], b"", 0
derived = hashlib.sha256(b"drumline, no secret\0drumline serve").digest()
proofs = [
    (ports.NODES_PORT, LaunchToken.insecure().credentials(), "node"),
    (ports.NODES_PORT, LaunchToken.draw().credentials(), "node"),
    (ports.NODES_PORT + 1, Credentials(derived, "drumline serve", 2), "control"),
    (ports.NODES_PORT + 1, LaunchToken.insecure().credentials(), "control"),
]
words = json.dumps(vars(NodeDescription.of(1, 2, 1))).encode() + b"\n"
idle = collections.deque(maxlen=150)  # connections that it leaves open, more than are held
while not select.select([sys.stdin], [], [], float(sys.argv[2]))[0]:  # until that is closed
    for port, credentials, purpose in proofs:
        try:
            with socket.create_connection((address, port), 5) as plain:
                connection = FramedConnection(plain)
                attempts += 1
                hello = Hello(0, purpose_of(purpose), 0, bytes(8), "host")
                authenticate(connection, credentials, hello, time.monotonic() + 5)
                sys.exit("the stranger was let in")
        except (NotReady, Rejected, ConnectionBroken):
            pass
        except OSError:
            pass  # no ranks yet
        try:
            for sent in (words, b"GET / HTTP/1.1\r\n\r\n", os.urandom(300)):
                with socket.create_connection((address, port), 5) as plain:
                    plain.settimeout(1)
                    plain.sendall(sent)
                    while data := plain.recv(4096):
                        heard += data
            idle.append(socket.create_connection((address, port), 5))
        except OSError:
            pass
print(json.dumps([attempts, heard.hex()]))
"""


@pytest.mark.soak
@pytest.mark.timeout(1200 + STRANGER_S)
def test_a_stranger_with_all_but_the_token_is_no_rank_and_disturbs_nobody(hosts, plain, tmp_path):
    """Whoever reached the port was told the launch id, became rank 1, and heard the prompts."""
    cluster = Cluster(hosts, plain[1], tmp_path / "log")
    pause_s = STRANGER_S / 1000  # of all that ask, so that a long trial takes no more
    stranger = [sys.executable, "-c", STRANGER, hosts.addresses[0], str(pause_s)]
    try:
        cluster.start(0)
        strangers = [
            subprocess.Popen(
                hosts.command(1, stranger),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            for _ in range(2)
        ]
        cluster.await_line("does not know the launch secret")  # before there is a second node
        cluster.start(1)
        cluster.await_address()
        with clients(cluster, 2, pause_s):
            time.sleep(STRANGER_S)
            answers = [json.loads(process.communicate(timeout=LIMIT_S)[0]) for process in strangers]
        assert cluster.metric("restarts_total") == 0
    finally:
        cluster.kill()
    for attempts, heard in answers:
        assert attempts > 10 and b"prompt" not in bytes.fromhex(heard)
        assert cluster.token.encode() not in bytes.fromhex(heard)
    lines = [line for line in cluster.log.read_text().splitlines() if "a connection from" in line]
    assert len(lines) <= 3 and all(len(line) < 250 for line in lines), lines  # of each listener
    assert cluster.token not in cluster.log.read_text()


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_request_outlives_ranks_commands_and_links_of_both_hosts(hosts, cluster):
    with clients(cluster, 4):
        for restarts, (node, number) in enumerate(
            [(1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL), (0, signal.SIGSTOP)], 1
        ):
            os.kill(cluster.ranks(node)[0], number)
            cluster.await_state(restarts, missing=0)
        cluster.nodes[1].kill()
        cluster.await_state(5, missing=2)
        cluster.start(1)
        cluster.await_line("has come, and is in the next restart")
        assert cluster.metric("restarts_total") == 5
        os.kill(cluster.ranks(0)[0], signal.SIGKILL)
        cluster.await_state(6, missing=0)
        hosts.set_link(1, "down")
        cluster.await_state(7, missing=2)
        hosts.set_link(1, "up")
        cluster.log.write_text("")
        cluster.await_line("has come, and is in the next restart")
        os.kill(cluster.ranks(0)[0], signal.SIGKILL)
        cluster.await_state(8, missing=0)
    os.kill(cluster.nodes[0].pid, signal.SIGTERM)
    assert [cluster.nodes[node].wait(30) for node in (0, 1)] == [0, 0]
    assert nothing_is_left(hosts)
