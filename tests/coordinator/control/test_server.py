"""No message of a rank, right or wrong, ends rank 0's server or makes another rank's call fail."""

import contextlib
import functools
import itertools
import logging
import random
import socket
import threading
import time
import zlib

import msgpack
import pytest

from coordinator.control import framing
from coordinator.control.client import Client, ServerLost, connect
from coordinator.control.framing import COMPRESSED, pack, pack_for_many, unpack, unpack_answer
from coordinator.control.membership import LEFT, RankReport
from coordinator.control.operations import Op
from coordinator.control.server import CONTROL, MAX_REQUEST_NBYTES, MAX_UNREAD_NBYTES, ControlServer
from coordinator.errors import CoordinatorError
from launcher.authentication.credentials import Credentials
from launcher.authentication.framed_connection import (
    LENGTH,
    ConnectionBroken,
    NoMessage,
)
from launcher.authentication.handshake import Hello

CREDENTIALS = Credentials(bytes(range(32)), "messages", 8)
LIMIT_S = 30.0
MESSAGES = [300, pytest.param(20_000, marks=pytest.mark.soak)]


@pytest.fixture
def server():
    server = ControlServer(socket.create_server(("127.0.0.1", 0)), CREDENTIALS)
    server.open(0)
    yield server
    server.begin_closing()
    assert server.wait(5)


def hello_of(rank):
    return Hello(rank, CONTROL, token=rank.to_bytes(8, "big"), process=f"rank {rank}")


@pytest.fixture
def honest(server):
    """The Client of rank 1."""
    addresses = [server.address]
    with contextlib.closing(Client(lambda: addresses, CREDENTIALS, hello_of(1), LIMIT_S)) as client:
        yield client


def raw(server, rank=3):
    """A connection of a rank that knows the secret."""
    deadline = time.monotonic() + LIMIT_S
    return connect(server.address, CREDENTIALS, hello_of(rank), deadline)


def deadline():
    return time.monotonic() + LIMIT_S


def wait_for(has_come):
    until = deadline()
    while not has_come():
        assert time.monotonic() < until
        time.sleep(0.01)


def is_closed(connection):
    try:
        connection.receive(deadline())
    except ConnectionBroken:
        return True
    return False


BOMB = msgpack.packb(msgpack.ExtType(COMPRESSED, zlib.compress(msgpack.packb(bytes(1 << 24)))))


def test_a_compressed_request_is_refused_and_harms_nobody(server, honest, caplog):
    """Rank 0 expanded it, and an extension that was not zlib's ended its connection's handler."""
    for body in (
        b"\x94\x01" + pack("set") + pack("key") + BOMB,
        b"\x94\x01" + pack("set") + pack("key") + msgpack.packb(msgpack.ExtType(COMPRESSED, b"x")),
    ):
        connection = raw(server)
        connection.send_packed(body, deadline())
        assert is_closed(connection)
    assert honest.ask("get", "key", timeout_s=LIMIT_S) is None
    assert not [record for record in caplog.records if "defect" in record.message]
    with pytest.raises(ValueError, match="extension"):
        unpack(BOMB)


def test_an_answer_expands_to_so_many_bytes_and_no_more(monkeypatch):
    assert unpack_answer(pack_for_many(["x" * 10] * 10_000)) == ["x" * 10] * 10_000
    monkeypatch.setattr(framing, "MAX_EXPANDED_NBYTES", 1 << 20)
    with pytest.raises(ValueError, match="expand to more"):
        unpack_answer(BOMB)
    value = bytes((1 << 20) + 1)
    assert unpack(pack_for_many(value)) == value, "it could not be expanded"


def test_what_is_announced_beyond_the_limit_is_refused_at_once(server, honest):
    connection = raw(server)
    connection.write(LENGTH.pack(MAX_REQUEST_NBYTES + 1), deadline())
    assert is_closed(connection)
    assert honest.ask("add", "a", 1, timeout_s=LIMIT_S) == 1


def test_a_request_beyond_the_limit_is_an_error_of_its_caller(honest, monkeypatch):
    monkeypatch.setattr("coordinator.control.client.MAX_REQUEST_NBYTES", 1000)
    with pytest.raises(CoordinatorError, match=r"1 wanted to set 10\d\d bytes .* at most 1000"):
        honest.ask(Op.SET, "key", bytes(1000), timeout_s=LIMIT_S)
    assert honest.ask("add", "a", 1, timeout_s=LIMIT_S) == 1


def test_an_answer_beyond_the_limit_is_an_error_of_its_requester(server, honest, monkeypatch):
    server.ask("set", "key", bytes(1000), timeout_s=LIMIT_S)
    monkeypatch.setattr("coordinator.control.server.MAX_REQUEST_NBYTES", 1000)
    with pytest.raises(CoordinatorError, match=r"10\d\d bytes of at most 1000"):
        honest.ask("get", "key", timeout_s=LIMIT_S)
    assert honest.ask("add", "a", 1, timeout_s=LIMIT_S) == 1


def test_answers_that_are_not_read_are_bounded(server, honest):
    """They piled up at rank 0. Once they are read, all of them come."""
    nbytes, count = 1 << 22, 20
    honest.ask("set", "large", bytes(nbytes), timeout_s=LIMIT_S)
    connection = raw(server)
    for number in range(1, count + 1):
        connection.send((number, "get", "large"), deadline())
    most = 0
    for _ in range(20):
        honest.ask("count", "", timeout_s=LIMIT_S)
        kept = [len(each.unsent) for each in list(server._connections.values())]
        most = max(most, *kept)
    assert MAX_UNREAD_NBYTES < most < MAX_UNREAD_NBYTES + nbytes + 100
    for number in range(1, count + 1):
        assert connection.receive(deadline()) == [number, bytes(nbytes)]
    connection.send((0, Op.LEAVE), deadline())
    connection.close()


def test_nothing_is_kept_for_those_that_have_given_up(server, honest):
    """A wait for a key, and a rendezvous, were kept for ever."""
    for number in range(200):
        with pytest.raises(NoMessage):
            honest.ask("wait", [f"key {number}"], timeout_s=0.001)
        with pytest.raises(NoMessage):
            honest.ask("rendezvous", f"meeting {number}", 0, 2, b"", "", timeout_s=0.001)
    honest.ask("count", "", timeout_s=LIMIT_S)
    until = deadline()
    while server._values._waiting or server._rendezvous._open:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_rank_that_leaves_is_not_lost_by_its_other_connections(server, honest):
    """One that was given up in the middle of a request ends without LEAVE, perhaps last."""
    given_up, leaving = raw(server), raw(server)
    leaving.send((0, Op.LEAVE), deadline())
    assert is_closed(leaving)
    given_up.close()
    wait_for(lambda: 3 not in server.present())
    reports = honest.ask("reports", [3], timeout_s=LIMIT_S)
    assert RankReport.from_wire(reports[3]).note == LEFT


def test_nothing_is_left_of_a_rank_that_was_lost_and_has_come_again(server, honest):
    """Who asked first after its return heard that it was lost, and of its earlier calls."""
    calls = {"earlier": ("barrier", 1, "x.py:1", 0.0)}
    earlier = raw(server)
    honest.ask(Op.HEARTBEAT, 0, [], {3: (0.0, True, calls)}, timeout_s=5)
    earlier.close()
    ask_lost = functools.partial(honest.ask, Op.HEARTBEAT, 0, [], {}, timeout_s=5)
    wait_for(lambda: ask_lost()[0] == [3])
    again = raw(server)
    assert 3 not in ask_lost()[0]
    assert 3 not in honest.ask(Op.UNWELL, "new", "", 0, timeout_s=5)
    again.close()
    wait_for(lambda: 3 in ask_lost()[0])


def test_an_error_at_a_tick_does_not_end_the_server(server, honest, monkeypatch):
    is_planted = threading.Event()

    def planted():
        is_planted.set()
        raise RuntimeError("planted")

    monkeypatch.setattr(server, "_ping_silent", planted)
    assert is_planted.wait(LIMIT_S)
    assert honest.ask("add", "a", 1, timeout_s=LIMIT_S) == 1


def test_requests_behind_unread_answers_are_served_without_another_one(server, honest, monkeypatch):
    """Where something else than they sent the last of the answers, they stayed where they were."""
    monkeypatch.setattr("coordinator.control.server.MAX_UNREAD_NBYTES", 1 << 20)
    nbytes, count, reader = 1 << 23, 3, raw(server)
    # Else the kernel, which may let a buffer grow to 32 MiB, takes all the answers.
    reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    honest.ask("set", "large", bytes(nbytes), timeout_s=LIMIT_S)
    requests = [pack((number, "get", "large")) for number in range(1, count + 1)]
    together = b"".join(LENGTH.pack(len(request)) + request for request in requests)
    reader.write(together, deadline())  # for after the first answer it reads no more
    stalled = next(each for each in list(server._connections.values()) if each.rank == 3)
    until, received, is_flushed = deadline(), bytearray(), threading.Event()
    while stalled.is_served or not stalled.received:
        assert time.monotonic() < until
        time.sleep(0.01)

    def flush():  # on the server's thread, as a ping does
        while stalled.unsent:
            received.extend(reader.read_exactly(1 << 18, deadline()))
            server._flush(stalled)
        is_flushed.set()
        monkeypatch.setattr(server, "_ping_silent", lambda: None)

    monkeypatch.setattr(server, "_ping_silent", flush)
    assert is_flushed.wait(LIMIT_S)
    size = LENGTH.size + len(pack((1, bytes(nbytes))))
    rest = reader.read_exactly(count * size - len(received), deadline())
    assert rest[-size:] == LENGTH.pack(size - LENGTH.size) + pack((count, bytes(nbytes)))
    reader.send((0, Op.LEAVE), deadline())
    reader.close()


def test_of_failures_so_many_are_kept_and_no_more(server, honest, monkeypatch):
    """The failure of each group, as of one whose call timed out, was kept for ever."""
    monkeypatch.setattr("coordinator.control.membership.MAX_FAILURES", 100)
    groups = [f"c0/{number}/" for number in range(1000)]
    for group in groups:
        honest.ask("report", group, b"why", timeout_s=LIMIT_S)
        lost, failures, _ = honest.ask("heartbeat", 0, [group], {}, timeout_s=LIMIT_S)
        assert (lost, failures) == ([], {group: b"why"})
    _, failures, _ = honest.ask("heartbeat", 0, groups, {}, timeout_s=LIMIT_S)
    assert list(failures) == groups[-100:] and len(server._membership._failures) == 100


def test_of_the_ranks_of_groups_so_many_are_kept_and_no_more(server, honest, monkeypatch):
    """Of a group that is forgotten all ranks of the launch are told of."""
    monkeypatch.setattr("coordinator.control.membership.MAX_GROUP_RANKS", 2)
    raw(server, 2)
    for number in range(9):
        honest.ask("number", f"c{number}//nodes", 0, 1, b"first", timeout_s=LIMIT_S)
    assert server._membership._groups == {"c7/": [1], "c8/": [1]}
    honest.ask("heartbeat", 0, [], {1: (0.0, False, {}), 2: (0.0, False, {})}, timeout_s=LIMIT_S)
    assert list(honest.ask("unwell", "c8/", "", 0, timeout_s=LIMIT_S)) == [1]
    assert sorted(honest.ask("unwell", "c6/", "", 0, timeout_s=LIMIT_S)) == [1, 2]


SENSELESS = [
    (1, "heartbeat", 0, [], 5),
    (1, "heartbeat", 0, [[]], {}),
    (1, "heartbeat", 0, [], {1: 7}),
    (1, "heartbeat", 0, [], {1: (0.0, False, {}), 77: (0.0, False, {})}),
    (1, "heartbeat", None, None, None),
    (1, "reports", [[]]),
    (1, "unwell", "c0/", 1, "barrier"),
    (1, "wait", ["key", ["key"]]),
    (1, "wait", "key"),
    (1, "set", "key", 7),
    (1, "set", ["key"], b""),
    (1, "add", "count", 1.5),
    (1, "rendezvous", "meeting", 7, 1, b"", ""),
    (1, "rendezvous", "meeting", 0, -1, b"", ""),
    (1, "number", "nodes", 7, 1, b""),
    (1, "report", 5, None),
    (1, "processes", [77]),
    (1, ["set"], 5),
    (1, {}, 5),
    ("one", "set", "key", b""),
    (1,),
    (),
    7,
    None,
]


@pytest.mark.parametrize("message", SENSELESS, ids=str)
def test_a_senseless_request_fails_nobody_else(server, honest, message):
    connection = raw(server)
    connection.send(message, deadline())
    with contextlib.suppress(ConnectionBroken):
        answer = connection.receive(deadline())
        assert answer[:2] == [1, None] and "rank 3 asked rank 0 to" in answer[2]
    calls = {"c0/": ("barrier", 1, "a.py:1", 0.5)}
    honest.ask("heartbeat", 0, ["c0/"], {1: (0.0, False, calls)}, timeout_s=LIMIT_S)
    reports = honest.ask("reports", [1, 3], timeout_s=LIMIT_S)
    assert [str(RankReport.from_wire(fields)) for fields in reports.values()]
    honest.ask("set", "key", b"x", timeout_s=LIMIT_S)
    assert honest.ask("wait", ["key"], timeout_s=LIMIT_S) == {"key": b"x"}
    assert honest.ask("add", "count", 1, timeout_s=LIMIT_S) == 1
    connection.close()


def test_a_rendezvous_of_another_size_leaves_the_open_one_alone(server, honest):
    connection = raw(server)
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(
            honest.ask("rendezvous", "m", 0, 2, b"a", "", timeout_s=LIMIT_S)
        )
    )
    thread.start()
    until = deadline()
    while server.ask("arrived", "m", timeout_s=LIMIT_S) != [0]:
        assert time.monotonic() < until
    for place, size in ((1, 1), (0, 1), (2, 2), (-1, 2)):
        connection.send((1, "rendezvous", "m", place, size, b"", ""), deadline())
        assert "in a rendezvous of 2" in connection.receive(deadline())[2]
    connection.send((2, "rendezvous", "m", 1, 2, b"b", ""), deadline())
    assert connection.receive(deadline()) == [2, {0: b"a", 1: b"b"}]
    thread.join(LIMIT_S)
    assert answers == [{0: b"a", 1: b"b"}]
    connection.send((0, Op.LEAVE), deadline())
    connection.close()


class Fuzzer:
    """Random messages of a rank: right ones, others with wrong parts, bytes, and halves."""

    def __init__(self, seed):
        self.pick = random.Random(seed)
        self.numbers = itertools.count(1)

    def value(self, depth=0):
        pick = self.pick
        simple = [
            *(None, True, 0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1, 1.5, float("nan"), "", b""),
            *("key", "count", "c0/", b"x", "x" * 1000, b"y" * 70_000, pick.randrange(10)),
        ]
        if depth > 3 or pick.random() < 0.7:
            return pick.choice(simple)
        count = pick.randrange(4)
        if pick.random() < 0.5:
            return [self.value(depth + 1) for _ in range(count)]
        return {pick.choice(simple): self.value(depth + 1) for _ in range(count)}

    def message(self):
        pick, name = self.pick, self.pick.choice(["key", "count", "other"])
        op = pick.choice([*Op, "unknown"])
        right = {
            Op.SET: [name, b"1"],
            Op.WAIT: [[name, "never"]],
            Op.ADD: [name, pick.choice([1, -1, 2**62])],
            Op.SWAP: [name, b"", b"2"],
            Op.RENDEZVOUS: ["meeting", pick.randrange(3), pick.randrange(3), b"x", name],
            Op.NUMBER: ["nodes", pick.randrange(3), pick.randrange(3), b"x"],
            Op.HEARTBEAT: [0, ["c9/7/"], {3: [0.0, True, {"c0/": self.value()}]}],
            Op.REPORT: [f"c9/{pick.randrange(99)}/", b"x"],
            Op.REPORTS: [[1, 2, 77]],
            Op.UNWELL: ["c0/", "barrier", 1],
            Op.LOOK: [1.0],
            Op.SHOW: [{3: b"x"}],
        }
        arguments = right.get(op, [name])
        for _ in range(pick.choice([0, 0, 1, 1, 2])):
            place = pick.randrange(len(arguments) + 1)
            arguments[place : place + pick.randrange(2)] = [self.value()]
        return (next(self.numbers), op, *arguments) if pick.random() < 0.9 else self.value()

    def packed(self):
        """The bytes of a message, mostly with a right length."""
        pick = self.pick
        body = pack(self.message()) if pick.random() < 0.9 else pick.randbytes(pick.randrange(99))
        if pick.random() < 0.05:
            body = bytes(body[: pick.randrange(len(body) + 1)])
        length = len(body) if pick.random() < 0.98 else pick.choice([0, len(body) + 5, 2**40])
        return LENGTH.pack(length) + body

    def send(self, connection):
        connection.write(self.packed(), deadline())
        if self.pick.random() < 0.8:  # else it leaves its answers unread
            with contextlib.suppress(NoMessage):
                connection.receive(time.monotonic())


@pytest.mark.parametrize("count", MESSAGES)
def test_random_messages_fail_nobody_else(server, honest, count, caplog):
    caplog.set_level(logging.CRITICAL, "coordinator")  # each is logged: the last ones are of use
    seed = random.randrange(1 << 32) if count > 1000 else 1
    fuzzer, connection = Fuzzer(seed), raw(server)
    for number in range(count):
        try:
            fuzzer.send(connection)
        except ConnectionBroken:
            connection.close()
            connection = raw(server)
        if number % 10 == 0:
            call_everything(honest, number, seed)
    connection.close()


def call_everything(honest, number, seed):
    """The calls of a rank that others could disturb; `own` is what no message of theirs names."""
    own, where = f"own/{number}", f"seed {seed}, message {number}"
    status = ("barrier", number, "a.py:1", 0.1)
    try:
        assert honest.ask("add", own, 2, timeout_s=LIMIT_S) == 2, where
        assert honest.ask("wait", [own], timeout_s=LIMIT_S) == {own: b"2"}, where
        honest.ask("set", "key", b"1", timeout_s=LIMIT_S)
        honest.ask("set", "never", b"1", timeout_s=LIMIT_S)
        honest.ask("delete", "never", timeout_s=LIMIT_S)
        assert honest.ask("rendezvous", own, 0, 1, b"x", "", timeout_s=LIMIT_S) == {0: b"x"}, where
        states = {1: (0.0, False, {"c0/": status})}
        _, failures, _ = honest.ask("heartbeat", 0, ["c9/7/"], states, timeout_s=LIMIT_S)
        assert all(isinstance(failure, bytes) for failure in failures.values())
        reports = honest.ask("reports", [1, 3], timeout_s=LIMIT_S)
        honest.ask("unwell", "c0/", "barrier", number, timeout_s=LIMIT_S)
        assert RankReport.from_wire(reports[1]).calls["c0/"].call.startswith("barrier"), where
        assert all(str(RankReport.from_wire(fields)) for fields in reports.values()), where
    except (CoordinatorError, ServerLost, NoMessage) as error:
        raise AssertionError(where) from error
