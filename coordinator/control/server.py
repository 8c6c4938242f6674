"""What rank 0 serves to the others: a key-value store, meetings, and news of who is lost.

One thread, one address, and only those whom the Gate has let in. It carries small things at the
start and when something fails; what ranks send each other otherwise goes between them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import selectors
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coordinator.control.framing import LENGTH, MAX_NBYTES, Late, pack, unpack
from coordinator.control.handshake import (
    ADMITTED,
    HUB,
    MAX_VISITORS,
    NOT_NOW,
    REFUSED,
    TAKEN,
    Caller,
    Gate,
    Handler,
    Proof,
)
from coordinator.control.tables import LATER, LEFT, SUSPENDED, Meetings, Values
from coordinator.errors import CoordinatorError

TICK_S = 0.5
SILENT_S = 1.5  # then its host is asked whether it still answers
RECEIVE_NBYTES = 1 << 18
ACKNOWLEDGED_S = 0.5  # within which the other kernel confirms what it has got
RESERVE = 16  # descriptors that neither ranks nor strangers may use up
MIN_VISITORS = 4
PING = (0, None)  # an answer nobody waits for: what counts is whether the other kernel takes it
# What asking for nonsense raises
SENSELESS = (ValueError, TypeError, KeyError, AttributeError, OverflowError)

log = logging.getLogger("coordinator")


@dataclass
class _Member:
    """One connection of a rank."""

    link: socket.socket
    rank: int
    heard: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    asked: int = 0  # the number of the request that waits for its answer


class _Asker(NamedTuple):
    """Who asks, and the number of the request; rank 0 itself needs no connection."""

    rank: int
    member: _Member | None = None
    number: int = 0


@dataclass
class _Rank:
    token: bytes = b""  # of the process that is this rank
    who: str = ""
    links: set[int] = field(default_factory=set)
    beat_at: float = 0.0
    asked_at: float = 0.0
    rows: Any = None
    stopped: list[int] = field(default_factory=list)  # neighbours it sees stopped
    lost_at: float = 0.0


class Hub:
    """Serves on a listening socket, which it owns, until everybody has left."""

    def __init__(self, listener: socket.socket, proof: Proof) -> None:
        self.address: tuple[Any, ...] = listener.getsockname()
        self._listener = listener
        self._closing = threading.Event()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._state = threading.Lock()  # of all below: rank 0 asks without a connection
        self._ending = False
        self._turn = 0
        self._members: dict[int, _Member] = {}
        self._ranks: dict[int, _Rank] = {}
        self._news: list[tuple[str, Any]] = []
        self._operations = self._made_operations()
        self._poked, self._poke = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._poked, selectors.EVENT_READ, Handler(self._drain))
        most = _room_for_strangers(proof.world_size)
        self._gate = Gate(listener, proof, self._selector, self._admit, self._judge, most)
        self._thread = threading.Thread(target=self._serve, name="drumline-hub", daemon=True)
        self._thread.start()

    def _made_operations(self) -> dict[str, Callable[..., Any]]:
        """What can be asked for: each is called with who asks, and the arguments."""
        values: Values[_Asker] = Values(self._answer)
        meetings: Meetings[_Asker] = Meetings(self._answer_alike)
        own = (self._beat, self._report, self._census, self._names)
        theirs = (values.set, values.get, values.wait, values.add, values.swap, values.delete)
        every = (*own, *theirs, values.count, meetings.meet, meetings.came)
        return {operation.__name__.lstrip("_"): operation for operation in every}

    # ---- from rank 0's own threads ----

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def ask(self, op: str, *arguments: Any, timeout_s: float) -> Any:
        """What a connection would bring, for rank 0 itself; LATER if that takes others."""
        if not self._state.acquire(timeout=timeout_s):
            raise Late("rank 0 is busy")
        try:
            return self._operations[op](_Asker(0), *arguments)
        except SENSELESS as error:
            raise CoordinatorError(_senseless(0, op, error)) from error
        finally:
            self._state.release()

    def open(self, turn: int) -> bool:
        """Take in ranks that have come to this turn, until begin_closing(). False if it is over."""
        with self._lock:
            self._turn = turn
            self._closing.clear()
            is_open = not self._ending
        if not is_open:
            self._over.wait()
        return is_open

    def begin_closing(self) -> None:
        """Take no new ranks in, and end once those that are there have left."""
        self._closing.set()
        try:
            self._poke.send(b".")
        except OSError:
            pass  # it has ended already

    def wait(self, timeout_s: float) -> bool:
        return self._over.wait(timeout_s)

    def present(self) -> list[int]:
        """Ranks that have not left."""
        return sorted(rank for rank, known in list(self._ranks.items()) if known.links)

    def drop(self) -> None:
        """In a forked child: close the descriptors, which leaves those of the parent alone."""
        for member in self._members.values():
            member.link.close()
        self._gate.drop()
        for each in (self._listener, self._poked, self._poke):
            each.close()
        self._selector.close()

    # ---- the thread ----

    def _serve(self) -> None:
        tick_at = 0.0
        try:
            while not self._is_to_end():
                events = self._selector.select(TICK_S)
                with self._state:
                    self._gate.handle(events)
                    if time.monotonic() >= tick_at:
                        tick_at = time.monotonic() + TICK_S
                        self._gate.tick()
                        self._look_after_silent()
        finally:
            self._end()
            self._over.set()

    def _is_to_end(self) -> bool:
        with self._lock:
            self._ending = self._closing.is_set() and not self._members
            return self._ending

    def _end(self) -> None:
        for number in list(self._members):
            self._part(number)
        self._gate.close()
        for each in (self._listener, self._poked, self._poke):
            each.close()
        self._selector.close()

    def _drain(self, _: int) -> None:
        self._poked.recv(64)

    def _judge(self, caller: Caller) -> tuple[int, str]:
        """Who is ahead of rank 0 waits: this hub may be about to end."""
        if caller.purpose != HUB:
            return REFUSED, ""
        known = self._ranks.get(caller.rank)
        if known is not None and known.links:
            return (ADMITTED, "") if known.token == caller.token else (TAKEN, known.who)
        is_open = caller.turn <= self._turn and not self._closing.is_set()
        return (ADMITTED if is_open else NOT_NOW), ""

    def _admit(self, link: socket.socket, caller: Caller) -> None:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        member = _Member(link, caller.rank)
        number = link.fileno()
        handler = Handler(lambda events: self._on(member, events), lambda: self._lose(member))
        self._selector.register(link, selectors.EVENT_READ, handler)
        self._members[number] = member
        known = self._ranks.setdefault(caller.rank, _Rank())
        known.token, known.who = caller.token, caller.who
        known.links.add(number)
        known.lost_at, known.beat_at = 0.0, time.monotonic()

    def _on(self, member: _Member, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(member)
            if events & selectors.EVENT_READ and not self._hear(member):
                self._lose(member)
        except OSError:
            self._lose(member)
        except SENSELESS as error:
            log.error("rank %d said what is no request: %r", member.rank, error)
            self._lose(member)

    def _hear(self, member: _Member) -> bool:
        """Take in what has come; False at the end of the connection."""
        try:
            data = member.link.recv(RECEIVE_NBYTES)
        except BlockingIOError:
            return True
        member.heard += data
        while (message := _first_message(member.heard)) is not None:
            number, op, *arguments = message
            if op == "bye":
                self._part(member.link.fileno())
                return True
            self._do(member, number, op, arguments)
        return bool(data)

    def _do(self, member: _Member, number: int, op: str, arguments: Sequence[Any]) -> None:
        member.asked = number
        asker = _Asker(member.rank, member, number)
        try:
            found = self._operations[op](asker, *arguments)
            if found is not LATER:
                self._answer(asker, found)
        except SENSELESS as error:
            self._send(member, pack((number, None, _senseless(member.rank, op, error))))

    def _answer(self, asker: _Asker, value: Any) -> None:
        if asker.member is not None and asker.number == asker.member.asked:
            self._send(asker.member, pack((asker.number, value)))

    def _answer_alike(self, askers: Sequence[_Asker], value: Any) -> None:
        """Packed once for all of them."""
        packed = pack(value)
        for asker in askers:
            if asker.member is not None and asker.number == asker.member.asked:
                self._send(asker.member, b"\x92" + pack(asker.number) + packed)

    def _send(self, member: _Member, body: bytes) -> None:
        if member.link.fileno() < 0:
            return
        member.unsent += LENGTH.pack(len(body))
        member.unsent += body
        try:
            self._flush(member)
        except OSError:
            self._lose(member)

    def _flush(self, member: _Member) -> None:
        try:
            while member.unsent:
                del member.unsent[: member.link.send(memoryview(member.unsent)[:RECEIVE_NBYTES])]
        except BlockingIOError:
            pass
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.unsent else 0)
        key = self._selector.get_key(member.link)
        if key.events != wanted:
            self._selector.modify(member.link, wanted, key.data)

    def _lose(self, member: _Member) -> None:
        """A connection ended without a word: if it was the rank's last, the rank is lost."""
        if member.link.fileno() < 0:
            return
        self._part(member.link.fileno())
        known = self._ranks[member.rank]
        if not known.links:
            known.lost_at = time.monotonic()
            self._news.append(("", member.rank))

    def _part(self, number: int) -> None:
        member = self._members.pop(number)
        self._ranks[member.rank].links.discard(number)
        self._selector.unregister(member.link)
        member.link.close()

    def _look_after_silent(self) -> None:
        """Send something to hosts that are silent: what counts is whether it is acknowledged."""
        now = time.monotonic()
        for known in self._ranks.values():
            is_silent = known.rows is not None and now - known.beat_at > SILENT_S
            if is_silent and now - known.asked_at > 2 * SILENT_S:
                known.asked_at = now
                for number in list(known.links):
                    self._send(self._members[number], pack(PING))

    def _is_cut_off(self, known: _Rank, now: float) -> bool:
        links = [self._members[number].link for number in known.links]
        return now - known.asked_at > ACKNOWLEDGED_S and any(map(_is_unacknowledged, links))

    # ---- operations, beside those of the ledger ----

    def _beat(self, asker: _Asker, since: int, rows: Any, stopped: list[int]) -> list[Any]:
        known = self._ranks[asker.rank]
        known.beat_at, known.rows, known.stopped = time.monotonic(), rows, stopped
        return self._news[since:]

    def _report(self, _: _Asker, group: str, verdict: bytes) -> None:
        if all(name != group for name, _ in self._news):
            self._news.append((group, verdict))

    def _names(self, _: _Asker, ranks: Sequence[int]) -> list[str]:
        """The process of each rank that has ever come, as it named itself."""
        return [self._ranks[rank].who for rank in ranks]

    def _census(self, _: _Asker) -> dict[int, Any]:
        """Of each rank: since its last beat, its rows, a note, since it was lost or left (-1: it is
        there), is it cut off."""
        now = time.monotonic()
        stopped = {rank for known in self._ranks.values() for rank in known.stopped}
        return {
            rank: (
                now - known.beat_at,
                known.rows,
                LEFT if not (known.links or known.lost_at) else SUSPENDED * (rank in stopped),
                now - known.lost_at if known.lost_at else -1.0,
                self._is_cut_off(known, now),
            )
            for rank, known in self._ranks.items()
        }


def _room_for_strangers(world_size: int) -> int:
    """How many who have proved nothing may wait, so that every rank still gets a descriptor.

    All ranks may come at once, and none of them is to be sent away for another.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = limit - len(os.listdir("/proc/self/fd")) - world_size - RESERVE
    if spare < MIN_VISITORS:
        raise CoordinatorError(
            f"rank 0 may open {limit} files, which is too few to serve {world_size} ranks: it "
            f"needs {MIN_VISITORS - spare} more. Raise the limit (`ulimit -n {limit * 4}`) where "
            "rank 0 is started."
        )
    return min(max(MAX_VISITORS, world_size), max(MIN_VISITORS, spare // 2))


def _senseless(rank: int, op: str, error: Exception) -> str:
    return f"rank {rank} asked rank 0 to {op} what it cannot: {error!r}"


def _first_message(heard: bytearray) -> Any:
    """The first whole message of what was heard, taken out of it; None if there is none yet."""
    if len(heard) < LENGTH.size:
        return None
    (nbytes,) = LENGTH.unpack_from(heard)
    if nbytes > MAX_NBYTES:
        raise OSError(f"a message of {nbytes} bytes")
    end = LENGTH.size + nbytes
    if len(heard) < end:
        return None
    message = unpack(heard[LENGTH.size : end])
    del heard[:end]
    return message


def _is_unacknowledged(link: socket.socket) -> bool:
    """Is something on the way that the other kernel has not acknowledged? tcp(7), SIOCOUTQ."""
    (nbytes,) = struct.unpack("i", fcntl.ioctl(link, termios.TIOCOUTQ, bytes(4)))
    return bool(nbytes)
