"""Encrypted connections: what passes on them, and what a stranger between the two ends can do."""

import contextlib
import errno
import json
import os
import random
import selectors
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from torch.distributed import TCPStore

from coordinator import Coordinator, CoordinatorError
from coordinator.control import session
from coordinator.control.framing import Connection
from coordinator.control.server import CONTROL
from coordinator.control.session import _locate_server_by_store, this_process
from launcher import LaunchInfo, launch_secret
from launcher._encryption import Stream, public_key, shared_secret
from launcher.authentication.credentials import Credentials
from launcher.authentication.encryption import EncryptedSocket, KeyExchange
from launcher.authentication.handshake import (
    GREETING,
    HELLO,
    WELCOME,
    AuthenticatedListener,
    Hello,
    Rejected,
    authenticate,
)

KEYS = bytes(range(64))
CREDENTIALS = Credentials(bytes(32), "keys", 2, encrypts=True)
OVERHEAD = 4 + 16  # of a record: its length, and its tag


def swapped(keys):
    return keys[32:] + keys[:32]


@pytest.fixture
def link():
    """One end of an encrypted connection, and the other, of which is read and written what passes
    on the network."""
    ours, network = socket.socketpair()
    with EncryptedSocket(ours, KEYS) as ours, network:
        network.settimeout(10)
        yield ours, network


def receiver(records):
    """The other end of the connection, which these bytes have reached."""
    ours, network = socket.socketpair()
    with network:
        network.sendall(records)
    return EncryptedSocket(ours, swapped(KEYS))


def record_of(link, data):
    ours, network = link
    assert ours.send(data) == len(data)
    return network.recv(len(data) + OVERHEAD, socket.MSG_WAITALL)


def refuses(records, *before):
    """The other end receives what came before, and refuses the rest; again and again."""
    with receiver(b"".join((*before, *records))) as end:
        for _ in before:
            assert end.recv(5) == b"hello"
        for _ in range(2):
            with pytest.raises(OSError, match="altered, repeated or left out") as refused:
                end.recv(100)
            assert refused.value.errno == errno.EBADMSG
    return True


def test_all_bytes_arrive_in_pieces_of_any_size():
    """Both ways at once, through buffers that are too small for a record."""
    pair = socket.socketpair()
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 5000)
    ends = EncryptedSocket(pair[0], KEYS), EncryptedSocket(pair[1], swapped(KEYS))
    data = [random.Random(seed).randbytes(700_001) for seed in (1, 2)]
    received = [bytearray(), bytearray()]

    def send(end, unsent, pick):
        while unsent:
            try:
                unsent = unsent[end.send(unsent[: pick.choice([1, 100, 70_000, 300_000])]) :]
            except BlockingIOError:
                # What could not be sent must come again, whole.
                while True:
                    try:
                        unsent = unsent[end.send(unsent) :]
                        break
                    except BlockingIOError:
                        time.sleep(0.0001)

    def receive(end, into, pick):
        while len(into) < len(data[0]):
            buffer = bytearray(min(pick.choice([1, 5, 1000, 100_000]), len(data[0]) - len(into)))
            try:
                into += buffer[: end.recv_into(buffer)]
            except BlockingIOError:
                time.sleep(0.0001)

    work = [(send, ends[0], data[0]), (send, ends[1], data[1])]
    work += [(receive, ends[1], received[0]), (receive, ends[0], received[1])]
    threads = [
        threading.Thread(target=do, args=(end, what, random.Random(number)), daemon=True)
        for number, (do, end, what) in enumerate(work)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for end in ends:
        end.close()
    assert received == data


def test_nothing_that_passes_can_be_read(link):
    text = b"a value of an encrypted launch " * 10
    first, second = record_of(link, text), record_of(link, text)
    assert text[:8] not in first + second and first[4:] != second[4:]
    with receiver(first + second) as end:
        assert end.recv(1000) == text * 2


def test_every_byte_of_a_record_is_authenticated(link):
    record = record_of(link, b"hello")
    for place in range(4, len(record)):
        altered = bytearray(record)
        altered[place] ^= 1
        assert refuses([altered])
    shorter = (4).to_bytes(4, "little") + record[4:]
    assert refuses([shorter])


def test_a_record_of_a_size_that_none_has_is_refused(link):
    for size in (0, (64 << 10) + 1, (1 << 32) - 1):
        assert refuses([size.to_bytes(4, "little") + bytes(100)])


def test_records_that_are_repeated_left_out_or_exchanged_are_refused(link):
    first, second, third = (record_of(link, b"hello") for _ in range(3))
    assert refuses([first], first)
    assert refuses([second])
    assert refuses([third], first)
    assert refuses([third, second], first)
    with receiver(first + second + third) as end:
        assert end.recv(100) == b"hello" * 3 and end.recv(1) == b""


def test_a_record_cannot_be_sent_back(link):
    ours, network = link
    network.sendall(record_of(link, b"hello"))
    with pytest.raises(OSError, match="altered"):
        ours.recv(5)


def test_a_key_is_changed_after_so_many_records():
    pair = socket.socketpair()
    with pair[0], pair[1]:
        ends = Stream(pair[0].fileno(), KEYS, 3), Stream(pair[1].fileno(), swapped(KEYS), 3)
        for number in range(20):
            ends[0].send(b"%d" % number)
            assert ends[1].recv(10) == b"%d" % number
    streams = []
    for count in (3, 4):
        ours, network = socket.socketpair()
        with ours, network:
            stream = Stream(ours.fileno(), KEYS, count)
            for _ in range(4):
                stream.send(b"hello")
            streams.append(network.recv(1000))
    whole = 3 * (5 + OVERHEAD)
    assert streams[0][:whole] == streams[1][:whole] and streams[0][whole:] != streams[1][whole:]


def test_what_does_not_encrypt_is_refused(link):
    for call in ("sendall", "sendto", "makefile", "recvmsg", "recvfrom", "dup"):
        with pytest.raises(NotImplementedError):
            getattr(link[0], call)(b"x")


def test_keys_are_exchanged_by_x25519():
    """RFC 7748, section 6.1."""
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    shared = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    assert shared_secret(alice, public_key(bob)) == shared_secret(bob, public_key(alice)) == shared
    with pytest.raises(ValueError, match="X25519"):
        shared_secret(alice, bytes(32))  # of low order: all would know what is shared


def test_records_are_encrypted_by_aes_256_gcm():
    """Test case 14 of the GCM specification: a key, a nonce and a block of zeros."""
    ours, network = socket.socketpair()
    with EncryptedSocket(ours, bytes(64)) as ours, network:
        record = record_of((ours, network), bytes(16))
    assert record[4:20].hex() == "cea7403d4d606b6e074ec5d3baf39d18"


def test_a_forked_child_cannot_send(link):
    """It would encrypt what it sends with the nonces of its parent."""
    ours, network = link
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            ours.send(b"of the child")
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert record_of(link, b"hello") == network_bytes(b"hello")
    network.setblocking(False)
    with pytest.raises(BlockingIOError):
        network.recv(1)


def test_a_forked_child_sends_nothing_of_a_record_that_its_parent_has_begun(link):
    """It went on with it, as the parent does: both sent the same bytes."""
    ours, network = link
    with pytest.raises(BlockingIOError):
        while True:
            ours.send(bytes(1 << 18))
    network.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while network.recv(1 << 16):
            pass
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            ours.send(bytes(1 << 18))
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(BlockingIOError):
        network.recv(1)


def network_bytes(data):
    """The first record of a connection."""
    ours, network = socket.socketpair()
    with EncryptedSocket(ours, KEYS) as ours, network:
        return record_of((ours, network), data)


@pytest.mark.parametrize("use", [lambda end: end.send(b"x"), EncryptedSocket.take_keys])
def test_keys_are_given_away_once_and_unused(link, use):
    """Who takes them counts the records from 0, and so would use a nonce again."""
    use(link[0])
    with pytest.raises(ConnectionError, match="in use already"):
        link[0].take_keys()


def test_a_connection_whose_keys_were_given_away_sends_nothing(link):
    link[0].take_keys()
    with pytest.raises(ConnectionError, match="given to another"):
        link[0].send(b"x")


@pytest.mark.parametrize("end", [EncryptedSocket.close, EncryptedSocket.detach])
def test_a_closed_connection_sends_nothing_to_who_has_its_descriptor_now(link, end):
    ours, _ = link
    other, receiver = socket.socketpair()
    with other, receiver:
        fd = ours.fileno()
        end(ours)
        os.dup2(other.fileno(), fd)
        for use in (lambda: ours.send(b"x"), lambda: ours.recv(1)):
            with pytest.raises(OSError, match="Bad file descriptor"):
                use()
        receiver.setblocking(False)
        with pytest.raises(BlockingIOError):
            receiver.recv(1)
        os.close(fd)


def test_a_record_that_is_cut_short_is_not_received(link):
    record = record_of(link, b"hello")
    for place in range(len(record)):
        with receiver(record[:place]) as end:
            assert end.recv(100) == b""


def connected(client, server):
    """The sockets of both ends after an exchange."""
    plain = socket.socketpair()
    exchanges = KeyExchange(client), KeyExchange(server)
    ours = exchanges[0].encrypted(plain[0], exchanges[1].nonce, is_client=True)
    theirs = exchanges[1].encrypted(plain[1], exchanges[0].nonce, is_client=False)
    return ours, theirs


def test_keys_are_those_of_one_connection_and_of_the_launch_secret():
    keys = set()
    for _ in range(2):
        with connected(CREDENTIALS, CREDENTIALS)[0] as ours:
            keys |= halves(ours.take_keys())
    assert len(keys) == 4
    ours, theirs = connected(CREDENTIALS, CREDENTIALS)
    with ours, theirs:
        assert ours.take_keys() == swapped(theirs.take_keys())
    ours, theirs = connected(CREDENTIALS, replace(CREDENTIALS, secret=bytes(31) + b"x"))
    with ours, theirs:
        assert not halves(ours.take_keys()) & halves(theirs.take_keys())


def halves(keys):
    return {keys[:32], keys[32:]}


@pytest.mark.parametrize("encrypts", [(True, False), (False, True)], ids=["client", "server"])
def test_a_stranger_cannot_let_one_end_go_on_unencrypted(encrypts):
    """The flag that it alters in the hello is authenticated, and each end goes by its own."""
    client, server = (replace(CREDENTIALS, encrypts=end) for end in encrypts)
    ends = [socket.socketpair() for _ in range(2)]
    (ours, to_client), (to_server, theirs) = ends
    with ours, to_client, to_server, theirs, socket.create_server(("127.0.0.1", 0)) as listener:
        accepted = []
        selector = selectors.DefaultSelector()
        listening = AuthenticatedListener(
            listener, server, selector, lambda *connection: accepted.append(connection)
        )
        listening._greet(theirs, "a stranger")
        network = threading.Thread(target=_flip_the_flag, args=(to_client, to_server), daemon=True)
        network.start()
        refused = threading.Thread(target=_serve, args=(listening, selector, theirs), daemon=True)
        refused.start()
        with pytest.raises(Rejected, match="refused the launch secret"):
            authenticate(Connection(ours), client, Hello(1, CONTROL), time.monotonic() + 20)
        network.join(20)
        refused.join(20)
        assert not accepted
        selector.close()


def _flip_the_flag(to_client, to_server):
    to_client.sendall(to_server.recv(GREETING.size, socket.MSG_WAITALL))
    hello = bytearray(to_client.recv(HELLO.size, socket.MSG_WAITALL))
    hello[8] ^= 1  # behind rank and turn
    to_server.sendall(hello)
    to_client.sendall(to_server.recv(WELCOME.size, socket.MSG_WAITALL))


def _serve(listening, selector, connection):
    while connection.fileno() >= 0:
        listening.handle(selector.select(20))


def test_a_rank_without_libcrypto_says_what_to_install(tmp_path):
    """And does not go on without encryption. A file in the place of the library hides it."""
    for name in ("libcrypto.so.3", "libcrypto.so.1.1"):
        (tmp_path / name).write_bytes(b"")
    script = (
        "from coordinator.control.secrecy import check_encryption\n"
        "from launcher import LaunchInfo\n"
        "check_encryption(LaunchInfo('none', 2, 2, 0, 0, '127.0.0.1', 1))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "cannot encrypt: no libcrypto (OpenSSL 3 or 1.1.1) with all that" in ended.stderr
    assert "Install OpenSSL 3" in ended.stderr


def test_a_secret_is_not_shown():
    assert "secret" not in repr(CREDENTIALS) and r"\x00" not in repr(CREDENTIALS)


@pytest.mark.parametrize("has_secret", [True, False])
def test_a_secret_in_the_store_does_not_replace_that_of_the_launch(has_secret):
    """Whoever reaches torchrun's store could put one there that only he knows."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("drumline/stored", json.dumps(["127.0.0.1", 1, bytes(32).hex()]))
    extras = {"store": "agent"}
    if has_secret:
        extras["secret_fd"] = str(launch_secret.store(bytes(range(32))))
    info = LaunchInfo("stored", 2, 2, 1, 1, "127.0.0.1", store.port, extras)
    location = _locate_server_by_store(info, 20)
    assert location.secret == (bytes(range(32)) if has_secret else bytes(32))
    if has_secret:
        os.close(int(extras["secret_fd"]))


@pytest.mark.parametrize("lacks", ["secret", "address"])
def test_rank_0_that_cannot_serve_says_why_and_leaves_no_address_in_the_store(monkeypatch, lacks):
    """It said that it had waited for the address of rank 0."""

    def refuse(info):
        raise CoordinatorError("no such host")

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    extras = {"store": "agent"} | ({"secret_fd": "0"} if lacks == "secret" else {})
    info = LaunchInfo("stored", 2, 1, 0, 0, "127.0.0.1", store.port, extras)
    if lacks == "address":
        monkeypatch.setattr(session, "candidates", refuse)
    why = "no such host" if lacks == "address" else "rank 0 cannot read the launch secret"
    with pytest.raises(CoordinatorError, match=f"^{why}"):
        _locate_server_by_store(info, 20)
    assert not store.check(["drumline/stored"])


@pytest.mark.parametrize("nodes, odd", [([2], 0), ([1, 1], 0), ([1, 1, 1], 2), ([2, 1], 2)])
def test_ranks_that_do_not_agree_on_encryption_all_refuse(ranks_or_errors, nodes, odd):
    """The last rank comes when the others are there, for rank 0 leaves with its error."""
    infos = {}

    def body(info):
        infos[info.rank] = info
        while info.rank == 2 and not (0 in infos and is_waited_for(infos[0], {0, 1})):
            time.sleep(0.01)
        Coordinator(info, timeout_s=60, encrypt=info.rank == odd)

    errors = ranks_or_errors(body, sum(nodes), nodes)
    for error in errors:
        assert type(error) is CoordinatorError and "--encrypt, unlike rank 0" in str(error), error
    assert f"started with{'out' * (odd == 0)} --encrypt" in str(errors[0])
    assert f"rank {odd or 1} (host" in str(errors[0])


def is_waited_for(info, ranks):
    server = this_process.of(info).server
    return server is not None and set(server.present()) == ranks


def test_one_rank_has_coordinators_of_one_kind(ranks):
    def body(info):
        with Coordinator(info, timeout_s=20, encrypt=True) as coor:
            with pytest.raises(CoordinatorError, match="encrypt=True, and cannot make one"):
                Coordinator(info, timeout_s=20)
            assert coor.split([1, 0]).encrypts
            coor.barrier()

    ranks(body, 2)


def test_a_launch_without_a_secret_is_warned_of(ranks, caplog):
    def body(info):
        extras = {name: text for name, text in info.extras.items() if name != "secret_fd"}
        with Coordinator(replace(info, extras=extras), timeout_s=20, encrypt=True) as coor:
            coor.barrier()

    ranks(body, 2)
    assert "has no secret of its own: encryption keeps out who reads" in caplog.text


def test_a_launch_over_nodes_without_a_secret_is_warned_of_once(ranks, caplog):
    """A bare torchrun, mpiexec or srun never had one, and nothing said so."""

    def body(info):
        extras = {name: text for name, text in info.extras.items() if name != "secret_fd"}
        for _ in range(2):
            with Coordinator(replace(info, extras=extras), timeout_s=20) as coor:
                coor.barrier()

    ranks(body, 2, [1, 1])
    assert caplog.text.count("can become a rank and read all. Set DRUMLINE_TOKEN") == 1


class Relay:
    """A stranger between rank 0 and the others, who passes on what it is told to."""

    def __init__(self, address):
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        self.alter = lambda data: data  # of what goes to rank 0
        threading.Thread(target=self._accept, args=(address,), daemon=True).start()

    def _accept(self, address):
        while True:
            try:
                ours, _ = self._server.accept()
            except OSError:
                return
            theirs = socket.create_connection(address)
            for source, target, to_rank_0 in ((ours, theirs, True), (theirs, ours, False)):
                threading.Thread(
                    target=self._pass_on, args=(source, target, to_rank_0), daemon=True
                ).start()

    def _pass_on(self, source, target, to_rank_0):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(self.alter(data) if to_rank_0 else data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._server.close()


@pytest.mark.parametrize("how", ["altered", "repeated"])
def test_a_stranger_in_between_ends_the_connection(ranks_or_errors, caplog, how):
    """And is named in the log of the rank that noticed; the others lose the rank behind it."""
    relays, ready = [], threading.Event()
    alterations = {
        "altered": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        "repeated": lambda data: data + data,
    }

    def body(info):
        if info.rank == 0:
            relays.append(Relay((info.master_addr, info.master_port)))
            ready.set()
        else:
            assert ready.wait(20)
            info = replace(info, master_port=relays[0].address[1])
        with Coordinator(info, timeout_s=20, encrypt=True) as coor:
            coor.put(f"before{coor.rank}", b"x")
            coor.barrier()
            if coor.rank == 1:
                relays[0].alter = alterations[how]
                while True:
                    coor.put("after", b"x")
            coor.barrier()

    try:
        errors = ranks_or_errors(body, 2, [1, 1])
    finally:
        relays[0].close()
    assert all(isinstance(error, CoordinatorError) for error in errors), errors
    assert "altered, repeated or left out on its way" in caplog.text
