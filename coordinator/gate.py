"""Who may come in: both ends of a connection prove that they know the launch secret.

    server -> client   magic, version, fingerprint of the launch, nonce
    client -> server   rank, turn, purpose, nonce, MAC over all of it
    server -> client   verdict, MAC

Fresh nonces from both ends make a recorded answer worthless, and the name of the end inside the MAC
makes it worthless to send one back. All messages have a fixed size, so that nothing a stranger
says is ever parsed.
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
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.wire import Link, LinkBroken

MAGIC = b"drumline"
VERSION = 1
GREETING = struct.Struct("!8sH16s32s")  # magic, version, fingerprint, nonce
HELLO = struct.Struct("!II32s32s32s")  # rank, turn, purpose, nonce, MAC
WELCOME = struct.Struct("!B32s")  # verdict, MAC
ADMITTED, NOT_NOW, REFUSED = 0, 1, 2

HANDSHAKE_S = 10.0
MAX_VISITORS = 128  # of those who have not proved anything; the oldest goes first

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

    def mac(self, end: bytes, rank: int, turn: int, purpose: bytes, nonces: bytes) -> bytes:
        text = end + self._context() + struct.pack("!II32s", rank, turn, purpose) + nonces
        return hmac.digest(self.secret, text, "sha256")

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


@dataclass(frozen=True)
class Caller:
    """Who comes, what for, and to which turn: how many Coordinators the rank had made before."""

    rank: int
    purpose: bytes
    turn: int = 0


def knock(link: Link, proof: Proof, caller: Caller, deadline: float) -> None:
    """The client's side. Raises TryAgain or NotAdmitted."""
    who = (caller.rank, caller.turn, caller.purpose)
    try:
        greeting = link.read_exactly(GREETING.size, deadline)
        magic, version, fingerprint, theirs = GREETING.unpack(greeting)
        _check_greeting(magic, version, fingerprint == proof.fingerprint())
        mine = secrets.token_bytes(32)
        mac = proof.mac(b"client", *who, theirs + mine)
        link.write(HELLO.pack(*who, mine, mac), deadline)
        verdict, answer = WELCOME.unpack(link.read_exactly(WELCOME.size, deadline))
    except LinkBroken as error:
        raise TryAgain(str(error)) from error
    expected = proof.mac(b"server", *who, theirs + mine)
    if verdict == NOT_NOW:
        raise TryAgain("it is not this rank's turn")
    if verdict != ADMITTED:
        raise NotAdmitted("it refused the launch secret of this rank")
    if not hmac.compare_digest(answer, expected):
        raise NotAdmitted("it does not know the launch secret, so it is not ours")


def _check_greeting(magic: bytes, version: int, is_same_launch: bool) -> None:
    if magic != MAGIC:
        raise NotAdmitted("something else listens there")
    if version != VERSION:
        raise NotAdmitted(f"it speaks protocol {version}, not {VERSION}: install one version")
    if not is_same_launch:
        raise NotAdmitted("it belongs to another launch, or to one of another world size")


@dataclass
class _Visitor:
    """A connection that has proved nothing yet."""

    link: socket.socket
    nonce: bytes
    since: float
    heard: bytes = b""


class Gate:
    """Watches a listening socket within somebody's selector, and hands on who has proved itself.

    on_admitted(connection, caller) decides what becomes of it.
    is_open(caller): whether to admit it already.
    """

    def __init__(
        self,
        listener: socket.socket,
        proof: Proof,
        selector: selectors.BaseSelector,
        on_admitted: Callable[[socket.socket, Caller], None],
        is_open: Callable[[Caller], bool] = lambda _: True,
    ) -> None:
        self._listener, self._proof, self._selector = listener, proof, selector
        self._on_admitted, self._is_open = on_admitted, is_open
        self._visitors: dict[socket.socket, _Visitor] = {}  # the oldest first
        self._refused = 0
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Forget the visitors. The listening socket stays its owner's."""
        self._selector.unregister(self._listener)
        for link in list(self._visitors):
            self._drop(link)

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
                self._make_room(len(self._visitors) // 2)
                log.debug("a connection could not be accepted: %s", error)
                return
            self._greet(link)

    def _greet(self, link: socket.socket) -> None:
        self._make_room(MAX_VISITORS - 1)
        visitor = _Visitor(link, secrets.token_bytes(32), time.monotonic())
        self._visitors[link] = visitor
        link.setblocking(False)
        self._selector.register(link, selectors.EVENT_READ, lambda _: self._hear(visitor))
        greeting = GREETING.pack(MAGIC, VERSION, self._proof.fingerprint(), visitor.nonce)
        self._say(link, greeting)

    def _make_room(self, most: int) -> None:
        while len(self._visitors) > most:
            self._refuse(next(iter(self._visitors)), "waited while others came")

    def _hear(self, visitor: _Visitor) -> None:
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
        rank, turn, purpose, nonce, mac = HELLO.unpack(visitor.heard)
        nonces = visitor.nonce + nonce
        expected = self._proof.mac(b"client", rank, turn, purpose, nonces)
        if not hmac.compare_digest(mac, expected) or rank >= self._proof.world_size:
            self._say(visitor.link, WELCOME.pack(REFUSED, bytes(32)))
            return self._refuse(visitor.link, "does not know the launch secret")
        caller = Caller(rank, purpose, turn)
        verdict = ADMITTED if self._is_open(caller) else NOT_NOW
        answer = self._proof.mac(b"server", rank, turn, purpose, nonces)
        if not self._say(visitor.link, WELCOME.pack(verdict, answer)) or verdict == NOT_NOW:
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
        del self._visitors[link]
        self._selector.unregister(link)
        link.close()


def _name(link: socket.socket) -> str:
    try:
        return str(link.getpeername()[0])
    except OSError:
        return "gone"
