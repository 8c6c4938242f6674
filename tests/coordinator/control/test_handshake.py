"""Strangers without the launch secret do not join, crash or delay a launch."""

import collections
import contextlib
import logging
import os
import random
import resource
import select
import selectors
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from coordinator import Coordinator, CoordinatorError
from coordinator.control import client as client_module
from coordinator.control.client import Client, ServerLost, connect
from coordinator.control.framing import Connection
from coordinator.control.server import CONTROL, ControlServer
from coordinator.timings import CoordinatorTimings
from coordinator.transport.tree import ChildListener
from launcher import LaunchInfo
from launcher.authentication.credentials import MAGIC, VERSION, Credentials
from launcher.authentication.framed_connection import ConnectionBroken, NoMessage
from launcher.authentication.handshake import (
    GREETING,
    HELLO,
    MAX_PENDING,
    WELCOME,
    AuthenticatedListener,
    Hello,
    NotReady,
    Rejected,
    authenticate,
    purpose_of,
)


@pytest.fixture
def launch():
    """A listening socket, a secret, and info(rank, **changes) for ranks of one launch."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    secret_fd = os.memfd_create("launch-secret")
    os.write(secret_fd, bytes(range(32)))

    def info(rank, nprocs=2, **changes):
        extras = {"secret_fd": str(secret_fd)} | changes.pop("extras", {})
        if rank == 0:
            extras["master_fd"] = str(listener.fileno())
        port = listener.getsockname()[1]
        values = {"launch_id": "strangers", "master_port": port} | changes
        return LaunchInfo(
            world_size=nprocs, local_world_size=nprocs, rank=rank, local_rank=rank,
            extras=extras, **values,
        )  # fmt: skip

    info.address = listener.getsockname()
    yield info
    listener.close()
    os.close(secret_fd)


def together(*bodies):
    """Each body on a thread of its own; what they return or raise."""
    results = [None] * len(bodies)

    def run(index, body):
        try:
            results[index] = body()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def meet(info, rounds=20, timeout_s=20):
    with Coordinator(info, timeout_s=timeout_s) as coor:
        for _ in range(rounds):
            coor.put(f"rank{coor.rank}", b"x")
            coor.barrier()
        return coor.allgather_object(coor.rank)


@contextlib.contextmanager
def running(work):
    """work(is_over) on a thread, again and again, until the block ends; how often it ran."""
    is_over, count = threading.Event(), [0]

    def loop():
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                work()
                count[0] += 1

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield count
    finally:
        is_over.set()
        thread.join()


def garbage(address):
    with socket.create_connection(address, timeout=0.05) as link:
        link.sendall(random.randbytes(random.choice([1, 10, HELLO.size, 5000])))
        link.recv(4096)


def http(address):
    with socket.create_connection(address, timeout=1) as link:
        link.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * HELLO.size)
        link.recv(4096)


def scan(address):
    socket.create_connection(address, timeout=1).close()


def reset(address):
    link = socket.create_connection(address, timeout=1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


def guess(address):
    with socket.create_connection(address, timeout=1) as link:
        link.recv(GREETING.size)
        hello = HELLO.pack(0, 0, False, CONTROL, bytes(8), b"", os.urandom(32), os.urandom(32))
        link.sendall(hello)
        verdict = link.recv(WELCOME.size)
        assert verdict in (b"", WELCOME.pack(2, b"", bytes(32))), "a stranger was let in"


ATTACKS = {"garbage": garbage, "http": http, "scan": scan, "reset": reset, "guess": guess}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_client_in_a_loop_changes_nothing(launch, attack):
    with running(lambda: ATTACKS[attack](launch.address)) as count:
        meetings = 0
        while meetings < 2 or count[0] <= 3:
            meetings, start = meetings + 1, time.monotonic()
            outcomes = together(*[lambda rank=rank: meet(launch(rank)) for rank in range(2)])
            assert outcomes == [[0, 1]] * 2
            assert time.monotonic() - start < 15


def test_a_thousand_idle_connections_do_not_delay(launch, caplog):
    idle = [socket.create_connection(launch.address) for _ in range(200)]
    stranger = os.fork()  # a process of its own, as strangers are
    if stranger == 0:
        try:
            idle += [socket.create_connection(launch.address, timeout=5) for _ in range(800)]
            time.sleep(60)
        finally:
            os._exit(1)
    start = time.monotonic()
    outcomes = together(*[lambda rank=rank: meet(launch(rank), 400) for rank in range(2)])
    assert outcomes == [[0, 1]] * 2
    assert time.monotonic() - start < 30
    assert os.waitpid(stranger, os.WNOHANG) == (0, 0), "it was not let stay"
    os.kill(stranger, signal.SIGKILL)
    os.waitpid(stranger, 0)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) <= 1, warnings
    for link in idle:
        link.close()


def was_sent_away(link):
    link.setblocking(False)
    try:
        return not link.recv(1000)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_strangers_cannot_take_the_descriptors_that_ranks_need(fork):
    """Rank 0 may open few files, and there are more strangers than that."""

    def body(info):
        if info.rank == 0:
            spare = len(os.listdir("/proc/self/fd")) + 40
            resource.setrlimit(resource.RLIMIT_NOFILE, (spare, spare))
        with Coordinator(info, timeout_s=20) as coor:
            if coor.rank == 1:
                address = (info.master_addr, info.master_port)
                idle = [socket.create_connection(address, timeout=5) for _ in range(100)]
                while sum(map(was_sent_away, idle)) < 60:
                    time.sleep(0.01)
            coor.barrier()
            if coor.rank == 0:
                with open(os.devnull):  # the program itself has some left too
                    pass
            return Coordinator(info, timeout_s=10).allgather_object(coor.rank)

    outcomes = fork(body, 3).outcomes()
    assert [each.value for each in outcomes] == [[0, 1, 2]] * 3, outcomes


def test_a_slow_writer_and_half_open_connections_do_not_delay(launch):
    def drip():
        with socket.create_connection(launch.address, timeout=5) as link:
            for _ in range(20):
                link.sendall(b"x")
                time.sleep(0.02)

    halves = [socket.create_connection(launch.address) for _ in range(10)]
    for half in halves:
        half.shutdown(socket.SHUT_WR)
    outcomes = together(
        *[lambda rank=rank: meet(launch(rank)) for rank in range(2)], *[drip for _ in range(5)]
    )
    assert outcomes[:2] == [[0, 1]] * 2
    for half in halves:
        half.close()


@pytest.mark.parametrize("what", ["secret", "world_size", "launch_id"])
def test_a_rank_of_another_launch_is_rejected_at_once(launch, what, caplog):
    """Rank 1 of another secret, size or launch comes to this rank 0 and is sent away."""
    other_fd = os.memfd_create("launch-secret")
    os.write(other_fd, bytes(32))
    changes, text = {
        "secret": ({"extras": {"secret_fd": str(other_fd)}}, "refused the launch secret"),
        "world_size": ({"nprocs": 3}, "of 3 ranks, but the launch there has 2 ranks"),
        "launch_id": ({"launch_id": "another"}, "another launch id was given there"),
    }[what]
    logged = "does not know the launch secret" if what == "secret" else "is of another launch"

    def wrong():
        time.sleep(0.1)
        return Coordinator(launch(1, **changes), timeout_s=5)

    def late():
        time.sleep(0.3)
        return meet(launch(1))

    start = time.monotonic()
    outcomes = together(lambda: meet(launch(0)), wrong, late)
    os.close(other_fd)
    assert outcomes[0] == outcomes[2] == [0, 1]
    assert isinstance(outcomes[1], CoordinatorError), outcomes[1]
    assert text in str(outcomes[1])
    assert time.monotonic() - start < 15
    assert f"a connection from 127.0.0.1 {logged}" in caplog.text


def test_a_replayed_handshake_is_rejected(launch):
    """A relay records what rank 1 says, and says it again on a connection of its own."""
    recorded = []
    relay = socket.create_server(("127.0.0.1", 0))

    def overhear():
        ours, _ = relay.accept()
        theirs = socket.create_connection(launch.address)
        ours.sendall(theirs.recv(GREETING.size, socket.MSG_WAITALL))
        recorded.append(ours.recv(HELLO.size, socket.MSG_WAITALL))
        theirs.close()
        ours.close()
        with socket.create_connection(launch.address, timeout=20) as again:
            again.recv(GREETING.size, socket.MSG_WAITALL)
            again.sendall(recorded[0])
            recorded.append(again.recv(WELCOME.size))
        relay.close()

    def first():
        with pytest.raises(CoordinatorError):
            Coordinator(launch(1, master_port=relay.getsockname()[1]), timeout_s=1)
        return meet(launch(1))

    outcomes = together(lambda: meet(launch(0)), first, overhear)
    assert outcomes == [[0, 1], [0, 1], None]
    assert recorded[1][:1] == b"\x02"


def test_a_connection_for_another_purpose_is_no_rank():
    """Its MAC could come from a handshake at another listener, passed on to rank 0."""
    credentials = Credentials(bytes(range(32)), "strangers", 2)

    def authenticate(purpose):
        hello = Hello(1, purpose_of(purpose))
        connect(server.address, credentials, hello, time.monotonic() + 5).close()

    server = ControlServer(socket.create_server(("127.0.0.1", 0)), credentials)
    server.open(0)
    authenticate("control")
    with pytest.raises(Rejected):
        authenticate("tree/c0//1")
    server.begin_closing()
    assert server.wait(5)


CREDENTIALS = Credentials(bytes(range(32)), "strangers", 400)


@pytest.fixture
def server():
    """A ControlServer for 400 ranks, which are the clients of joined(server, rank)."""
    server = ControlServer(socket.create_server(("127.0.0.1", 0), backlog=1024), CREDENTIALS)
    server.open(0)
    yield server
    server.begin_closing()
    assert server.wait(5)


def joined(server, rank, timeout_s=5):
    """A Client that the server has answered, and so has noted."""
    hello = Hello(rank, CONTROL, token=rank.to_bytes(8, "big"), process=f"rank {rank}")
    client = Client(lambda: [server.address], CREDENTIALS, hello, timeout_s)
    assert client.ask("count", "", timeout_s=timeout_s) == 0
    return client


def dialled(address, count):
    return [socket.create_connection(address, timeout=5) for _ in range(count)]


def send_while_others_come(address, oldest):
    """As many dial as are accepted in one turn, and those that they send away say a byte."""
    others = dialled(address, 16)
    for link in oldest[:16]:
        link.send(b"x")
    return others


def test_a_client_that_sends_as_it_is_rejected_does_not_end_the_server():
    """They were dropped and then heard, in one turn of the loop, and the thread ended."""
    credentials = Credentials(bytes(range(32)), "strangers", 2)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    server = ControlServer(listener, credentials, CoordinatorTimings(pending_s=0))
    server.open(0)
    links = dialled(server.address, MAX_PENDING)
    for link in links:
        assert link.recv(GREETING.size, socket.MSG_WAITALL)
    with server._state:  # the thread waits here with what it has: all after it comes in one turn
        links[-1].send(b"x")
        time.sleep(0.2)
        others = send_while_others_come(server.address, links)
    assert all(link.recv(GREETING.size, socket.MSG_WAITALL) for link in others)
    assert not server.is_over
    connect(server.address, credentials, Hello(1, CONTROL), time.monotonic() + 5).close()
    for link in links + others:
        link.close()
    server.begin_closing()
    assert server.wait(5)


@pytest.fixture
def patient():
    """A server that gives each client a minute to authenticate, whoever else comes."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = ControlServer(listener, CREDENTIALS, CoordinatorTimings(pending_s=60))
    server.open(0)
    yield server
    server.begin_closing()
    assert server.wait(5)


def test_an_answer_that_this_version_does_not_have_is_refused():
    """It was taken as accepted."""
    listener, selector = socket.create_server(("127.0.0.1", 0)), selectors.DefaultSelector()
    answering = AuthenticatedListener(
        listener, CREDENTIALS, selector, lambda *_: None, lambda _: (99, "")
    )

    def serve():
        for _ in range(2):  # the connection, the hello
            answering.handle(selector.select(20))

    with listener, socket.create_connection(listener.getsockname(), 20) as link:
        refused = pytest.raises(Rejected, match="it gave answer 99, which this version")
        thread = threading.Thread(target=serve)
        thread.start()
        with refused:
            authenticated(link)
        thread.join()
        answering.close()


def authenticated(link):
    authenticate(Connection(link), CREDENTIALS, Hello(1, CONTROL), time.monotonic() + 20)


def test_strangers_do_not_take_the_place_of_a_distant_rank(patient):
    """They sent it away before its hello could arrive."""
    max_pending = patient._authenticator._max_pending
    with socket.create_connection(patient.address, timeout=20) as distant:
        distant.recv(1, socket.MSG_PEEK)
        strangers = dialled(patient.address, max_pending)
        assert strangers[-1].recv(1) == b""
        authenticated(distant)
    for link in strangers:
        link.close()


def test_an_address_with_few_connections_has_room_beside_one_with_many(patient):
    strangers = dialled(patient.address, patient._authenticator._max_pending)
    with socket.create_connection(patient.address, 20, ("127.0.0.2", 0)) as distant:
        authenticated(distant)
    for link in strangers:
        link.close()


@contextlib.contextmanager
def delayed(address, delay_s):
    """The address of a relay that hands on all bytes so much later."""
    relay = socket.create_server(("127.0.0.1", 0))

    def hand_on(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(delay_s)
                sink.sendall(data)
            time.sleep(delay_s)
            sink.shutdown(socket.SHUT_WR)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                near, far = relay.accept()[0], socket.create_connection(address, timeout=20)
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=hand_on, args=ends, daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield relay.getsockname()
    relay.shutdown(socket.SHUT_RDWR)
    relay.close()
    thread.join(20)


@contextlib.contextmanager
def flood(address):
    """A process that dials as fast as it can, and lets the last hundreds stay."""
    stranger = os.fork()
    if stranger == 0:
        signal.alarm(100)
        links = collections.deque(maxlen=400)
        while True:
            with contextlib.suppress(OSError):
                links.append(socket.create_connection(address, timeout=5))
    try:
        yield
    finally:
        os.kill(stranger, signal.SIGKILL)
        os.waitpid(stranger, 0)


def test_a_flood_does_not_keep_a_distant_rank_out(server):
    with flood(server.address), delayed(server.address, 0.05) as address:
        while len(server._authenticator._pending) < server._authenticator._max_pending:
            time.sleep(0.01)
        addresses, hello = [address], Hello(1, CONTROL, process="distant")
        client = Client(lambda: addresses, CREDENTIALS, hello, 90)
        assert client.ask("count", "", timeout_s=20) == 0
        client.close()


def test_a_client_that_sends_as_it_is_rejected_does_not_end_a_listener():
    with contextlib.closing(ChildListener("127.0.0.1", CREDENTIALS, "tree")) as listener:
        links = dialled(listener.address, MAX_PENDING)
        with pytest.raises(NoMessage):
            listener.wait([1], time.monotonic() + 0.5, lambda: None)
        others = send_while_others_come(listener.address, links)
        with pytest.raises(NoMessage):
            listener.wait([1], time.monotonic() + 0.5, lambda: None)
    for link in links + others:
        link.close()


def test_300_ranks_that_come_at_once_all_authenticate(server, monkeypatch):
    """Far away or busy as they are, they sent each other away before any had proved itself."""
    authenticate = client_module.authenticate

    def authenticate_late(*arguments):
        time.sleep(random.uniform(0.25, 0.5))
        authenticate(*arguments)

    monkeypatch.setattr(client_module, "authenticate", authenticate_late)
    reading, writing = os.pipe()
    ranks = os.fork()  # a process of their own: it has descriptors of its own
    if ranks == 0:
        try:
            clients = together(
                *[lambda rank=rank: joined(server, rank, 20) for rank in range(1, 301)]
            )
            count = sum(isinstance(client, Client) for client in clients)
            os.write(writing, str(count).encode())
            time.sleep(60)
        finally:
            os._exit(1)
    count = int(os.read(reading, 100))
    present = server.present()
    os.kill(ranks, signal.SIGKILL)
    os.waitpid(ranks, 0)
    os.close(reading)
    os.close(writing)
    assert count == 300 and present == list(range(1, 301))


def test_a_listener_has_room_for_all_children():
    with contextlib.closing(ChildListener("127.0.0.1", CREDENTIALS, "tree", 300)) as listener:
        links = dialled(listener.address, 300)
        with pytest.raises(NoMessage):
            listener.wait(range(1, 301), time.monotonic() + 0.5, lambda: None)
        assert links[0].recv(GREETING.size, socket.MSG_WAITALL)
        links[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            links[0].recv(1)
    for link in links:
        link.close()


def planted(*_):
    raise RuntimeError("planted")


@pytest.mark.parametrize("place", ["_greet", "_receive", "_decide", "_on_accepted"])
def test_an_error_on_one_connection_ends_that_one_alone(server, monkeypatch, caplog, place):
    """Told once, with the traceback, however often it is repeated."""
    caplog.set_level(logging.WARNING, "coordinator")
    with contextlib.closing(joined(server, 1)) as client:
        with monkeypatch.context() as patch:
            patch.setattr(server._authenticator, place, planted)
            for _ in range(3):
                start = time.monotonic()
                with pytest.raises((NotReady, ConnectionBroken)):
                    link = connect(server.address, CREDENTIALS, Hello(2, CONTROL), start + 20)
                    link.read_exactly(1, start + 20)
                assert time.monotonic() - start < 15, "it was not closed"
        assert client.ask("count", "", timeout_s=5) == 0
        joined(server, 2).close()
    errors = [record for record in caplog.records if "planted" in record.message]
    assert len(errors) == 1 and errors[0].exc_info and "strangers" in errors[0].message


def test_an_error_on_the_connection_of_a_rank_ends_that_one_alone(server, monkeypatch):
    with contextlib.closing(joined(server, 1)) as client:
        other = joined(server, 2)
        with monkeypatch.context() as patch:
            patch.setattr(ControlServer, "_receive", planted)
            with pytest.raises(ServerLost):
                other.ask("count", "", timeout_s=5)
        lost, *_ = client.ask("heartbeat", 0, [], {}, timeout_s=5)
        assert lost == [2], "its loss is not news"
        joined(server, 3).close()


def test_an_error_on_one_connection_does_not_end_a_listener(monkeypatch):
    monkeypatch.setattr(AuthenticatedListener, "_receive", planted)
    with (
        contextlib.closing(ChildListener("127.0.0.1", CREDENTIALS, "tree")) as listener,
        socket.create_connection(listener.address, timeout=5) as link,
    ):
        link.send(b"x")
        with pytest.raises(NoMessage):
            listener.wait([1], time.monotonic() + 0.5, lambda: None)
        with contextlib.suppress(ConnectionResetError):
            assert len(link.recv(GREETING.size + 1, socket.MSG_WAITALL)) <= GREETING.size


def test_a_counter_that_leaves_64_bits_is_an_error_of_the_requester(server):
    """Its answer could not be packed, and the thread of the server ended."""
    most = 2**63 - 1
    with contextlib.closing(joined(server, 1)) as client:
        assert client.ask("add", "a", most, timeout_s=5) == most
        with pytest.raises(CoordinatorError, match=r"rank 1 asked rank 0 to add.*64 bits"):
            client.ask("add", "a", most, timeout_s=5)
        with pytest.raises(CoordinatorError, match=r"rank 0 asked rank 0 to add.*64 bits"):
            server.ask("add", "a", 1, timeout_s=5)
        assert client.ask("add", "a", -1, timeout_s=5) == most - 1
        assert client.ask("add", "b", -most - 1, timeout_s=5) == -most - 1


def test_an_answer_that_cannot_be_packed_is_an_error_of_the_requester(server, monkeypatch):
    monkeypatch.setitem(server._operations, "reports", lambda *_: 2**70)
    with contextlib.closing(joined(server, 1)) as client:
        with pytest.raises(CoordinatorError, match="OverflowError"):
            client.ask("reports", [], timeout_s=5)
        assert client.ask("add", "a", 1, timeout_s=5) == 1


def test_a_rank_0_of_another_version_is_named_at_once(launch):
    """Its greeting may be shorter than ours."""
    server = socket.create_server(("127.0.0.1", 0))

    def greet():
        link, _ = server.accept()
        link.sendall(struct.pack("!8sH", MAGIC, 3))
        link.recv(1)
        link.close()

    def come():
        return Coordinator(launch(1, master_port=server.getsockname()[1]), timeout_s=20)

    start = time.monotonic()
    _, error = together(greet, come)
    server.close()
    assert f"it speaks protocol 3, not {VERSION}" in str(error) and time.monotonic() < start + 15


def test_a_false_rank_0_is_detected(launch):
    """It sends the right greeting, but cannot answer for the secret."""
    server = socket.create_server(("127.0.0.1", 0))
    credentials = Credentials(b"not the secret".ljust(32), "strangers", 2)

    def lie():
        link, _ = server.accept()
        link.sendall(GREETING.pack(MAGIC, VERSION, 2, credentials.fingerprint(), bytes(32)))
        link.recv(HELLO.size, socket.MSG_WAITALL)
        link.sendall(WELCOME.pack(0, b"", os.urandom(32)))
        link.recv(1)
        link.close()

    def believe():
        return Coordinator(launch(1, master_port=server.getsockname()[1]), timeout_s=5)

    error, _ = together(believe, lie)
    server.close()
    assert isinstance(error, CoordinatorError) and "does not know the launch secret" in str(error)


def listening():
    """Sockets of this machine's network that listen, by inode: where."""
    addresses = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # TCP_LISTEN
                addresses[fields[9]] = fields[1].partition(":")[0]
    return addresses


def sockets_of(pid):
    """The inodes of a process's sockets."""
    inodes = set()
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd).removeprefix("socket:[").rstrip("]"))
    return inodes


@pytest.mark.parametrize("nodes", [[2], [1, 1], [2, 2]], ids=str)
def test_nothing_listens_on_every_interface_at_any_moment(fork, nodes):
    """The ranks stay open until their sockets have been looked at once more after they met."""
    world_size = sum(nodes)
    inherited = sockets_of(os.getpid())  # of libraries that other tests have used
    observer, rank_end = socket.socketpair()

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            for _ in range(200):
                coor.barrier()
            rank_end.send(b"x")
            rank_end.recv(1)

    ranks, seen, num_met = fork(body, world_size, nodes), {}, 0
    while num_met < world_size or not seen:
        if select.select([observer], [], [], 0)[0]:
            num_met += len(observer.recv(world_size))
        everywhere = listening()
        held = set().union(*map(sockets_of, ranks.pids)) - inherited
        seen |= {inode: everywhere[inode] for inode in held & everywhere.keys()}
    observer.send(bytes(world_size))
    assert [outcome.error for outcome in ranks.outcomes()] == [""] * world_size
    assert set(seen.values()) == {"0100007F"}, seen  # 127.0.0.1, as proc_net_tcp writes it
    assert not seen.keys() & listening().keys()
    observer.close()
    rank_end.close()
