"""Who may come in: both ends of a connection prove that they know the launch secret.

    server -> client   magic, version, fingerprint of the launch, nonce
    client -> server   rank, turn, purpose, token and name of the process, nonce, MAC over all of it
    server -> client   verdict, name of the process that is this rank already, MAC

Fresh nonces from both ends make a recorded answer worthless, and the name of the end inside the MAC
makes it worthless to send one back. All messages have a fixed size, so that nothing a stranger
says is ever parsed. The token tells two processes apart that both claim to be one rank.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.control.framing import Link, LinkBroken, nothing

MAGIC = b"drumline"
VERSION = 2
GREETING = struct.Struct("!8sH16s32s")  # magic, version, fingerprint, nonce
NAME_NBYTES = 96
HELLO = struct.Struct(f"!II32s8s{NAME_NBYTES}s32s32s")  # Caller's fields, nonce, MAC
WELCOME = struct.Struct(f"!B{NAME_NBYTES}s32s")  # verdict, name, MAC
ADMITTED, NOT_NOW, REFUSED, TAKEN = 0, 1, 2, 3

HANDSHAKE_S = 10.0
FULL_S = 0.01  # before we try again to accept, where no descriptors are left
MAX_VISITORS = 128  # who have not proved anything, or as many as may come; the oldest goes first

log = logging.getLogger("coordinator")


@dataclass(frozen=True)
class Proof:
    """What both ends must agree on."""

    secret: bytes
    launch_id: str
    world_size: int

    def fingerprint(self) -> bytes:
        """Tells an honest client that it came to the wrong launch; nothing of the secret."""
        return hashlib.sha256(self._context()).digest()[:16]

    def mac(self, end: bytes, said: bytes, nonces: bytes) -> bytes:
        """said: all that this end says but the MAC itself, and of the client's words their MAC."""
        return hmac.digest(self.secret, end + self._context() + said + nonces, "sha256")

    def _context(self) -> bytes:
        name = self.launch_id.encode()
        return struct.pack("!8sHQI", MAGIC, VERSION, self.world_size, len(name)) + name


class NotAdmitted(Exception):
    """The other end will not have us, and asking again will not change that."""


class TryAgain(Exception):
    """The other end is not there yet, or about to go."""


def purpose_of(text: str) -> bytes:
    """What a connection is for, in the size the handshake has for it."""
    return hashlib.sha256(text.encode()).digest()


HUB = purpose_of("hub")


@dataclass(frozen=True)
class Caller:
    """Who comes, what for, and to which turn: how many Coordinators the rank had made before.

    token, who: of its process, for one rank to be one process, and for an error to name it.
    """

    rank: int
    purpose: bytes
    turn: int = 0
    token: bytes = bytes(8)
    who: str = ""

    def fields(self) -> tuple[int, int, bytes, bytes, bytes]:
        return self.rank, self.turn, self.purpose, self.token, self.who.encode()[:NAME_NBYTES]


def knock(
    link: Link,
    proof: Proof,
    caller: Caller,
    deadline: float,
    idle: Callable[[], None] = nothing,
) -> None:
    """The client's side. Raises TryAgain or NotAdmitted. idle as in Link."""
    try:
        greeting = link.read_exactly(GREETING.size, deadline, idle)
        magic, version, fingerprint, theirs = GREETING.unpack(greeting)
        _check_greeting(magic, version, fingerprint == proof.fingerprint())
        mine = secrets.token_bytes(32)
        said = HELLO.pack(*caller.fields(), mine, bytes(32))[:-32]
        mac = proof.mac(b"client", said, theirs)
        link.write(said + mac, deadline)
        welcome = link.read_exactly(WELCOME.size, deadline, idle)
        verdict, name, answer = WELCOME.unpack(welcome)
    except LinkBroken as error:
        raise TryAgain(f"what listens there has not answered as rank 0 does: {error}") from error
    if verdict == REFUSED:
        raise NotAdmitted("it refused the launch secret of this rank")
    if not hmac.compare_digest(answer, proof.mac(b"server", _told(verdict, name), mac + theirs)):
        raise NotAdmitted("it does not know the launch secret, so it is not ours")
    if verdict == NOT_NOW:
        raise TryAgain("it is not this rank's turn")
    if verdict == TAKEN:
        raise NotAdmitted(f"{_text(name)} is rank {caller.rank} already, and this is {caller.who}")


def _told(verdict: int, name: bytes) -> bytes:
    return WELCOME.pack(verdict, name, bytes(32))[:-32]


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")


def _check_greeting(magic: bytes, version: int, is_same_launch: bool) -> None:
    if magic != MAGIC:
        raise NotAdmitted("something else listens there")
    if version != VERSION:
        raise NotAdmitted(f"it speaks protocol {version}, not {VERSION}: install one version")
    if not is_same_launch:
        raise NotAdmitted("it belongs to another launch, or to one of another world size")


@dataclass(frozen=True)
class Handler:
    """Callbacks of one socket in a selector. on_error closes a connection that on_ready failed on;
    a socket that must stay open does nothing then."""

    on_ready: Callable[[int], None]
    on_error: Callable[[], None] = nothing


@dataclass
class _Visitor:
    """A connection that has proved nothing yet."""

    link: socket.socket
    nonce: bytes
    since: float
    heard: bytes = b""


class Gate:
    """Watches a listening socket within somebody's selector, and hands on who has proved itself.

    All that is registered with the selector is a Handler, and whoever selects calls handle().

    on_admitted(connection, caller) decides what becomes of it.
    judge(caller): ADMITTED, NOT_NOW, REFUSED, or TAKEN and by whom.
    most: so many strangers may wait.
    """

    def __init__(
        self,
        listener: socket.socket,
        proof: Proof,
        selector: selectors.BaseSelector,
        on_admitted: Callable[[socket.socket, Caller], None],
        judge: Callable[[Caller], tuple[int, str]] = lambda _: (ADMITTED, ""),
        most: int = MAX_VISITORS,
    ) -> None:
        self._listener, self._proof, self._selector = listener, proof, selector
        self._on_admitted, self._verdict_on, self._most = on_admitted, judge, most
        self._visitors: dict[socket.socket, _Visitor] = {}  # the oldest first
        self._refused = 0
        self._errors = 0
        self._is_full = False  # there were no descriptors left but for those who may stay
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, Handler(self._accept))

    def close(self) -> None:
        """Forget the visitors. The listening socket stays its owner's."""
        self._selector.unregister(self._listener)
        for link in list(self._visitors):
            self._drop(link)

    def drop(self) -> None:
        """In a forked child: close the connections, which leaves those of the parent alone."""
        for link in self._visitors:
            link.close()

    def handle(self, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
        """Call the handlers of what select() returned; an error ends that one connection alone."""
        for key, events in ready:
            try:
                key.data.on_ready(events)
            except Exception as error:
                self._log_error(error)
                key.data.on_error()

    def _log_error(self, error: Exception) -> None:
        """Log the first with its traceback; a stranger may be able to repeat it."""
        self._errors += 1
        log.log(
            logging.ERROR if self._errors == 1 else logging.DEBUG,
            "launch %s: a connection failed and was given up: %r. All others are served as before, "
            "but this is a defect of drumline: report it with this traceback.",
            self._proof.launch_id,
            error,
            exc_info=error,
        )

    def tick(self) -> None:
        """To be called now and then: who takes too long is sent away."""
        late = time.monotonic() - HANDSHAKE_S
        for visitor in list(self._visitors.values()):
            if visitor.since > late:
                break
            self._refuse(visitor.link, "said too little in time")

    def _accept(self, _: int) -> None:
        for _ in range(16):  # and then let the admitted have their turn
            try:
                link, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptors left, or the visitor is gone again
                self._could_not_accept(error)
                return
            try:
                self._greet(link)
            except Exception:
                self._drop(link)
                raise

    def _could_not_accept(self, error: OSError) -> None:
        level = logging.DEBUG if self._visitors or self._is_full else logging.WARNING
        log.log(level, "rank 0 could not accept a connection: %s", error)
        self._is_full = self._is_full or not self._visitors
        if not self._visitors:
            time.sleep(FULL_S)
        self._make_room(len(self._visitors) // 2)

    def _greet(self, link: socket.socket) -> None:
        self._make_room(self._most - 1)
        visitor = _Visitor(link, secrets.token_bytes(32), time.monotonic())
        link.setblocking(False)
        handler = Handler(lambda _: self._hear(visitor), lambda: self._drop(link))
        self._selector.register(link, selectors.EVENT_READ, handler)
        self._visitors[link] = visitor
        greeting = GREETING.pack(MAGIC, VERSION, self._proof.fingerprint(), visitor.nonce)
        self._say(link, greeting)

    def _make_room(self, most: int) -> None:
        while len(self._visitors) > most:
            self._refuse(next(iter(self._visitors)), "waited while others came")

    def _hear(self, visitor: _Visitor) -> None:
        if visitor.link not in self._visitors:
            return  # sent away by another handler since select() returned
        try:
            data = visitor.link.recv(HELLO.size - len(visitor.heard))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._refuse(visitor.link, "left in the middle of the handshake")
        visitor.heard += data
        if len(visitor.heard) == HELLO.size:
            self._judge(visitor)

    def _judge(self, visitor: _Visitor) -> None:
        rank, turn, purpose, token, who, _, mac = HELLO.unpack(visitor.heard)
        expected = self._proof.mac(b"client", visitor.heard[:-32], visitor.nonce)
        if not hmac.compare_digest(mac, expected) or rank >= self._proof.world_size:
            self._say(visitor.link, WELCOME.pack(REFUSED, b"", bytes(32)))
            return self._refuse(visitor.link, "does not know the launch secret")
        caller = Caller(rank, purpose, turn, token, _text(who))
        verdict, name = self._verdict_on(caller)
        told = _told(verdict, name.encode()[:NAME_NBYTES])
        answer = self._proof.mac(b"server", told, mac + visitor.nonce)
        if not self._say(visitor.link, told + answer) or verdict != ADMITTED:
            return self._drop(visitor.link)
        del self._visitors[visitor.link]
        self._selector.unregister(visitor.link)
        self._on_admitted(visitor.link, caller)

    def _say(self, link: socket.socket, data: bytes) -> bool:
        try:
            return link.send(data) == len(data)  # less than any socket buffer
        except OSError:
            return False

    def _refuse(self, link: socket.socket, why: str) -> None:
        """Send a stranger away; the first is worth a line in the log."""
        self._refused += 1
        level = logging.WARNING if self._refused == 1 else logging.DEBUG
        log.log(level, "launch %s: a stranger %s (%s)", self._proof.launch_id, why, _name(link))
        self._drop(link)

    def _drop(self, link: socket.socket) -> None:
        """Close a connection: a visitor's, or one that could not be handed on."""
        if self._visitors.pop(link, None) is not None:
            self._selector.unregister(link)
        link.close()


def _name(link: socket.socket) -> str:
    try:
        return str(link.getpeername()[0])
    except OSError:
        return "gone"
