"""Rank 0's control-plane server: a key-value store, rendezvous, heartbeats and membership.

One thread, one address, and only authenticated ranks. It carries small things at the start and
when something fails; all other data go directly between the ranks.
"""

from __future__ import annotations

import logging
import math
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from coordinator.control.framing import pack, pack_for_many, unpack
from coordinator.control.membership import Member, MembershipTable
from coordinator.control.operations import BAD_REQUEST, Op, check_arguments
from coordinator.control.tables import PENDING, KeyValueTable, RendezvousTable
from coordinator.errors import CoordinatorError
from coordinator.timings import DEFAULT, CoordinatorTimings
from launcher import (
    LENGTH,
    MAX_PENDING,
    Answer,
    AuthenticatedListener,
    Credentials,
    Handler,
    Hello,
    NoMessage,
    describe_encryption,
    link_state,
    linux,
    purpose_of,
)

RECEIVE_NBYTES = 1 << 16
MAX_REQUEST_NBYTES = 1 << 28  # and of an answer
MAX_UNREAD_NBYTES = 1 << 24  # of answers, after which no more requests of a connection are served
RESERVE = 16  # descriptors that neither ranks nor strangers may use up
MIN_PENDING = 4
CONTROL = purpose_of("control")
PING = (0, None)  # an answer nobody waits for: what counts is whether the other kernel takes it

log = logging.getLogger("coordinator")


@dataclass
class _RankConnection:
    """One connection of a rank.

    A rank that does not read its answers is not served until it does.
    """

    socket: socket.socket
    rank: int
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    request: int = 0  # the number of the request that waits for its answer
    events: int = selectors.EVENT_READ

    @property
    def is_open(self) -> bool:
        return self.socket.fileno() >= 0

    @property
    def is_served(self) -> bool:
        return self.is_open and len(self.unsent) <= MAX_UNREAD_NBYTES


class _Requester(NamedTuple):
    """The rank that asks, and the number of its request; rank 0 itself needs no connection."""

    rank: int
    connection: _RankConnection | None = None
    request: int = 0

    def has_given_up(self) -> bool:
        """True if it no longer waits for the answer to this request."""
        connection = self.connection
        return connection is None or not connection.is_open or connection.request != self.request


class ControlServer:
    """Serves on a listening socket, which it owns, until all ranks have left."""

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        timings: CoordinatorTimings = DEFAULT,
    ) -> None:
        self.address: tuple[Any, ...] = listener.getsockname()
        self._listener = listener
        self.timings = timings
        self._closing = threading.Event()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._state = threading.Lock()  # of all below: rank 0 asks without a connection
        self._ending = False
        self._turn = 0
        self._connections: dict[int, _RankConnection] = {}
        self._membership = MembershipTable(lambda: self.timings.ping_after_s, self._is_unreachable)
        self._values: KeyValueTable[_Requester] = KeyValueTable(self._answer)
        self._rendezvous: RendezvousTable[_Requester] = RendezvousTable(
            self._answer_all, self._add_group
        )
        self._operations = self._make_operations()
        self._woken, self._wakeup = socket.socketpair()
        self._refusal = ""  # why no rank can join any longer
        self._packed_unwell: dict[tuple[Any, ...], bytes] = {}  # by the question
        self._packed_at = -math.inf
        self._selector = selectors.DefaultSelector()
        for file in (listener, self._woken, self._wakeup, self._selector):
            linux.closed_in_children(file)
        self._selector.register(self._woken, selectors.EVENT_READ, Handler(self._on_wakeup))
        self._authenticator = AuthenticatedListener(
            listener,
            credentials,
            self._selector,
            self._add,
            self._authorize,
            _max_pending_connections(credentials.world_size),
            timings,
            self._refuse_all,
        )
        self._thread = threading.Thread(target=self._serve, name="drumline-server", daemon=True)
        self._thread.start()

    def _make_operations(self) -> dict[str, Callable[..., Any]]:
        """The functions of the operations: each is called with its requester and the arguments."""
        values, rendezvous, membership = self._values, self._rendezvous, self._membership
        return {
            Op.SET: values.set,
            Op.GET: values.get,
            Op.WAIT: values.wait,
            Op.ADD: values.add,
            Op.SWAP: values.swap,
            Op.DELETE: values.delete,
            Op.COUNT: values.count,
            Op.RENDEZVOUS: rendezvous.rendezvous,
            Op.NUMBER: rendezvous.number,
            Op.ARRIVED: rendezvous.arrived,
            Op.HEARTBEAT: lambda _, *heartbeat: membership.heartbeat(*heartbeat),
            Op.REPORT: lambda _, group, failure: membership.report(group, failure),
            Op.REPORTS: lambda _, ranks: membership.reports(ranks),
            Op.UNWELL: self._answer_unwell,
            Op.LOOK: lambda _, view_s: membership.look(view_s),
            Op.SHOW: lambda _, pages: membership.show(pages),
        }

    # ---- from rank 0's own threads ----

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def ask(self, op: str, *arguments: Any, timeout_s: float) -> Any:
        """Answer rank 0 itself without a connection; one of LOCAL_OPS."""
        if not self._state.acquire(timeout=timeout_s):
            raise NoMessage("rank 0 is busy")
        try:
            return self._operations[op](_Requester(0), *arguments)
        except BAD_REQUEST as error:
            raise CoordinatorError(_bad_request(0, op, error)) from error
        finally:
            self._state.release()

    def open(self, turn: int) -> bool:
        """Accept ranks that have come to this turn, until begin_closing(). False if it is over."""
        with self._lock:
            self._turn = turn
            self._closing.clear()
            is_open = not self._ending
        if not is_open:
            self._over.wait()
        return is_open

    def begin_closing(self) -> None:
        """Accept no new ranks, and end once all that are here have left."""
        self._closing.set()
        with suppress(OSError):  # it has ended already
            self._wakeup.send(b".")

    def wait(self, timeout_s: float, stuck: Mapping[int, float] = MappingProxyType({})) -> bool:
        """True if all ranks leave in time. stuck: ranks that may stay after these seconds."""
        start = time.monotonic()
        deadline = start + timeout_s
        while not self._over.wait(min(self.timings.idle_s, max(0.0, deadline - time.monotonic()))):
            waited_s = time.monotonic() - start
            if waited_s >= timeout_s:
                return False
            if stuck and all(stuck.get(rank, timeout_s) <= waited_s for rank in self.present()):
                return False
        return True

    def present(self) -> list[int]:
        """Ranks that have not left."""
        members = list(self._membership.members.items())
        return sorted(rank for rank, member in members if member.connections)

    def unreachable(self, silent_s: float = 0.0) -> set[int]:
        """Ranks without a heartbeat for so long whose host does not acknowledge what is sent."""
        with self._state:
            reports = self._membership.reports(self.present())
        silent = {rank for rank, report in reports.items() if report.silent_s > silent_s}
        return {rank for rank in silent if reports[rank].is_unreachable}

    def network_failures(self) -> str:
        """The network failures between this host and those of ranks; "" if none is seen."""
        links: dict[str, tuple[str, set[int]]] = {}  # by the other host
        with self._state:
            for connection in list(self._connections.values()):  # a thread that ends removes them
                limit_s = self.timings.acknowledged_s
                failure = link_state.describe_silence(connection.socket, limit_s)
                if failure:
                    host = link_state.remote_host(connection.socket)
                    links.setdefault(host, (failure, set()))[1].add(connection.rank)
        return "; ".join(f"ranks {sorted(ranks)}: {text}" for text, ranks in links.values())

    # ---- the thread ----

    def _serve(self) -> None:
        tick_at = 0.0
        try:
            while not self._is_to_end():
                events = self._selector.select(self.timings.tick_s)
                with self._state:
                    self._authenticator.handle(events)
                    if time.monotonic() >= tick_at:
                        tick_at = time.monotonic() + self.timings.tick_s
                        self._authenticator.isolate(self._tick)
        finally:
            self._end()
            self._over.set()

    def _tick(self) -> None:
        self._authenticator.tick()
        self._ping_silent()
        for connection in list(self._connections.values()):
            if connection.received:  # and was not served while its answers were not read
                self._on_ready(connection, 0)
        self._values.forget(_Requester.has_given_up)
        self._rendezvous.forget(_Requester.has_given_up)

    def _is_to_end(self) -> bool:
        with self._lock:
            self._ending = self._closing.is_set() and not self._connections
            return self._ending

    def _end(self) -> None:
        for number in list(self._connections):
            self._remove(number)
        self._authenticator.close()
        for end in (self._listener, self._woken, self._wakeup):
            end.close()
        self._selector.close()

    def _on_wakeup(self, _: int) -> None:
        self._woken.recv(64)

    def _authorize(self, hello: Hello) -> tuple[Answer, str]:
        """A rank that is ahead of rank 0 waits: this server may be about to end."""
        if hello.purpose != CONTROL:
            return Answer.REJECTED, ""
        member = self._membership.members.get(hello.rank)
        if member is not None and member.connections:
            if member.token == hello.token:
                return Answer.ACCEPTED, ""
            return Answer.DUPLICATE_RANK, member.process
        is_open = hello.turn <= self._turn and not self._closing.is_set()
        return (Answer.ACCEPTED if is_open else Answer.NOT_READY), ""

    def _refuse_all(self, hello: Hello) -> None:
        """Let no rank join: one of them encrypts and another does not."""
        why = describe_encryption(hello.encrypts, f"rank {hello.rank} ({hello.process})")
        self._refusal = f"{why}, so none can join. Start all ranks of a launch in the same way."
        for requester in self._rendezvous.cancel():
            self._refuse(requester, self._refusal)

    def _add(self, accepted: socket.socket, hello: Hello) -> None:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = _RankConnection(accepted, hello.rank)
        number = accepted.fileno()
        handler = Handler(
            lambda events: self._on_ready(connection, events),
            lambda: self._on_connection_lost(connection),
        )
        self._selector.register(accepted, selectors.EVENT_READ, handler)
        self._connections[number] = connection
        self._membership.add_connection(hello.rank, hello.token, hello.process, number)

    def _on_ready(self, connection: _RankConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            is_over = events & selectors.EVENT_READ and not self._receive(connection)
            self._serve_requests(connection)
            if is_over:
                self._on_connection_lost(connection)
        except OSError:
            self._on_connection_lost(connection)
        except BAD_REQUEST as error:
            log.error("rank %d sent what is not a request: %r", connection.rank, error)
            self._on_connection_lost(connection)

    def _receive(self, connection: _RankConnection) -> bool:
        """False at the end of the connection."""
        try:
            data = connection.socket.recv(RECEIVE_NBYTES)
        except BlockingIOError:
            return True
        connection.received += data
        return bool(data)

    def _serve_requests(self, connection: _RankConnection) -> None:
        """Serve the whole requests that have come."""
        while connection.is_served and (packed := _first_message(connection.received)) is not None:
            request, op, *arguments = unpack(packed)
            if not isinstance(request, int):
                raise TypeError(f"a request is numbered, not {request!r}")
            if op == Op.LEAVE:
                self._membership.mark_leaving(connection.rank)
                self._remove(connection.socket.fileno())
            else:
                self._do(connection, request, op, arguments)

    def _do(
        self, connection: _RankConnection, request: int, op: str, arguments: Sequence[Any]
    ) -> None:
        connection.request = request
        requester = _Requester(connection.rank, connection, request)
        try:
            check_arguments(op, arguments)
            if self._refusal and op in (Op.RENDEZVOUS, Op.NUMBER):
                return self._refuse(requester, self._refusal)
            answer = self._operations[op](requester, *arguments)
        except BAD_REQUEST as error:
            text = _bad_request(connection.rank, op, error)
            return self._send(connection, pack((request, None, text)))
        if answer is not PENDING:
            self._answer(requester, answer)

    def _answer(self, requester: _Requester, value: Any) -> None:
        """Raises nothing: what one rank puts may be what another waits for."""
        try:
            packed = pack(value)
        except BAD_REQUEST as error:
            return self._refuse(requester, f"rank 0 has what it cannot send: {error!r}")
        self._answer_packed(requester, packed)

    def _refuse(self, requester: _Requester, text: str) -> None:
        if requester.connection is not None and not requester.has_given_up():
            self._send(requester.connection, pack((requester.request, None, text)))

    def _answer_all(self, requesters: Sequence[_Requester], value: Any) -> None:
        """Pack the value once for all of them: after it, each message is (request, value)."""
        packed = pack_for_many(value)
        for requester in requesters:
            self._answer_packed(requester, packed)

    def _answer_packed(self, requester: _Requester, packed: bytes) -> None:
        if len(packed) > MAX_REQUEST_NBYTES:
            text = f"the answer of rank 0 has {len(packed)} bytes of at most {MAX_REQUEST_NBYTES}"
            self._refuse(requester, text)
        elif requester.connection is not None and not requester.has_given_up():
            pair = b"\x92"  # msgpack's array of two
            self._send(requester.connection, pair + pack(requester.request) + packed)

    def _send(self, connection: _RankConnection, body: bytes) -> None:
        if not connection.is_open:
            return
        connection.unsent += LENGTH.pack(len(body)) + body
        try:
            self._flush(connection)
        except OSError:
            self._on_connection_lost(connection)

    def _flush(self, connection: _RankConnection) -> None:
        unsent = connection.unsent
        try:
            while unsent:
                del unsent[: connection.socket.send(memoryview(unsent)[:RECEIVE_NBYTES])]
        except BlockingIOError:
            pass
        readable = selectors.EVENT_READ if connection.is_served else 0
        events = readable | (selectors.EVENT_WRITE if unsent else 0)
        if events != connection.events:
            connection.events = events
            key = self._selector.get_key(connection.socket)
            self._selector.modify(connection.socket, events, key.data)

    def _on_connection_lost(self, connection: _RankConnection) -> None:
        """The connection ended: without LEAVE, unless that has arrived and was not read."""
        if connection.is_open:
            if _has_left(connection):
                self._membership.mark_leaving(connection.rank)
            self._remove(connection.socket.fileno())
            self._membership.mark_lost(connection.rank)

    def _remove(self, number: int) -> None:
        connection = self._connections.pop(number)
        self._membership.remove_connection(connection.rank, number)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    # ---- hosts that do not answer ----

    def _ping_silent(self) -> None:
        """Send something to silent hosts: what counts is whether it is acknowledged."""
        now, silent_s = time.monotonic(), self.timings.ping_after_s
        for member in self._membership.members.values():
            if member.is_silent(now, silent_s) and now - member.pinged_at > 2 * silent_s:
                member.pinged_at = now
                for number in list(member.connections):
                    self._send(self._connections[number], pack(PING))

    def _add_group(self, key: str, requesters: Sequence[_Requester]) -> None:
        group = key.rpartition("/")[0]  # of a rendezvous of its ranks
        self._membership.add_group(group, [requester.rank for requester in requesters])

    def _answer_unwell(self, requester: _Requester, *question: Any) -> Any:
        """Pack the answer once for a moment: all ranks of a group ask when one of them is late."""
        if requester.connection is None:
            return self._membership.unwell(*question)
        now = time.monotonic()
        if now - self._packed_at > self.timings.reports_s:
            self._packed_at, self._packed_unwell = now, {}
        if question not in self._packed_unwell:
            self._packed_unwell[question] = pack_for_many(self._membership.unwell(*question))
        self._answer_packed(requester, self._packed_unwell[question])
        return PENDING

    def _is_unreachable(self, member: Member) -> bool:
        sockets = [self._connections[number].socket for number in member.connections]
        limit_s = self.timings.acknowledged_s
        return any(link_state.is_silent(connection, limit_s) for connection in sockets)


def _max_pending_connections(world_size: int) -> int:
    """The number of unauthenticated clients that leaves a descriptor for every rank.

    All ranks may come at once, and none of them is to be sent away for another.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = limit - len(linux.open_fds()) - world_size - RESERVE
    if spare < MIN_PENDING:
        raise CoordinatorError(
            f"rank 0 may open {limit} files, which is too few to serve {world_size} ranks: it "
            f"needs {MIN_PENDING - spare} more. Raise the limit (`ulimit -n {limit * 4}`) where "
            "rank 0 is started."
        )
    return min(max(MAX_PENDING, world_size), max(MIN_PENDING, spare // 2))


def _bad_request(rank: int, op: str, error: Exception) -> str:
    return f"rank {rank} asked rank 0 to {op} what it cannot: {error!r}"


def _has_left(connection: _RankConnection) -> bool:
    """True if LEAVE has arrived. To send to a rank that has closed fails before that is read."""
    with suppress(OSError):
        connection.received += connection.socket.recv(RECEIVE_NBYTES)
    with suppress(OSError, *BAD_REQUEST):
        while (packed := _first_message(connection.received)) is not None:
            _, op, *_ = unpack(packed)
            if op == Op.LEAVE:
                return True
    return False


def _first_message(received: bytearray) -> bytes | None:
    """Take the first whole message out of what was received; None if there is none yet."""
    if len(received) < LENGTH.size:
        return None
    (nbytes,) = LENGTH.unpack_from(received)
    if nbytes > MAX_REQUEST_NBYTES:
        raise OSError(f"a message of {nbytes} bytes")
    end = LENGTH.size + nbytes
    if len(received) < end:
        return None
    message = bytes(memoryview(received)[LENGTH.size : end])
    del received[:end]
    return message
