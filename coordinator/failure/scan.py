"""Scan for failed ranks of a group, without a collective call.

Three sources: shared memory and /proc for ranks of this host, rank 0's membership for ranks of
other hosts, and the failure that any rank published for the group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import replace

from coordinator.control.membership import SUSPENDED, Membership, RankReport
from coordinator.control.process_monitor import PeerProcess
from coordinator.errors import FailureReason, PeerLost, RankFailure
from coordinator.failure.group_failure import GroupFailure
from coordinator.failure.peer_monitor import ObservedRank, PeerMonitor
from coordinator.peers import Peer
from launcher import CauseOrder


class FailureScan:
    """The failed ranks of a group so far. Any thread may scan.

    A rank that recovers from being suspended or unreachable is no longer a failure.
    """

    def __init__(
        self, monitor: PeerMonitor, group_failure: Callable[[], GroupFailure | None]
    ) -> None:
        self.monitor, self._group_failure = monitor, group_failure
        self._timings = monitor.session.timings
        self._lock = threading.Lock()
        self._failures: dict[int, RankFailure] = {}  # by place
        self._failed_at: dict[int, float] = {}  # by place
        self._since: dict[int, float] = {}  # by rank of the launch: since when it looks unwell
        self._dead_at: dict[int, float] = {}  # by rank of the launch: when its end was seen
        self._scanned_at = time.monotonic()
        self._membership: Membership = {}
        # When rank 0 was asked, when it was asked what it answered last, and when it answered.
        self._asked_at, self._known_at, self._answered_at = 0.0, 0.0, time.monotonic()

    def processes(self) -> list[PeerProcess]:
        """The processes of this host whose end is to be noticed at once."""
        processes = [self.monitor.process(peer) for _, peer in self._peers()]
        return [process for process in processes if process is not None and process.fileno() >= 0]

    def scan(self) -> tuple[RankFailure, ...]:
        """The failed ranks, the first to fail first."""
        with self._lock:
            self._forgive_if_suspended()
            self.monitor.session.heartbeat.sync()
            self._refresh_membership()
            observed = self._observed()
            reported = self._reported()  # after: a rank reports its reason before it closes
            self._remove_recovered({*observed, *(failure.rank for failure in reported)})
            for failure in (*reported, *observed.values()):
                self._add(failure)
            return tuple(sorted(self._failures.values(), key=self._occurrence))

    def _occurrence(self, failure: RankFailure) -> CauseOrder:
        """The order by time of the failure; ranks that left come last, for they cause none."""
        return CauseOrder.of(
            failure.rank,
            self._failed_at[failure.rank],
            died_silently=failure.exit_status is not None and failure.exit_status < 0,
            is_consequence=failure.reason is FailureReason.LEFT,
        )

    def _remove_recovered(self, observed: Container[int]) -> None:
        for place, failure in list(self._failures.items()):
            if failure.reason.may_recover and place not in observed:
                del self._failures[place], self._failed_at[place]

    def _add(self, failure: RankFailure) -> None:
        """The first reason stays, unless the rank could still have recovered from it."""
        before, now = self._failures.get(failure.rank), time.monotonic()
        if before is None or before.reason.may_recover:
            failed_at = self._failed_at.setdefault(failure.rank, now - failure.since_s)
            since_s = now - failed_at if failure.reason.may_recover else failure.since_s
            self._failures[failure.rank] = replace(failure, since_s=since_s)

    def _peers(self) -> Iterable[tuple[int, Peer]]:
        """The other ranks that have not failed for good, by place."""
        for place, peer in enumerate(self.monitor.peers):
            failure = self._failures.get(place)
            is_over = failure is not None and not failure.reason.may_recover
            if peer.rank != self.monitor.me.rank and not is_over:
                yield place, peer

    def _forgive_if_suspended(self) -> None:
        """Begin anew after this process was stopped: all others look as if they had been silent."""
        now = time.monotonic()
        if now - self._scanned_at > self._timings.suspended_s + self._timings.scan_s:
            self._since.clear()
            self._answered_at = now
        self._scanned_at = now

    # ---- from all ranks ----

    def _reported(self) -> list[RankFailure]:
        """The ranks that the group failed for; none for a timeout or for different calls."""
        failure = self._group_failure()
        if failure is None or failure.kind != PeerLost.__name__:
            return []
        failures = failure.rank_failures(self.monitor.peers)
        return [failure for failure in failures if failure.peer.rank != self.monitor.me.rank]

    # ---- from here ----

    def _observed(self) -> dict[int, RankFailure]:
        observed = {}
        for place, peer in self._peers():
            rank = self._observe(peer)
            reason = rank.reason if rank is not None else None
            if rank is None or reason is None:
                self._since.pop(peer.rank, None)
                continue
            unwell_s = time.monotonic() - self._since.setdefault(peer.rank, time.monotonic())
            if not reason.may_recover or unwell_s >= self._patience_s(rank):
                since_s = max(unwell_s, rank.since_s)
                observed[place] = RankFailure(
                    place, peer, reason, since_s, rank.call, rank.exit_status, str(rank)
                )
        return observed

    def _patience_s(self, rank: ObservedRank) -> float:
        """Seconds for which a rank must look unwell before it counts: two scans at least."""
        return max(self._timings.suspended_s - rank.since_s, self._timings.membership_s)

    def _observe(self, peer: Peer) -> ObservedRank | None:
        """The rank, if it looks unwell."""
        monitor, process = self.monitor, self.monitor.process(peer)
        if not monitor.is_remote(peer.rank):
            return monitor.local_exit(peer.rank) or self._suspended(peer, process)
        report = self._membership.get(peer.rank)
        gone = None if process is not None else monitor.remote_exit(peer.rank)
        gone = gone or monitor.departed(peer, report)
        if gone is not None:
            return gone
        if process is not None:
            return self._exited(peer, process, report) or self._suspended(peer, process)
        return self._unwell(peer, report) or self._silent_master(peer)

    def _suspended(self, peer: Peer, process: PeerProcess | None) -> ObservedRank | None:
        if process is None or not process.is_suspended():
            return None
        last_call = self.monitor.last_call(peer.rank)
        return ObservedRank(peer, SUSPENDED, last_call, FailureReason.SUSPENDED)

    def _exited(
        self, peer: Peer, process: PeerProcess, report: RankReport | None
    ) -> ObservedRank | None:
        """A process of this host that shares no memory, once rank 0 knows whether it had left."""
        if not process.is_dead():
            return None
        dead_at = self._dead_at.setdefault(peer.rank, time.monotonic())
        dead_s = time.monotonic() - dead_at
        is_lost = report is not None and report.lost_s >= 0
        # Else it may have left before: rank 0 answers for reports_s what it knew before that.
        is_known = self._known_at > dead_at + self._timings.reports_s or self._is_master(peer)
        patience_s = self._timings.exit_notice_s if is_known else self._timings.master_silent_s
        if not is_lost and dead_s < patience_s:
            return None
        state, status = process.state(), process.exit_status
        return ObservedRank(peer, state, None, FailureReason.EXITED, status, dead_s)

    # ---- from rank 0 ----

    def _refresh_membership(self) -> None:
        now = time.monotonic()
        is_urgent = any(
            dead_at + self._timings.reports_s >= self._asked_at
            for dead_at in self._dead_at.values()
        )
        is_due = is_urgent or now - self._asked_at >= self._timings.membership_s
        if not self.monitor.has_remote or not is_due:
            return
        self._asked_at = now
        membership = self.monitor.unwell()
        self._membership = membership or {}
        if membership is not None:
            self._known_at, self._answered_at = now, time.monotonic()

    def _unwell(self, peer: Peer, report: RankReport | None) -> ObservedRank | None:
        if report is None:
            return None
        observed = self.monitor.observe_report(peer, report)
        return None if observed.reason is FailureReason.EXITED else observed  # it may come back

    def _is_master(self, peer: Peer) -> bool:
        return peer.rank == self.monitor.session.info.master_rank

    def _silent_master(self, peer: Peer) -> ObservedRank | None:
        silent_s = time.monotonic() - self._answered_at
        if not self._is_master(peer) or silent_s < self._timings.master_silent_s:
            return None
        failure = self.monitor.session.client.network_failure()
        state = failure or f"has not answered for {silent_s:.0f} s: suspended, stuck or busy"
        return ObservedRank(peer, state, None, FailureReason.UNREACHABLE, None, silent_s)
