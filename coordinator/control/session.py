"""One rank's session in its launch: its client of rank 0's server, and at rank 0 the server too.

Every Coordinator of the rank shares it; it ends with the last of them.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from coordinator.addresses import Address, bound, candidates, family_of, listen, spans_nodes
from coordinator.call_site import CallStatus
from coordinator.control.client import Client, ServerLost
from coordinator.control.credentials import SECRET_NBYTES, Credentials, launch_secret
from coordinator.control.encryption import check_encryption
from coordinator.control.framing import NoMessage, noop
from coordinator.control.handshake import CONTROL, Hello
from coordinator.control.membership import MAX_NEWS, SUSPENDED, Membership, RankReport
from coordinator.control.operations import Op
from coordinator.control.process_monitor import PeerProcess
from coordinator.control.server import ControlServer
from coordinator.errors import CoordinatorError, CoordinatorTimeout
from coordinator.peers import Peer
from coordinator.timings import CoordinatorTimings
from coordinator.waiting_notice import WaitingNotice
from launcher import LaunchInfo, host_addresses

NO_ANSWER = (ServerLost, NoMessage, CoordinatorError)  # rank 0 is gone, suspended, busy or cut off


class GroupStatus(Protocol):
    """A group of this rank, as its heartbeats report it."""

    key: str

    def call_status(self) -> CallStatus: ...

    def drop(self) -> None: ...


class Session:
    """State that the Coordinators of one rank of one launch share.

    lost: ranks of the launch whose connections to rank 0 broke, and when this rank heard of it.
    group_failures: packed GroupFailures by key of the group.
    """

    def __init__(
        self,
        info: LaunchInfo,
        server: ControlServer | None,
        client: Client,
        credentials: Credentials,
        timings: CoordinatorTimings,
    ) -> None:
        self.info, self.server, self.client, self.credentials = info, server, client, credentials
        self.timings = timings
        self.users = 0
        self.lost: dict[int, float] = {}
        self.group_failures: dict[str, bytes] = {}
        self.server_lost_at = 0.0
        self._num_news = 0
        self._groups: dict[str, GroupStatus] = {}
        self._refreshing = threading.Lock()
        self._closed = threading.Event()
        self._next_local: PeerProcess | None = None
        self._master: PeerProcess | None = None
        self._link_notice: WaitingNotice | None = None  # while the network fails
        self._heartbeat: threading.Thread | None = None
        if spans_nodes(info):
            self.start_heartbeat()

    def start_heartbeat(self) -> None:
        """Send heartbeats to rank 0, which answers with failures of ranks of other nodes."""
        if self._heartbeat is None:
            self._heartbeat = threading.Thread(
                target=self._send_heartbeats, name="drumline-heartbeat", daemon=True
            )
            self._heartbeat.start()

    def add_group(self, group: GroupStatus) -> None:
        self._groups[group.key] = group

    def remove_group(self, group: GroupStatus) -> None:
        self._groups.pop(group.key, None)

    def set_watch_targets(self, next_local: Peer, peers: Sequence[Peer]) -> None:
        """Watch the next rank of this node, since a suspended process cannot report itself, and
        rank 0 if it is among the peers."""
        if self._next_local is None:
            self._next_local = PeerProcess(next_local)
        master = next((peer for peer in peers if peer.rank == 0), None)
        if self._master is None and master is not None:
            self._master = PeerProcess(master)

    def _send_heartbeats(self) -> None:
        self.refresh()  # else a rank that is cut off at once would look like one that never came
        while not self._closed.wait(self.timings.heartbeat_s):
            self.refresh()
            self._notice_network_failure()

    def _notice_network_failure(self) -> None:
        """Log every few seconds that a host does not answer: deadlines may be far away."""
        failure = self._network_failure()
        if not failure:
            self._link_notice = None
        elif self._link_notice is None:
            self._link_notice = WaitingNotice(self.info, self.timings.waiting_notice_s)
        else:
            self._link_notice.log_if_due(lambda: failure)

    def _network_failure(self) -> str:
        try:
            if self.server is not None:
                return self.server.network_failures()
            failure = self.client.network_failure()
        except OSError:  # a connection was closed meanwhile
            return ""
        return failure and f"rank 0: {failure}"

    def refresh(self, timeout_s: float | None = None) -> None:
        """Send a heartbeat to rank 0, and learn from the answer which ranks and groups failed."""
        limit_s = self.timings.answer_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        if not self._refreshing.acquire(timeout=limit_s):
            return  # another thread waits for rank 0 already
        try:
            calls = {group.key: group.call_status() for group in list(self._groups.values())}
            left_s = max(deadline - time.monotonic(), 0.0)
            updates = self.ask(
                Op.HEARTBEAT, self._num_news, calls, self._suspended(), timeout_s=left_s
            )
            self._apply_updates(updates)
        except NO_ANSWER:
            return  # the deadlines decide
        finally:
            self._refreshing.release()

    def _apply_updates(self, updates: Sequence[tuple[str, Any]]) -> None:
        self._num_news += len(updates)
        for group, update in updates:
            if group:
                self.group_failures.setdefault(group, update)
            else:
                self.lost.setdefault(update, time.monotonic())
        surplus = len(self.group_failures) - MAX_NEWS
        for key in list(self.group_failures)[: max(surplus, 0)]:
            if key not in self._groups:
                del self.group_failures[key]

    def _suspended(self) -> list[int]:
        """The next rank of this node, if it is suspended."""
        process = self._next_local
        if process is None or process.peer.rank == self.info.rank or not process.is_suspended():
            return []
        return [process.peer.rank]

    def membership(self, timeout_s: float | None = None) -> Membership:
        """All ranks as rank 0 knows them; empty if it does not answer."""
        return self.unwell("", (), timeout_s) or {}

    def unwell(
        self, group: str, ranks: Sequence[int], timeout_s: float | None = None
    ) -> Membership | None:
        """The ranks that rank 0 does not know to be well in a group; None if it does not answer.

        Among these ranks, or all if there are none.
        """
        limit_s = self.timings.answer_s if timeout_s is None else timeout_s
        try:
            reports = self.ask(Op.MEMBERSHIP, group, list(ranks), timeout_s=limit_s)
            return {rank: RankReport.from_wire(fields) for rank, fields in reports.items()}
        except NO_ANSWER:
            return None

    def report(self, group: str, failure: bytes) -> None:
        """Publish the failure of a group through rank 0; without an answer, every rank finds out
        for itself."""
        try:
            self.ask(Op.REPORT, group, failure, timeout_s=self.timings.report_s)
        except NO_ANSWER:
            pass

    def ask(
        self, op: Op, *arguments: Any, timeout_s: float, idle: Callable[[], None] = noop
    ) -> Any:
        """Ask the server. Raises NoMessage if it does not answer in time, ServerLost if it is
        gone."""

        def check() -> None:
            self._check_open()
            if self._master is not None and self._master.is_dead():
                raise ServerLost(self._master.state())
            idle()

        try:
            return self.client.ask(op, *arguments, timeout_s=timeout_s, idle=check)
        except ServerLost:
            self._check_open()
            self.server_lost_at = self.server_lost_at or time.monotonic()
            self.lost.setdefault(0, time.monotonic())
            raise

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise CoordinatorError(
                f"rank {self.info.rank} closed its last Coordinator while another thread was in a "
                "call on it. Close it when no thread uses it any more."
            )

    def describe_silence(self) -> str:
        """Why rank 0 does not answer, as far as it can be seen from here."""
        failure = self.client.network_failure()
        return failure or f"it does not answer: it is {SUSPENDED}, stuck or busy"

    def describe_master(self) -> str:
        """Rank 0 of the launch, as far as this rank knows it, and its state."""
        if self._master is None:
            return f"rank 0 ({self.info.master_addr}:{self.info.master_port})"
        if self.server_lost_at:
            self._master.dies_within(self.timings.exit_s)
        return f"{self._master.peer}, {self._master.state() or 'on another host'},"

    def end(self) -> None:
        """Leave the launch. A heartbeat on its way is given up first: if the process ended with its
        connection open, that would look like a death."""
        self._closed.set()
        if self._heartbeat is not None and self._heartbeat is not threading.current_thread():
            self._heartbeat.join(self.timings.answer_s)
        self.client.close()
        self._close_processes()

    def drop(self) -> None:
        """Close the descriptors in a forked child, which leaves those of the parent alone."""
        self._closed = threading.Event()  # the lock of the old one may be held by no thread
        self._closed.set()
        self.client.drop()
        for group in self._groups.values():
            group.drop()
        if self.server is not None:
            self.server.drop()
        self._close_processes()

    def _close_processes(self) -> None:
        for process in (self._master, self._next_local):
            if process is not None:
                process.close()


class _ProcessSession:
    """The session of one rank in this process, which may be opened several times.

    num_coordinators: how many Coordinators the rank has made: the turn of the next one.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # __del__ may come at any time
        self.session: Session | None = None
        self.server: ControlServer | None = None
        self.num_coordinators = 0
        self.location: _ServerLocation | None = None
        self.token = secrets.token_bytes(8)

    def join(
        self,
        info: LaunchInfo,
        timeout_s: float,
        timings: CoordinatorTimings,
        encrypts: bool = False,
    ) -> tuple[Session, int]:
        """The session, and how many Coordinators the rank has made before."""
        with self.lock:
            if self.session is None:
                self.session = self._open(info, timeout_s, timings, encrypts)
            elif self.session.credentials.encrypts != encrypts:
                raise CoordinatorError(
                    f"rank {info.rank} has a Coordinator with encrypt={not encrypts}, and cannot "
                    f"make one with encrypt={encrypts} beside it. Give both the same."
                )
            elif self.server is not None:
                self.server.open(self.num_coordinators)
            self.session.users += 1
            self.num_coordinators += 1
            return self.session, self.num_coordinators - 1

    def retain(self) -> None:
        """Count one more Coordinator."""
        with self.lock:
            assert self.session is not None
            self.session.users += 1

    def _open(
        self, info: LaunchInfo, timeout_s: float, timings: CoordinatorTimings, encrypts: bool
    ) -> Session:
        if encrypts:
            check_encryption(info)
        if info.extras.get("store") == "agent" and self.location is None:
            self.location = _locate_server_by_store(info, timeout_s)
        turn, timings = self.num_coordinators, timings.for_ranks(info.world_size)
        credentials = Credentials(self._secret(info), info.launch_id, info.world_size, encrypts)
        if info.rank == 0 and (self.server is None or not self.server.open(turn)):
            self.server = ControlServer(self._listener(info), credentials, timings)
            self.server.open(turn)
        process = f"host {socket.gethostname()}, pid {os.getpid()}"
        hello = Hello(info.rank, CONTROL, turn, self.token, process)
        notice = WaitingNotice(info, timings.waiting_notice_s)
        client = Client(
            lambda: self._addresses(info),
            credentials,
            hello,
            timeout_s,
            self.server,
            timings,
            lambda address, why: notice.log_if_due(lambda: f"rank 0 at {address}: {why}"),
        )
        atexit.register(client.close, is_orderly=False)  # a rank that ends without close() is lost
        return Session(info, self.server, client, credentials, timings)

    def _secret(self, info: LaunchInfo) -> bytes:
        return self.location.secret if self.location is not None else launch_secret(info)

    def _listener(self, info: LaunchInfo) -> socket.socket:
        if self.location is not None and self.location.listener is not None:
            return self.location.listener.dup()
        return listen(info)

    def _addresses(self, info: LaunchInfo) -> list[Address]:
        if self.server is not None:
            address = self.server.address
            return [(family_of(address[0]), address)]
        if self.location is not None:
            return [self.location.address]
        return candidates(info)

    def leave(self, timeout_s: float | None) -> list[int]:
        """One Coordinator less. At rank 0 the last one waits until all ranks have left, unless
        timeout_s is None. Returns the ranks that had not left in time."""
        with self.lock:
            session, server = self.session, self.server
            assert session is not None
            session.users -= 1
            if session.users > 0:
                return []
            self.session = None
            session.end()
            atexit.unregister(session.client.close)
        if server is None:
            return []
        server.begin_closing()
        if timeout_s is None or server.wait(timeout_s):
            return []
        return server.present()

    def drop(self) -> None:
        """Close the descriptors in a forked child, which leaves those of the parent alone."""
        if self.session is not None:
            self.session.drop()
        elif self.server is not None:
            self.server.drop()
        if self.location is not None and self.location.listener is not None:
            self.location.listener.close()


class _ProcessSessions:
    """The sessions of the ranks that live in this process, and its pid."""

    def __init__(self) -> None:
        self.pid = os.getpid()  # here, because to ask the kernel costs as much as a whole call
        self._lock = threading.RLock()  # __del__ may come at any time
        self._sessions: dict[tuple[str, int], _ProcessSession] = {}

    def of(self, info: LaunchInfo) -> _ProcessSession:
        with self._lock:
            return self._sessions.setdefault((info.launch_id, info.rank), _ProcessSession())

    def drop(self) -> None:
        """Forget the sessions in a forked child, which is none of its parent's ranks.

        Connections that it kept open would hide from the others that the parent has died.
        """
        self.pid = os.getpid()
        self._lock = threading.RLock()  # of a thread that is not here, perhaps
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.drop()


this_process = _ProcessSessions()
os.register_at_fork(after_in_child=this_process.drop)


@dataclass(frozen=True)
class _ServerLocation:
    """The address and secret of rank 0's server, where the launcher's own store has them.

    listener: at rank 0, its socket.
    """

    address: Address
    secret: bytes
    listener: socket.socket | None


def _locate_server_by_store(info: LaunchInfo, timeout_s: float) -> _ServerLocation:
    """Rank 0 listens beside the launcher's store, and stores there its address, and a secret if the
    launch has none."""
    from torch.distributed import TCPStore

    has_secret = "secret_fd" in info.extras
    key = f"drumline/{info.launch_id}"
    limit = timedelta(seconds=timeout_s)
    try:
        store = TCPStore(info.master_addr, info.master_port, None, False, timeout=limit)
        if info.rank == 0:
            listener = _listener_next_to_store(info)
            drawn = b"" if has_secret else secrets.token_bytes(SECRET_NBYTES)
            store.set(key, json.dumps([*listener.getsockname()[:2], drawn.hex()]))
            secret = drawn or launch_secret(info)
            return _ServerLocation((listener.family, listener.getsockname()), secret, listener)
        host, port, text = json.loads(store.get(key))
    except RuntimeError as error:
        raise CoordinatorTimeout(
            f"rank {info.rank} (host {socket.gethostname()}) waited {timeout_s:g} s at the "
            f"launcher's store {info.master_addr}:{info.master_port} for the address of rank 0. "
            f"Check that rank 0 makes a Coordinator, too. ({error})"
        ) from error
    secret = bytes.fromhex(text) or launch_secret(info)
    return _ServerLocation((family_of(host), (host, port)), secret, None)


def _listener_next_to_store(info: LaunchInfo) -> socket.socket:
    if not spans_nodes(info):
        return bound(socket.AF_INET, ("127.0.0.1", 0))
    family, address = candidates(info)[0]
    try:
        return bound(family, (host_addresses.local_address_for(family, address), 0))
    except OSError:
        family, text = host_addresses.routable_addresses()[0]
        return bound(family, (text, 0))
