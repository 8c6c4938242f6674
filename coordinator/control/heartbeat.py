"""Heartbeats: one rank of each node tells rank 0 what its ranks do, and hears which have failed.

Ranks that share memory leave records for each other. The first of them that runs speaks to rank 0
for all, and leaves in its record what it has heard. When it dies or stops, the next one, which
looks at its process before each heartbeat, speaks instead.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import FileIO
from typing import Any, NamedTuple, Protocol

from coordinator.call_site import CallStatus
from coordinator.control.client import ServerLost
from coordinator.control.framing import pack, unpack
from coordinator.control.membership import MAX_FAILURES, NO_RANK
from coordinator.control.operations import Op
from coordinator.errors import CoordinatorError
from coordinator.peers import Peer
from coordinator.timings import CoordinatorTimings
from launcher import NoMessage, linux

NO_ANSWER = (ServerLost, NoMessage, CoordinatorError)  # rank 0 is gone, suspended, busy or cut off
CHECKSUM_NBYTES = 4  # before the record


class NodeRecord(NamedTuple):
    """The calls that a rank is in, and its news from rank 0.

    written_at: time.monotonic(). calls: the last one in each of its groups, by key. lost: ranks.
    failures: of groups of the node, packed, by key.
    """

    written_at: float
    calls: Mapping[str, CallStatus]
    lost: Sequence[int]
    failures: Mapping[str, bytes]


class OwnRecord:
    """The record of this rank, which the others of the node open as descriptor `fd` of it."""

    def __init__(self, name: str = "drumline-record") -> None:
        self._file = linux.closed_in_children(FileIO(os.memfd_create(name), "r+"))
        self.fd = self._file.fileno()
        self._lock = threading.Lock()

    def write(self, record: Any) -> None:
        body = pack(record)
        data = _checksum(body) + body
        with self._lock:
            if not self._file.closed:
                os.pwrite(self.fd, data, 0)
                os.ftruncate(self.fd, len(data))

    def close(self) -> None:
        """Let the others read nothing from now on."""
        with self._lock:
            if not self._file.closed:
                os.ftruncate(self.fd, 0)
                self._file.close()


class Neighbour:
    """Another rank of this node. fd: of its record, in its process."""

    def __init__(self, peer: Peer, fd: int) -> None:
        self.rank, self._peer = peer.rank, peer
        self.path = f"/proc/{peer.pid}/fd/{fd}"
        self._file: FileIO | None = None
        self._latest: tuple[bytes, NodeRecord | None] = (b"", None)

    def read(self) -> NodeRecord | None:
        """The latest record; None before the first, and once the rank has left."""
        try:
            self._file = self._file or linux.closed_in_children(FileIO(self.path))
            fd = self._file.fileno()
            data = os.pread(fd, os.fstat(fd).st_size, 0)
        except (OSError, ValueError):  # it ended before the first look, or this rank leaves
            return None
        latest, record = self._latest
        if data != latest and (not data or is_whole(data)):
            record = NodeRecord(*unpack(data[CHECKSUM_NBYTES:])) if data else None
            self._latest = data, record
        return record

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def is_suspended(self) -> bool:
        stat = linux.process_stat(self._peer.pid)
        return stat is not None and stat.is_stopped

    def runs(self, now: float, fresh_s: float, master: int = 0) -> bool:
        """True unless its process has ended or is stopped, it has written nothing for so long, or
        it can no longer reach the rank `master`, which serves."""
        record = self.read()
        if record is None or now - record.written_at > fresh_s or master in record.lost:
            return False
        return not self.is_suspended() and not self._peer.is_known_dead()


def _checksum(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(CHECKSUM_NBYTES, "little")


def is_whole(data: bytes) -> bool:
    """False where it was being written."""
    return data[:CHECKSUM_NBYTES] == _checksum(data[CHECKSUM_NBYTES:])


class GroupStatus(Protocol):
    """A group of this rank, as its heartbeats report it."""

    key: str

    def call_status(self) -> CallStatus: ...


# Seconds since it was last heard from, whether it is suspended, and its calls
RankState = tuple[float, bool, Mapping[str, CallStatus]]


class Heartbeat:
    """Reports of this rank to rank 0, for itself or for its node, and the news in return.

    ask: as Session.ask. lost: ranks of the launch whose connections to rank 0 broke, and when this
    rank heard of it. group_failures: packed GroupFailures by key of the group. view: called after
    each heartbeat with the seconds for which viewers look, and the limit of a question to rank 0.
    """

    def __init__(
        self, rank: int, ask: Callable[..., Any], timings: CoordinatorTimings, master: int = 0
    ) -> None:
        self._rank, self._ask, self.timings, self._master = rank, ask, timings, master
        self.lost: dict[int, float] = {}
        self.group_failures: dict[str, bytes] = {}
        self.groups: dict[str, GroupStatus] = {}
        self._num_lost = 0  # that rank 0 has told this rank
        self._viewed_s = 0.0  # for which viewers look, as rank 0 says to who speaks
        self._asking = threading.Lock()
        self._own: OwnRecord | None = None
        self._written_at = 0.0
        self._neighbours: Sequence[Neighbour] = ()
        self._num_before = 0  # of them, that speak before this rank
        self._speaker: Neighbour | None = None  # unless this rank speaks
        self._groups_of_node: set[str] = set()  # known to the speaker
        self.view: Callable[[float, float], None] = lambda viewed_s, limit_s: None
        self._thread: threading.Thread | None = None
        self._is_due, self._is_closed = threading.Event(), False

    def start(self, after_each: Callable[[], None]) -> None:
        """Begin to send heartbeats, on a thread."""
        if self._thread is None:
            self._own = OwnRecord()
            self._thread = threading.Thread(
                target=self._run, args=[after_each], name="drumline-heartbeat", daemon=True
            )
            self._thread.start()

    @property
    def _fresh_s(self) -> float:
        """For which a record stands for a rank that runs."""
        return 2 * self.timings.heartbeat_s

    @property
    def record_fd(self) -> int:
        """The descriptor of this rank's record; -1 if it sends no heartbeats."""
        return self._own.fd if self._own is not None else -1

    def set_node(self, before: Iterable[Neighbour], after: Iterable[Neighbour]) -> None:
        """Take part in one node's heartbeats with the ranks before and after this one."""
        before = list(before)
        self._neighbours, self._num_before = [*before, *after], len(before)
        self._write()

    def set_timings(self, timings: CoordinatorTimings) -> None:
        if timings != self.timings:
            self.timings = timings
            self._is_due.set()

    def close(self) -> None:
        """A heartbeat on its way is given up first: if the process ended with its connection open,
        that would look like a death."""
        self._is_closed = True
        self._is_due.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self.timings.answer_s)
        for neighbour in self._neighbours:
            neighbour.close()
        if self._own is not None:
            self._own.close()

    # ---- with rank 0 ----

    def _run(self, after_each: Callable[[], None]) -> None:
        # At once, or a rank that is cut off at once would look like one that never came.
        while not self._is_closed:
            self._beat()
            after_each()
            self.view(self._viewed_s, self.timings.answer_s)
            self._is_due.wait(self.timings.heartbeat_s)
            self._is_due.clear()

    def _beat(self) -> None:
        now, before = time.monotonic(), self._neighbours[: self._num_before]
        self._viewed_s = 0.0
        self._speaker = next(
            (rank for rank in before if rank.runs(now, self._fresh_s, self._master)), None
        )
        self._write()
        if self._speaker is None:
            self._speak(now)
        else:
            self.sync()

    def _speak(self, now: float) -> None:
        states = {self._rank: self._own_state()}
        for neighbour in self._neighbours:
            record = neighbour.read()
            if record is not None:
                age_s = now - record.written_at
                age_s = 0.0 if age_s < self._fresh_s else age_s
                states[neighbour.rank] = age_s, neighbour.is_suspended(), record.calls
        self._groups_of_node = {key for _, _, calls in states.values() for key in calls}
        self._exchange(states, self._groups_of_node, self.timings.answer_s)
        self._write()

    def refresh(self, timeout_s: float | None = None, joining: str = "") -> None:
        """Ask rank 0 at once. joining: the key of a group that is not among this rank's yet."""
        limit_s = self.timings.answer_s if timeout_s is None else timeout_s
        groups = {*self.groups, joining} - {""}
        self._exchange({self._rank: self._own_state()}, groups, limit_s)

    def _exchange(
        self, states: Mapping[int, RankState], groups: Iterable[str], limit_s: float
    ) -> None:
        """Tell rank 0 the states of these ranks; hear of lost ranks, and failures of the groups."""
        deadline = time.monotonic() + limit_s
        if not self._asking.acquire(timeout=limit_s):
            return  # another thread waits for rank 0 already
        try:
            unknown = [key for key in groups if key not in self.group_failures]
            left_s = max(deadline - time.monotonic(), 0.0)
            lost, failures, self._viewed_s = self._ask(
                Op.HEARTBEAT, self._num_lost, unknown, states, timeout_s=left_s
            )
            self._num_lost += len(lost)
            self._hear([rank for rank in lost if rank != NO_RANK], failures)
        except NO_ANSWER:
            return  # the deadlines decide
        finally:
            self._asking.release()

    def _hear(self, lost: Sequence[int], failures: Mapping[str, bytes]) -> None:
        for rank in lost:
            self.lost.setdefault(rank, time.monotonic())
        for key, failure in failures.items():
            self.group_failures.setdefault(key, failure)
        surplus = len(self.group_failures) - MAX_FAILURES
        for key in list(self.group_failures)[: max(surplus, 0)]:
            if key not in self.groups:
                del self.group_failures[key]

    def _own_state(self) -> RankState:
        return 0.0, False, self._calls()

    def _calls(self) -> dict[str, CallStatus]:
        return {group.key: group.call_status() for group in list(self.groups.values())}

    # ---- with the node ----

    def sync(self) -> None:
        """Show the others of the node what this rank does now, and hear what their speaker has
        heard. Any thread may, as often as it looks at failures."""
        if not self._neighbours or self._is_closed:
            return
        if time.monotonic() - self._written_at > self.timings.idle_s:
            self._write()
        record = self._speaker.read() if self._speaker is not None else None
        if record is not None:
            own = {key: why for key, why in record.failures.items() if key in self.groups}
            self._hear([rank for rank in record.lost if rank != self._master], own)
            if self._master in record.lost and self._master not in self.lost:
                self.refresh()  # to see for itself: it may be a connection of the speaker's alone

    def _write(self) -> None:
        if self._own is None or not self._neighbours:
            return
        self._written_at = time.monotonic()
        failures = {
            key: self.group_failures[key]
            for key in self._groups_of_node
            if key in self.group_failures
        }
        record = NodeRecord(self._written_at, self._calls(), list(self.lost), failures)
        self._own.write(record)
