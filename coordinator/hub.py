"""What rank 0 serves to the others: a key-value store, meetings, and news of who is lost.

One thread, one address, and only those whom the Gate has let in. It carries small things at the
start and when something fails; what ranks send each other otherwise goes between them.
"""

from __future__ import annotations

import fcntl
import logging
import selectors
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from coordinator.gate import Caller, Gate, Proof
from coordinator.wire import LENGTH, MAX_NBYTES, pack, unpack

TICK_S = 0.5
SILENT_S = 1.5  # then its host is asked whether it still answers
RECEIVE_NBYTES = 1 << 18
ANSWER_S = 0.5  # for an acknowledgement
PING = (0, None)  # an answer nobody waits for: what counts is whether the other kernel takes it
LATER = object()  # the answer comes when somebody else has spoken


log = logging.getLogger("coordinator")


@dataclass
class _Member:
    """One connection of a rank."""

    link: socket.socket
    rank: int
    heard: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    asked: int = 0  # the number of the request that waits for its answer


@dataclass
class _Meeting:
    """Ranks that give something each and go on once they have what everybody gave."""

    size: int
    given: dict[int, bytes] = field(default_factory=dict)
    waiting: list[tuple[_Member, int]] = field(default_factory=list)


@dataclass
class _Rank:
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
        self._ending = False
        self._poked, self._poke = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._poked, selectors.EVENT_READ, self._drain)
        self._turn = 0
        self._gate = Gate(listener, proof, self._selector, self._admit, self._is_open)
        self._members: dict[int, _Member] = {}
        self._ranks: dict[int, _Rank] = {}
        self._values: dict[str, bytes] = {}
        self._wanted: dict[str, list[tuple[_Member, int, list[str]]]] = {}
        self._meetings: dict[str, _Meeting] = {}
        self._news: list[tuple[str, Any]] = []
        self._thread = threading.Thread(target=self._serve, name="drumline-hub", daemon=True)
        self._thread.start()

    # ---- from rank 0's own threads ----

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

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

    # ---- the thread ----

    def _serve(self) -> None:
        try:
            while not self._is_to_end():
                for key, events in self._selector.select(TICK_S):
                    key.data(events)
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

    def _is_open(self, caller: Caller) -> bool:
        """Who is ahead of rank 0 waits: this hub may be about to end."""
        known = self._ranks.get(caller.rank)
        is_here = known is not None and bool(known.links)
        return is_here or (caller.turn <= self._turn and not self._closing.is_set())

    def _admit(self, link: socket.socket, caller: Caller) -> None:
        rank = caller.rank
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        member = _Member(link, rank)
        number = link.fileno()
        self._members[number] = member
        known = self._ranks.setdefault(rank, _Rank())
        known.links.add(number)
        known.lost_at, known.beat_at = 0.0, time.monotonic()
        self._selector.register(link, selectors.EVENT_READ, lambda events: self._on(member, events))

    def _on(self, member: _Member, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(member)
            if events & selectors.EVENT_READ and not self._hear(member):
                self._lose(member)
        except OSError:
            self._lose(member)
        except (ValueError, TypeError, KeyError) as error:  # what it asks makes no sense
            log.error("rank %d asked for what rank 0 cannot do: %r", member.rank, error)
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
            member.asked = number
            if op == "bye":
                self._part(member.link.fileno())
                return True
            answer = self._operations[op](self, member, *arguments)
            if answer is not LATER:
                self._answer(member, number, answer)
        return bool(data)

    def _answer(self, member: _Member, number: int, value: Any) -> None:
        self._send(member, pack((number, value)))

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
        return now - known.asked_at > ANSWER_S and any(map(_is_unacknowledged, links))

    # ---- operations ----

    def _set(self, _: _Member, key: str, value: bytes) -> None:
        self._values[key] = value
        for member, number, keys in self._wanted.pop(key, []):
            self._want(member, number, keys)

    def _get(self, _: _Member, key: str) -> bytes | None:
        return self._values.get(key)

    def _await(self, member: _Member, keys: list[str]) -> Any:
        return self._want(member, member.asked, keys, at_once=True)

    def _want(self, member: _Member, number: int, keys: list[str], at_once: bool = False) -> Any:
        missing = next((key for key in keys if key not in self._values), None)
        if missing is not None:
            self._wanted.setdefault(missing, []).append((member, number, keys))
            return LATER
        found = [self._values[key] for key in keys]
        if at_once:
            return found
        if number == member.asked:
            self._answer(member, number, found)
        return None

    def _add(self, member: _Member, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._set(member, key, str(total).encode())
        return total

    def _swap(self, member: _Member, key: str, expected: bytes, value: bytes) -> bytes:
        """As torch's Store.compare_set: an empty expectation is that there is no value."""
        there = self._values.get(key)
        if there is None and expected:
            return expected
        if (there or b"") == expected:
            self._set(member, key, value)
            return value
        return there or b""

    def _delete(self, _: _Member, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _count(self, _: _Member, prefix: str) -> int:
        return sum(key.startswith(prefix) for key in self._values)

    def _meet(self, member: _Member, key: str, place: int, size: int, data: bytes) -> Any:
        """Answered once `size` places have given their data, packed once for all of them."""
        meeting = self._meetings.setdefault(key, _Meeting(size))
        meeting.given[place] = data
        meeting.waiting.append((member, member.asked))
        if len(meeting.given) < size:
            return LATER
        del self._meetings[key]
        given = pack([meeting.given[place] for place in range(size)])
        for other, number in meeting.waiting:
            if number == other.asked:
                self._send(other, _answer_of(number, given))
        return LATER

    def _came(self, _: _Member, key: str) -> list[int]:
        meeting = self._meetings.get(key)
        return sorted(meeting.given) if meeting else []

    def _beat(self, member: _Member, since: int, rows: Any, stopped: list[int]) -> list[Any]:
        known = self._ranks[member.rank]
        known.beat_at, known.rows, known.stopped = time.monotonic(), rows, stopped
        return self._news[since:]

    def _report(self, _: _Member, group: str, verdict: bytes) -> None:
        if all(name != group for name, _ in self._news):
            self._news.append((group, verdict))

    def _census(self, _: _Member) -> dict[int, Any]:
        """Of each rank: since its last beat, its rows, a note, since it was lost, is it cut off."""
        now = time.monotonic()
        stopped = {rank for known in self._ranks.values() for rank in known.stopped}
        return {
            rank: (
                now - known.beat_at,
                known.rows,
                "stopped" if rank in stopped else "",
                now - known.lost_at if known.lost_at else -1.0,
                self._is_cut_off(known, now),
            )
            for rank, known in self._ranks.items()
        }

    _operations: ClassVar[dict[str, Callable[..., Any]]] = {
        "set": _set,
        "get": _get,
        "await": _await,
        "add": _add,
        "swap": _swap,
        "delete": _delete,
        "count": _count,
        "meet": _meet,
        "came": _came,
        "beat": _beat,
        "report": _report,
        "census": _census,
    }


def _first_message(heard: bytearray) -> Any:
    """The first whole message of what was heard, taken out of it; None if there is none yet."""
    if len(heard) < LENGTH.size:
        return None
    (nbytes,) = LENGTH.unpack(heard[: LENGTH.size])
    if nbytes > MAX_NBYTES:
        raise OSError(f"a message of {nbytes} bytes")
    end = LENGTH.size + nbytes
    if len(heard) < end:
        return None
    message = unpack(heard[LENGTH.size : end])
    del heard[:end]
    return message


def _answer_of(number: int, packed: bytes) -> bytes:
    """pack((number, value)) where value is packed already."""
    return b"\x92" + pack(number) + packed


def _is_unacknowledged(link: socket.socket) -> bool:
    """Is something on the way that the other kernel has not acknowledged? tcp(7), SIOCOUTQ."""
    (nbytes,) = struct.unpack("i", fcntl.ioctl(link, termios.TIOCOUTQ, bytes(4)))
    return bool(nbytes)
