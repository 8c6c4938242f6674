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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from coordinator.addresses import Address, candidates, listen, spans_nodes
from coordinator.call_site import CallSite
from coordinator.control.client import Client, ServerLost
from coordinator.control.heartbeat import NO_ANSWER, Heartbeat
from coordinator.control.membership import SUSPENDED, Membership, RankReport
from coordinator.control.operations import Op
from coordinator.control.process_monitor import PeerProcess
from coordinator.control.secrecy import (
    SECRET_NBYTES,
    check_encryption,
    launch_secret,
    warn_without_secret,
)
from coordinator.control.server import CONTROL, ControlServer
from coordinator.errors import CoordinatorError, CoordinatorTimeout
from coordinator.peers import Peer
from coordinator.timings import CoordinatorTimings
from coordinator.waiting_notice import WaitingNotice
from launcher import Credentials, Hello, LaunchInfo, host_addresses, linux, listener_at, noop


class Session:
    """State that the Coordinators of one rank of one launch share."""

    def __init__(
        self,
        info: LaunchInfo,
        server: ControlServer | None,
        client: Client,
        credentials: Credentials,
        timings: CoordinatorTimings,
    ) -> None:
        self.info, self.server, self.client, self.credentials = info, server, client, credentials
        self._timings = timings  # of a launch of few ranks
        self.users = 0
        self.reported: set[int] = set()  # ranks, as failed, in groups that were closed
        self.heartbeat = Heartbeat(
            info.rank, self.ask, timings.for_ranks(info.world_size), info.master_rank
        )
        self.server_lost_at = 0.0
        self._closed = threading.Event()
        self._master: PeerProcess | None = None
        self._link_notice: WaitingNotice | None = None  # while the network fails
        if spans_nodes(info):
            self.start_heartbeat()

    def start_heartbeat(self) -> None:
        """Send heartbeats to rank 0, which answers with failures of ranks of other nodes."""
        self.heartbeat.start(self._notice_network_failure)

    @property
    def timings(self) -> CoordinatorTimings:
        return self.heartbeat.timings

    def set_num_speakers(self, count: int) -> None:
        """Send no more heartbeats than rank 0 can bear from all ranks."""
        timings = self._timings.for_ranks(self.info.world_size, count)
        self.heartbeat.set_timings(timings)
        if self.server is not None:
            self.server.timings = timings

    def watch_master(self, peers: Sequence[Peer]) -> None:
        """Watch the process of rank 0, if it is among the peers."""
        master = next((peer for peer in peers if peer.rank == self.info.master_rank), None)
        if self._master is None and master is not None:
            self._master = PeerProcess(master)

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
        return failure and f"rank {self.info.master_rank}: {failure}"

    def reports(self, ranks: Sequence[int], timeout_s: float | None = None) -> Membership:
        """These ranks as rank 0 knows them; empty if it does not answer."""
        return self._ask_reports(Op.REPORTS, list(ranks), timeout_s=timeout_s) or {}

    def unwell(
        self, group: str, call: CallSite | None = None, timeout_s: float | None = None
    ) -> Membership | None:
        """The ranks that rank 0 does not know to be well in a group; None if it does not answer.

        call: also the others that are not in it, of all as many as an error may name.
        """
        name, number = call[:2] if call is not None else ("", 0)
        return self._ask_reports(Op.UNWELL, group, name, number, timeout_s=timeout_s)

    def _ask_reports(
        self, op: Op, *arguments: Any, timeout_s: float | None = None
    ) -> Membership | None:
        limit_s = self.timings.answer_s if timeout_s is None else timeout_s
        try:
            reports = self.ask(op, *arguments, timeout_s=limit_s)
            return {rank: RankReport.from_wire(fields) for rank, fields in reports.items()}
        except NO_ANSWER:
            return None

    def report(self, group: str, failure: bytes) -> None:
        """Publish the failure of a group through rank 0; without an answer, every rank finds out
        for itself."""
        try:
            self.ask(Op.REPORT, group, failure, timeout_s=self.timings.answer_s)
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
            self.heartbeat.lost.setdefault(self.info.master_rank, time.monotonic())
            raise

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise CoordinatorError(
                f"rank {self.info.rank} closed its last Coordinator while another thread was in a "
                "call on it. Close it when no thread uses it any longer."
            )

    def describe_silence(self) -> str:
        """Why rank 0 does not answer, as far as it can be seen from here."""
        failure = self.client.network_failure()
        return failure or f"it does not answer: it is {SUSPENDED}, stuck or busy"

    def describe_master(self) -> str:
        """Rank 0 of the launch, as far as this rank knows it, and its state."""
        if self._master is None:
            return f"rank {self.info.master_rank} ({self.info.master_addr}:{self.info.master_port})"
        if self.server_lost_at:
            self._master.dies_within(self.timings.exit_s)
        return f"{self._master.peer}, {self._master.state() or 'on another host'},"

    def end(self) -> None:
        """Leave the launch."""
        self._closed.set()
        self.heartbeat.close()
        self.client.close()
        if self._master is not None:
            self._master.close()

    def drop(self) -> None:
        """Serve nobody in a forked child."""
        self._closed = threading.Event()  # the lock of the old one may be held by no thread
        self._closed.set()
        self.client.drop()


class _ProcessSession:
    """The session of one rank in this process, which may be opened several times.

    num_coordinators: how many Coordinators the rank has made: the turn of the next one.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # __del__ may come at any time
        self.session: Session | None = None
        self.server: ControlServer | None = None
        self.num_coordinators = 0
        self.location: ServerLocation | None = None
        self.is_over_store = False
        self.token = secrets.token_bytes(8)

    @property
    def has_ended(self) -> bool:
        """True once every rank has left."""
        has_left = self.num_coordinators > 0 and self.session is None
        return has_left and (self.server is None or self.server.is_over)

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
        deadline = time.monotonic() + timeout_s
        if encrypts:
            check_encryption(info)
        if info.rank == self.num_coordinators == 0 and (encrypts or spans_nodes(info)):
            warn_without_secret(info, encrypts)
        if info.extras.get("store") == "agent" and self.location is None:
            self.location = _locate_server_by_store(info, timeout_s)
        turn, scaled = self.num_coordinators, timings.for_ranks(info.world_size)
        credentials = Credentials(self._secret(info), info.launch_id, info.world_size, encrypts)
        if info.is_master and (self.server is None or not self.server.open(turn)):
            self.server = ControlServer(self._listener(info), credentials, scaled)
            self.server.open(turn)
        process = f"host {socket.gethostname()}, pid {os.getpid()}"
        hello = Hello(info.rank, CONTROL, turn, self.token, process)
        notice = WaitingNotice(info, timings.waiting_notice_s)
        client = Client(
            lambda: self._addresses(info),
            credentials,
            hello,
            max(deadline - time.monotonic(), 0.0),
            self.server,
            scaled,
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
            return [self.server.address]
        if self.location is not None:
            return [self.location.address]
        return candidates(info)

    def leave(
        self, timeout_s: float | None, stuck: Mapping[int, float] = MappingProxyType({})
    ) -> list[int]:
        """One Coordinator less. At rank 0 the last one waits until all ranks have left, unless
        timeout_s is None; stuck ones for their own time. Returns those that had not in time."""
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
        if timeout_s is None or server.wait(timeout_s, stuck):
            return []
        return server.present()


class _ProcessSessions:
    """The sessions of the ranks that live in this process, and its pid."""

    def __init__(self) -> None:
        self.pid = os.getpid()  # here, because to ask the kernel costs as much as a whole call
        self._lock = threading.RLock()  # __del__ may come at any time
        self._sessions: dict[tuple[str, int], _ProcessSession] = {}

    def of(self, info: LaunchInfo) -> _ProcessSession:
        with self._lock:
            return self._sessions.setdefault((info.launch_id, info.rank), _ProcessSession())

    def locate(self, info: LaunchInfo, location: ServerLocation) -> None:
        """Have the rank's session use a server that was found in a store, not by a launch.

        Nobody comes again to such a server: what is left of those that have ended is forgotten.
        """
        with self._lock:
            for key, session in list(self._sessions.items()):
                if session.is_over_store and session.has_ended:
                    del self._sessions[key]
        session = self.of(info)
        session.location, session.is_over_store = location, True

    def drop(self) -> None:
        """Forget the sessions in a forked child, which is none of its parent's ranks."""
        self.pid = os.getpid()
        self._lock = threading.RLock()  # of a thread that is not here, perhaps
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            if session.session is not None:
                session.session.drop()


this_process = _ProcessSessions()
os.register_at_fork(after_in_child=this_process.drop)


@dataclass(frozen=True)
class ServerLocation:
    """The address and secret of rank 0's server, where a store has them.

    listener: at rank 0, its socket.
    """

    address: Address
    secret: bytes = field(repr=False)
    listener: socket.socket | None


def _locate_server_by_store(info: LaunchInfo, timeout_s: float) -> ServerLocation:
    """Rank 0 listens beside the launcher's store, and stores there its address, and a secret if the
    launch has none."""
    from torch.distributed import TCPStore

    own = launch_secret(info) if "secret_fd" in info.extras else b""
    key = f"drumline/{info.launch_id}"
    limit = timedelta(seconds=timeout_s)
    try:
        store = TCPStore(info.master_addr, info.master_port, None, False, timeout=limit)
        if info.rank == 0:
            listener = linux.closed_in_children(_listener_next_to_store(info))
            drawn = b"" if own else secrets.token_bytes(SECRET_NBYTES)
            store.set(key, json.dumps([*listener.getsockname()[:2], drawn.hex()]))
            return ServerLocation(listener.getsockname(), own or drawn, listener)
        host, port, text = json.loads(store.get(key))
    except CoordinatorError:  # of names and addresses
        raise
    except RuntimeError as error:
        raise CoordinatorTimeout(
            f"rank {info.rank} (host {socket.gethostname()}) waited {timeout_s:.1f} s at the "
            f"launcher's store {info.master_addr}:{info.master_port} for the address of rank 0. "
            f"Check that rank 0 makes a Coordinator, too. ({error})"
        ) from error
    secret = own or bytes.fromhex(text) or launch_secret(info)  # the store draws none for us
    return ServerLocation((host, port), secret, None)


def _listener_next_to_store(info: LaunchInfo) -> socket.socket:
    if not spans_nodes(info):
        loopback = "::1" if ":" in info.master_addr else "127.0.0.1"
        return listener_at((loopback, 0))
    try:
        return listener_at((host_addresses.local_address_for(candidates(info)[0]), 0))
    except OSError:
        return listener_at((host_addresses.routable_addresses()[0], 0))
