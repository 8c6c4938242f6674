"""One rank's stay in its launch: its end of the hub, and at rank 0 the hub itself.

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
from datetime import timedelta
from typing import Any, Protocol

from coordinator.addresses import (
    Address,
    bound,
    candidates,
    listen,
    outward_addresses,
    source_towards,
    spans_nodes,
)
from coordinator.control.client import Client, HubGone
from coordinator.control.credentials import NBYTES, secret_of
from coordinator.control.framing import Late, nothing
from coordinator.control.handshake import HUB, Caller, Proof
from coordinator.control.process_monitor import PeerProcess
from coordinator.control.server import Hub
from coordinator.control.tables import Membership, RankReport
from coordinator.errors import CoordinatorError, CoordinatorTimeout
from coordinator.peers import Peer, stat
from coordinator.timings import Timings
from launcher import LaunchInfo

BEAT_S = 0.5
BEATS_PER_S = 512  # that rank 0 can take from all ranks together without noticing
ANSWER_S = 1.0  # at most, for questions that only make an error better
REPORT_S = 0.3  # to tell rank 0 why a group broke, which may be the end of a deadline
EXIT_S = 0.5  # a process that ends closes its connections first


class Row(Protocol):
    """What a group of this rank tells the others in each beat."""

    key: str

    def row(self) -> tuple[str, int, str, float]: ...

    def drop(self) -> None: ...


class Session:
    """What the Coordinators of one rank of one launch share."""

    def __init__(
        self, info: LaunchInfo, hub: Hub | None, client: Client, proof: Proof, timings: Timings
    ) -> None:
        self.info, self.hub, self.client, self.proof = info, hub, client, proof
        self.timings = timings
        self.users = 0
        self.lost: dict[int, float] = {}  # ranks of the launch, and when we heard
        self.verdicts: dict[str, bytes] = {}  # by group
        self.hub_lost_at = 0.0
        self._news = 0
        self._rows: dict[str, Row] = {}
        self._refreshing = threading.Lock()
        self._closed = threading.Event()
        self._neighbour: Peer | None = None
        self._master: PeerProcess | None = None
        self._beats = False
        if spans_nodes(info):
            self.begin_beating()

    def begin_beating(self) -> None:
        """From now on rank 0 hears from this rank, and this rank what becomes of those that share
        no memory with it."""
        if not self._beats:
            self._beats = True
            threading.Thread(target=self._beat, name="drumline-beat", daemon=True).start()

    def watch(self, group: Row) -> None:
        self._rows[group.key] = group

    def forget(self, group: Row) -> None:
        self._rows.pop(group.key, None)

    def get_to_know(self, neighbour: Peer, peers: Sequence[Peer]) -> None:
        """A stopped process cannot say that it is: the next one on its node does."""
        if self._neighbour is None:
            self._neighbour = neighbour
        master = next((peer for peer in peers if peer.rank == 0), None)
        if self._master is None and master is not None:
            self._master = PeerProcess(master)

    def _beat(self) -> None:
        pause_s = max(BEAT_S, self.info.world_size / BEATS_PER_S)
        self.refresh()  # who is cut off before it has said anything could not be told from others
        while not self._closed.wait(pause_s):
            self.refresh()

    def refresh(self, timeout_s: float = ANSWER_S) -> None:
        """Tell rank 0 what this rank does, and hear who is lost and which groups failed."""
        deadline = time.monotonic() + timeout_s
        if not self._refreshing.acquire(timeout=timeout_s):
            return  # another thread waits for rank 0 already
        try:
            rows = {group.key: group.row() for group in list(self._rows.values())}
            left_s = max(deadline - time.monotonic(), 0.0)
            self._take_in(self.ask("beat", self._news, rows, self._note(), timeout_s=left_s))
        except (HubGone, Late, CoordinatorError):
            return  # rank 0 is gone, stopped, busy or cut off: the deadlines decide
        finally:
            self._refreshing.release()

    def _take_in(self, news: Sequence[tuple[str, Any]]) -> None:
        self._news += len(news)
        for group, what in news:
            if group:
                self.verdicts.setdefault(group, what)
            else:
                self.lost.setdefault(what, time.monotonic())

    def _note(self) -> list[Any]:
        """That our neighbour is stopped, if it is; [] else."""
        neighbour = self._neighbour
        if neighbour is None or neighbour.rank == self.info.rank or not neighbour.is_visible:
            return []
        return [neighbour.rank] if stat(neighbour.pid)[:1] in (["T"], ["t"]) else []

    def membership(self, timeout_s: float = ANSWER_S) -> Membership:
        """What rank 0 knows of each rank; nothing if it does not answer."""
        try:
            reports = self.ask("census", timeout_s=timeout_s)
            return {rank: RankReport.from_wire(fields) for rank, fields in reports.items()}
        except (HubGone, Late, CoordinatorError):
            return {}

    def report(self, group: str, verdict: bytes) -> None:
        """Who does not hear it finds out by itself."""
        try:
            self.ask("report", group, verdict, timeout_s=REPORT_S)
        except (HubGone, Late, CoordinatorError):
            pass

    def ask(
        self, op: str, *arguments: Any, timeout_s: float, idle: Callable[[], None] = nothing
    ) -> Any:
        """Ask the hub. Raises Late if it does not answer in time, HubGone if it is gone."""

        def look() -> None:
            self._check_open()
            if self._master is not None and self._master.is_dead():
                raise HubGone(self._master.state())
            idle()

        try:
            return self.client.ask(op, *arguments, timeout_s=timeout_s, idle=look)
        except HubGone:
            self._check_open()
            self.hub_lost_at = self.hub_lost_at or time.monotonic()
            self.lost.setdefault(0, time.monotonic())
            raise

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise CoordinatorError(
                f"rank {self.info.rank} closed its last Coordinator while another thread was in a "
                "call on it, so nobody answers that. Close it when no thread uses it any more."
            )

    def master(self) -> str:
        """Rank 0 of the launch, as well as this rank can name it by now, and what it does."""
        if self._master is None:
            return f"rank 0 ({self.info.master_addr}:{self.info.master_port})"
        if self.hub_lost_at:
            self._master.dies_within(EXIT_S)
        state = self._master.state()
        return f"{self._master.peer}, {state or 'out of sight'},"

    def end(self) -> None:
        self._closed.set()
        self.client.close()
        if self._master is not None:
            self._master.close()

    def drop(self) -> None:
        """In a forked child: close the descriptors, which leaves those of the parent alone."""
        self._closed = threading.Event()  # the lock of the old one may be held by no thread
        self._closed.set()
        self.client.drop()
        for group in self._rows.values():
            group.drop()
        if self.hub is not None:
            self.hub.drop()
        if self._master is not None:
            self._master.close()


class _Seat:
    """The session of one rank, as often as it is opened, and how many Coordinators it has made."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # __del__ may come at any time
        self.session: Session | None = None
        self.hub: Hub | None = None
        self.number = 0
        self.point: _Point | None = None
        self.token = secrets.token_bytes(8)

    def enter(self, info: LaunchInfo, timeout_s: float, timings: Timings) -> tuple[Session, int]:
        with self.lock:
            if self.session is None:
                self.session = self._open(info, timeout_s, timings)
            elif self.hub is not None:
                self.hub.open(self.number)
            self.session.users += 1
            self.number += 1
            return self.session, self.number - 1

    def stay(self) -> None:
        with self.lock:
            assert self.session is not None
            self.session.users += 1

    def _open(self, info: LaunchInfo, timeout_s: float, timings: Timings) -> Session:
        if info.extras.get("store") == "agent" and self.point is None:
            self.point = _agree_on_point(info, timeout_s)
        proof = Proof(self._secret(info), info.launch_id, info.world_size)
        if info.rank == 0 and (self.hub is None or not self.hub.open(self.number)):
            self.hub = Hub(self._listener(info), proof)
            self.hub.open(self.number)
        who = f"host {socket.gethostname()}, pid {os.getpid()}"
        caller = Caller(info.rank, HUB, self.number, self.token, who)
        client = Client(lambda: self._where(info), proof, caller, timeout_s, self.hub)
        atexit.register(client.close, says_bye=False)  # who ends without closing is lost
        return Session(info, self.hub, client, proof, timings)

    def _secret(self, info: LaunchInfo) -> bytes:
        return self.point.secret if self.point is not None else secret_of(info)

    def _listener(self, info: LaunchInfo) -> socket.socket:
        if self.point is not None and self.point.listener is not None:
            return self.point.listener.dup()
        return listen(info)

    def _where(self, info: LaunchInfo) -> list[Address]:
        if self.hub is not None:
            family = socket.AF_INET6 if ":" in self.hub.address[0] else socket.AF_INET
            return [(family, self.hub.address)]
        if self.point is not None:
            return [self.point.address]
        return candidates(info)

    def leave(self, timeout_s: float | None) -> list[int]:
        """One Coordinator less. At rank 0 the last one waits until everybody has left, unless
        timeout_s is None. Returns the ranks that had not in time."""
        with self.lock:
            session, hub = self.session, self.hub
            assert session is not None
            session.users -= 1
            if session.users > 0:
                return []
            self.session = None
            session.end()
            atexit.unregister(session.client.close)
        if hub is None:
            return []
        hub.begin_closing()
        if timeout_s is None or hub.wait(timeout_s):
            return []
        return hub.present()

    def drop(self) -> None:
        """In a forked child: close the descriptors, which leaves those of the parent alone."""
        if self.session is not None:
            self.session.drop()
        elif self.hub is not None:
            self.hub.drop()
        if self.point is not None and self.point.listener is not None:
            self.point.listener.close()


class _Seats:
    """The ranks that live in this process.

    A listening socket belongs to the process whatever we do, so its owner is found by process too.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # __del__ may come at any time
        self._seats: dict[tuple[str, int, int], _Seat] = {}

    def of(self, info: LaunchInfo) -> _Seat:
        with self._lock:
            return self._seats.setdefault((info.launch_id, info.rank, os.getpid()), _Seat())

    def drop(self) -> None:
        """In a forked child, which is none of its parent's ranks: connections that it would keep
        open hide from the others that the parent has died."""
        self._lock = threading.RLock()  # of a thread that is not here, perhaps
        for seat in self._seats.values():
            seat.drop()
        self._seats = {}


_seats = _Seats()
os.register_at_fork(after_in_child=_seats.drop)


def enter(info: LaunchInfo, timeout_s: float, timings: Timings) -> tuple[Session, int]:
    """The session of this rank, and how many Coordinators the rank has made before."""
    return _seats.of(info).enter(info, timeout_s, timings)


def stay(info: LaunchInfo) -> None:
    """One more Coordinator of this rank uses the session."""
    _seats.of(info).stay()


def leave(info: LaunchInfo, timeout_s: float | None) -> list[int]:
    """Give the session back. At rank 0, see _Seat.leave."""
    return _seats.of(info).leave(timeout_s)


class _Point:
    """Where the hub is, and its secret, where the launcher's own store has told us."""

    def __init__(self, address: Address, secret: bytes, listener: socket.socket | None) -> None:
        self.address, self.secret, self.listener = address, secret, listener


def _agree_on_point(info: LaunchInfo, timeout_s: float) -> _Point:
    """Rank 0 listens beside the launcher's store, and says there where, and draws a secret."""
    from torch.distributed import TCPStore

    key = f"drumline/{info.launch_id}"
    limit = timedelta(seconds=timeout_s)
    try:
        store = TCPStore(info.master_addr, info.master_port, None, False, timeout=limit)
        if info.rank == 0:
            listener = _listener_beside(info)
            secret = secrets.token_bytes(NBYTES)
            said = [*listener.getsockname()[:2], secret.hex()]
            store.set(key, json.dumps(said))
            return _Point((listener.family, listener.getsockname()), secret, listener)
        host, port, text = json.loads(store.get(key))
    except RuntimeError as error:
        raise CoordinatorTimeout(
            f"rank {info.rank} (host {socket.gethostname()}) waited {timeout_s:g} s at the "
            f"launcher's store {info.master_addr}:{info.master_port} for rank 0 to say where it "
            f"listens. Did rank 0 make a Coordinator too? ({error})"
        ) from error
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return _Point((family, (host, port)), bytes.fromhex(text), None)


def _listener_beside(info: LaunchInfo) -> socket.socket:
    if not spans_nodes(info):
        return bound(socket.AF_INET, ("127.0.0.1", 0))
    family, address = candidates(info)[0]
    try:
        return bound(family, (source_towards(family, address), 0))
    except OSError:
        family, text = outward_addresses()[0]
        return bound(family, (text, 0))
