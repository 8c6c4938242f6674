"""The handshake: both ends of a connection prove that they know the launch secret.

    server -> client   magic, version, world size, fingerprint of the launch, nonce
    client -> server   rank, turn, whether it encrypts, purpose, token and name of the process,
                       nonce, MAC over all of it
    server -> client   answer, name of the process that is this rank already, or the failure, MAC

Fresh nonces of both ends make a recorded answer worthless, and the name of the end inside the MAC
makes it worthless to send one back. All messages have a fixed size, so nothing of a stranger is
ever parsed. The token tells two processes apart that both claim to be one rank. If both encrypt,
the nonces are public keys, and all that follows is encrypted; if one does, it is sent away.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial

from launcher.authentication.credentials import MAGIC, VERSION, Credentials
from launcher.authentication.encryption import KeyExchange
from launcher.authentication.framed_connection import ConnectionBroken, FramedConnection, noop
from launcher.system import linux
from launcher.timings import TIMINGS, ConnectionTimings

MAC_NBYTES = 32
PREFIX = struct.Struct("!8sH")  # magic, version: the same in every version
GREETING = struct.Struct("!8sHI16s32s")  # and world size, fingerprint, nonce
NAME_NBYTES = 96
HELLO = struct.Struct(f"!II?32s8s{NAME_NBYTES}s32s32s")  # Hello's fields, nonce, MAC
WELCOME = struct.Struct(f"!B{NAME_NBYTES}s32s")  # Answer, name, MAC
MAX_PENDING = 128  # unauthenticated connections, or as many as ranks may come

log = logging.getLogger("launcher")


class Answer(IntEnum):
    """The server's answer to a hello."""

    ACCEPTED = 0
    NOT_READY = 1
    REJECTED = 2
    DUPLICATE_RANK = 3
    OTHER_ENCRYPTION = 4
    LAUNCH_FAILED = 5


class Rejected(Exception):
    """The other end refuses this one, and asking again will not change that."""


class SecretRejected(Rejected):
    """One end does not know the secret of the other."""


class OtherLaunch(Rejected):
    """A launch of another number of ranks, or another id, is there; it may end."""


class LaunchFailed(Rejected):
    """The failure of a rank before all had met, told by the launcher of rank 0, which is gone."""


class NotReady(Exception):
    """The other end is not there yet, or about to go."""


def purpose_of(text: str) -> bytes:
    """The purpose of a connection, in the size that the handshake has for it."""
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class Hello:
    """The claim of a client: its rank, the purpose of the connection and its turn.

    turn: how many Coordinators the rank had made before. token, process: of its process, so that
    one rank is one process, and for an error to name it. encrypts: the launch, as this rank has it.
    """

    rank: int
    purpose: bytes
    turn: int = 0
    token: bytes = bytes(8)
    process: str = ""
    encrypts: bool = False

    def pack(self, nonce: bytes) -> bytes:
        """The client's message, up to the MAC that authenticates it."""
        name = self.process.encode()[:NAME_NBYTES]
        fields = (self.rank, self.turn, self.encrypts, self.purpose, self.token, name)
        return HELLO.pack(*fields, nonce, bytes(MAC_NBYTES))[:-MAC_NBYTES]


def authenticate(
    connection: FramedConnection,
    credentials: Credentials,
    hello: Hello,
    deadline: float,
    idle: Callable[[], None] = noop,
) -> None:
    """Run the client's side, and encrypt from then on if the launch does.

    Raises NotReady or Rejected. idle as in FramedConnection.
    """
    hello = replace(hello, encrypts=credentials.encrypts)
    exchange = KeyExchange(credentials)
    try:
        prefix = connection.read_exactly(PREFIX.size, deadline, idle)
        _check_prefix(*PREFIX.unpack(prefix))
        rest = connection.read_exactly(GREETING.size - PREFIX.size, deadline, idle)
        _, _, world_size, fingerprint, server_nonce = GREETING.unpack(prefix + rest)
        if fingerprint != credentials.fingerprint():
            connection.write(credentials.fingerprint(), deadline)
        _check_launch(world_size, fingerprint, credentials)
        message = hello.pack(exchange.nonce)
        mac = credentials.mac(b"client", message, server_nonce)
        connection.write(message + mac, deadline)
        welcome = connection.read_exactly(WELCOME.size, deadline, idle)
        answer, name, server_mac = WELCOME.unpack(welcome)
    except ConnectionBroken as error:
        raise NotReady(f"what listens there has not answered as rank 0 does: {error}") from error
    if answer == Answer.REJECTED:
        raise SecretRejected("it refused the launch secret of this rank")
    expected = credentials.mac(b"server", _welcome(answer, name), mac + server_nonce)
    if not hmac.compare_digest(server_mac, expected):
        raise SecretRejected("it does not know the launch secret, so it is not ours")
    if answer == Answer.NOT_READY:
        raise NotReady("it is not this rank's turn")
    if answer == Answer.DUPLICATE_RANK:
        raise Rejected(f"{_text(name)} is rank {hello.rank} already, and this is {hello.process}")
    if answer == Answer.LAUNCH_FAILED:
        raise LaunchFailed(_text(name))
    if answer == Answer.OTHER_ENCRYPTION:
        raise Rejected(describe_encryption(hello.encrypts))
    if answer != Answer.ACCEPTED:
        raise Rejected(f"it gave answer {answer}, which this version of drumline does not have")
    connection.socket = exchange.encrypted(connection.socket, server_nonce, is_client=True)


def describe_encryption(is_with: bool, rank: str = "this rank") -> str:
    """Why a rank does not belong to the others of its launch."""
    return f"{rank} was started {'with' if is_with else 'without'} --encrypt, unlike rank 0"


def _welcome(answer: int, name: bytes) -> bytes:
    """The server's answer to a Hello, up to the MAC that authenticates it."""
    return WELCOME.pack(answer, name, bytes(MAC_NBYTES))[:-MAC_NBYTES]


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")


def _check_prefix(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise Rejected("something else listens there")
    if version != VERSION:
        raise Rejected(f"it speaks protocol {version}, not {VERSION}: install one version")


def _check_launch(world_size: int, fingerprint: bytes, credentials: Credentials) -> None:
    if world_size != credentials.world_size:
        raise OtherLaunch(f"the launch there has {world_size} ranks")
    if fingerprint != credentials.fingerprint():
        raise OtherLaunch("another launch id was given there")


@dataclass(frozen=True)
class Handler:
    """Callbacks of one socket in a selector. on_error closes a connection that on_ready failed on;
    a socket that must stay open does nothing then."""

    on_ready: Callable[[int], None]
    on_error: Callable[[], None] = noop


@dataclass
class _PendingConnection:
    """A connection that is not authenticated yet."""

    socket: socket.socket
    address: str
    exchange: KeyExchange
    since: float
    received: bytes = b""


class AuthenticatedListener:
    """Accepts connections within somebody's selector, and hands on those that authenticate.

    All that is registered with the selector is a Handler, and whoever selects calls handle().

    on_accepted(connection, hello) takes the connection over.
    authorize(hello): the Answer, and for DUPLICATE_RANK the process that is this rank already, for
    LAUNCH_FAILED the rank that has failed, and how.
    on_other_encryption(hello): of a rank that has the secret, and encrypts where this end does not,
    or the reverse; it is sent away.
    max_pending: the unauthenticated connections that may wait.
    """

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        selector: selectors.BaseSelector,
        on_accepted: Callable[[socket.socket, Hello], None],
        authorize: Callable[[Hello], tuple[Answer, str]] = lambda _: (Answer.ACCEPTED, ""),
        max_pending: int = MAX_PENDING,
        timings: ConnectionTimings = TIMINGS,
        on_other_encryption: Callable[[Hello], None] = lambda _: None,
    ) -> None:
        self._listener, self._credentials, self._selector = listener, credentials, selector
        self._on_accepted, self._authorize, self._max_pending = on_accepted, authorize, max_pending
        self._timings, self._on_other_encryption = timings, on_other_encryption
        self._pending: dict[socket.socket, _PendingConnection] = {}  # the oldest first
        self._num_rejected = 0
        self._num_errors = 0
        self._is_full = False  # no descriptors were left, except those of connections that may stay
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, Handler(self._accept))

    def close(self) -> None:
        """Close the pending connections. The listening socket stays its owner's."""
        self._selector.unregister(self._listener)
        for connection in list(self._pending):
            self._drop(connection)

    def handle(self, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
        """Call the handlers of what select() returned; an error ends that one connection alone."""
        for key, events in ready:
            self.isolate(partial(key.data.on_ready, events), key.data.on_error)

    def isolate(self, work: Callable[[], None], on_error: Callable[[], None] = noop) -> None:
        """Do some work; an error of it is logged, and ends nothing but what on_error ends."""
        try:
            work()
        except Exception as error:
            self._log_error(error)
            on_error()

    def _log_error(self, error: Exception) -> None:
        """Log an error: the first as ERROR, others as DEBUG, for a stranger may repeat them."""
        self._num_errors += 1
        log.log(
            logging.ERROR if self._num_errors == 1 else logging.DEBUG,
            "launch %s: a connection failed and was given up: %r. All others are served as before, "
            "but this is a defect of drumline: report it with this traceback.",
            self._credentials.launch_id,
            error,
            exc_info=error,
        )

    def tick(self) -> None:
        """Send away connections that take too long; to be called now and then."""
        oldest = time.monotonic() - self._timings.handshake_s
        for pending in list(self._pending.values()):
            if pending.since > oldest:
                break
            self._reject(pending.socket, "did not authenticate in time")

    def _accept(self, _: int) -> None:
        for _ in range(16):  # and then let the authenticated have their turn
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptors left, or the client is gone again
                self._on_accept_error(error)
                return
            try:
                self._greet(connection, str(address[0]))
            except Exception:
                self._drop(connection)
                raise

    def _on_accept_error(self, error: OSError) -> None:
        level = logging.DEBUG if self._pending or self._is_full else logging.WARNING
        log.log(level, "rank 0 could not accept a connection: %s", error)
        self._is_full = self._is_full or not self._pending
        if not self._pending:
            time.sleep(self._timings.idle_s)
        for oldest in list(self._pending)[: (len(self._pending) + 1) // 2]:
            self._reject(oldest, "was sent away, for too many files are open")

    def _greet(self, connection: socket.socket, address: str) -> None:
        exchange, now = KeyExchange(self._credentials), time.monotonic()
        pending = _PendingConnection(connection, address, exchange, now)
        if len(self._pending) >= self._max_pending and not self._make_room(pending):
            return self._reject(connection, "came while too many others did")
        connection.setblocking(False)
        handler = Handler(lambda _: self._receive(pending), lambda: self._drop(connection))
        self._selector.register(connection, selectors.EVENT_READ, handler)
        self._pending[linux.closed_in_children(connection)] = pending
        size, fingerprint = self._credentials.world_size, self._credentials.fingerprint()
        self._send(connection, GREETING.pack(MAGIC, VERSION, size, fingerprint, exchange.nonce))

    def _make_room(self, newcomer: _PendingConnection) -> bool:
        """Send away the oldest of the address that has most: if it has had time, or crowds.

        The newcomer's own address is as any other: so those who come often share their places with
        each other. Of addresses that do not crowd out others, none loses a place before the
        messages of a distant rank can arrive.
        """
        counts = Counter(pending.address for pending in self._pending.values())
        (crowd, most), *_ = counts.most_common(1)
        oldest = next(pending for pending in self._pending.values() if pending.address == crowd)
        is_crowded = most > counts[newcomer.address] + 1
        if not is_crowded and newcomer.since - oldest.since < self._timings.pending_s:
            return False
        self._reject(oldest.socket, "did not authenticate while others came")
        return True

    def _receive(self, pending: _PendingConnection) -> None:
        if pending.socket not in self._pending:
            return  # sent away by another handler since select() returned
        try:
            data = pending.socket.recv(HELLO.size - len(pending.received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._reject(pending.socket, self._why_left(pending.received))
        pending.received += data
        if len(pending.received) == HELLO.size:
            self._decide(pending)

    def _why_left(self, received: bytes) -> str:
        """None of this is authenticated: a stranger could send the same."""
        if len(received) == len(self._credentials.fingerprint()):
            return "is of another launch: its launch id, or its number of ranks, is another"
        return "left in the middle of the handshake: a rank that was ended, or a stranger"

    def _decide(self, pending: _PendingConnection) -> None:
        rank, turn, encrypts, purpose, token, process, nonce, mac = HELLO.unpack(pending.received)
        message, own_nonce = pending.received[:-MAC_NBYTES], pending.exchange.nonce
        expected = self._credentials.mac(b"client", message, own_nonce)
        if not hmac.compare_digest(mac, expected) or rank >= self._credentials.world_size:
            self._send(pending.socket, WELCOME.pack(Answer.REJECTED, b"", bytes(MAC_NBYTES)))
            return self._reject(pending.socket, "does not know the launch secret")
        hello = Hello(rank, purpose, turn, token, _text(process), encrypts)
        answer, name = Answer.OTHER_ENCRYPTION, ""
        if encrypts == self._credentials.encrypts:
            answer, name = self._authorize(hello)
        else:
            self._on_other_encryption(hello)
        welcome = _welcome(answer, name.encode(errors="replace")[:NAME_NBYTES])
        server_mac = self._credentials.mac(b"server", welcome, mac + own_nonce)
        is_sent = self._send(pending.socket, welcome + server_mac)
        if not is_sent or answer != Answer.ACCEPTED:
            return self._drop(pending.socket)
        del self._pending[pending.socket]
        self._selector.unregister(pending.socket)
        encrypted = pending.exchange.encrypted(pending.socket, nonce, is_client=False)
        self._on_accepted(linux.closed_in_children(encrypted), hello)

    def _send(self, connection: socket.socket, data: bytes) -> bool:
        try:
            return connection.send(data) == len(data)  # less than any socket buffer
        except OSError:
            return False

    def _reject(self, connection: socket.socket, why: str) -> None:
        """Send a connection away; the first is worth a line in the log."""
        self._num_rejected += 1
        level = logging.WARNING if self._num_rejected == 1 else logging.DEBUG
        launch_id, address = self._credentials.launch_id, _peer_address(connection)
        log.log(level, "launch %s: a connection from %s %s", launch_id, address, why)
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        """Close a connection: a pending one, or one that could not be handed on."""
        if self._pending.pop(connection, None) is not None:
            self._selector.unregister(connection)
        connection.close()


def _peer_address(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "disconnected"
