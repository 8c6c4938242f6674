"""Detects failed ranks, and makes all ranks of the group raise the same reason.

The rank that notices first publishes a GroupFailure: in the shared memory of its node, and through
rank 0 to the other nodes. So all survivors raise soon, and name the same rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from coordinator.call_site import CallSite, PendingCall
from coordinator.control.membership import Membership
from coordinator.control.session import Session
from coordinator.errors import (
    KINDS,
    CoordinatorError,
    CoordinatorTimeout,
    FailureReason,
    PeerLost,
    RankFailure,
)
from coordinator.failure.group_failure import FailureRecord, GroupFailure
from coordinator.failure.peer_monitor import ObservedRank, PeerMonitor
from coordinator.failure.scan import FailureScan
from coordinator.failure.stuck_ranks import PeerStacks
from coordinator.failure.subscription import FailureNotifier
from coordinator.peers import Peer

SAME_CALLS = (
    "All ranks must make the same calls, with the same src or dst, in the same order: end the "
    "launch, and look where the program goes different ways."
)


class FailureDetector:
    """Detects failures of the ranks of one group, for calls that wait and for subscribers."""

    def __init__(self, key: str, session: Session, rank: int, peers: Sequence[Peer]) -> None:
        self.key, self.session, self.peers = key, session, peers
        self.me = peers[rank]
        self.timings = session.timings
        self.monitor = PeerMonitor(key, session, self.me, peers)
        self.stacks = PeerStacks(self.me, peers)
        self._scan = FailureScan(self.monitor, self.group_failure)
        self.notifier = FailureNotifier(self._scan)
        self._prefetched: tuple[float, Membership | None, str] = (0.0, None, "")

    def close(self) -> None:
        self.notifier.close()
        self.monitor.close()

    # ---- without a call ----

    def failures(self, wait_s: float = 0.0) -> tuple[RankFailure, ...]:
        """The failed ranks, the first to fail first; waits so long for there to be one."""
        deadline = time.monotonic() + wait_s
        while not (failures := self._scan.scan()) and time.monotonic() < deadline:
            time.sleep(min(self.timings.scan_s / 10, wait_s))
        return failures

    # ---- while waiting in a call ----

    def check(self, pending: PendingCall) -> None:
        """Return if the call should keep waiting; otherwise raise the reason."""
        self.session.heartbeat.sync()
        self.check_group(pending)
        exited = self.monitor.awaited_exits()
        if exited:
            raise self._lost(exited, pending)
        now = time.monotonic()
        if now >= pending.deadline:
            membership, stacks = self._at_deadline(pending)
            late = self.monitor.stragglers(pending.call, membership)
            raise self.fail(CoordinatorTimeout, late, pending, stacks)
        if pending.deadline - now < min(self.timings.answer_s, pending.timeout_s / 4):
            self._prefetch(pending)

    def check_group(self, pending: PendingCall) -> None:
        """Raise if the group has failed."""
        failure = self.group_failure()
        if failure is not None:
            raise self._error(failure, pending)

    def check_members(
        self,
        ranks: Collection[int],
        pending: PendingCall,
        has_come: Callable[[], bool] = lambda: False,
    ) -> None:
        """Raise if one of these ranks of the launch will not come to what is not a call of ours.

        has_come: asked before that: is what they were to do done already?
        """
        failure = self.group_failure()
        exited = self.monitor.exited(ranks) or self.monitor.departed_remote(ranks, pending.left_s)
        if (failure is not None or exited) and has_come():
            return
        self.check_group(pending)
        if exited:
            raise self._lost(exited, pending)

    def check_alive(self, pending: PendingCall) -> None:
        """Raise if a rank has died: one that has left did what it had to do, perhaps."""
        self.check_group(pending)
        exited = self.monitor.exited()
        if died := [rank for rank in exited if rank.reason is not FailureReason.LEFT]:
            raise self._lost(died, pending)

    def _lost(self, exited: Sequence[ObservedRank], pending: PendingCall) -> CoordinatorError:
        """The error for ranks that exited, or their own reason, which may still be at rank 0."""
        if any(self.monitor.is_remote(observed.peer.rank) for observed in exited):
            self.session.heartbeat.refresh(self.timings.last_answer_s)
        failure = self.group_failure()
        if failure is not None:
            return self._error(failure, pending)
        return self.fail(PeerLost, exited, pending)

    def group_failure(self) -> GroupFailure | None:
        """Why the group has failed; None while it has not."""
        segment = self.monitor.segment
        data = segment.group_failure() if segment is not None else None
        data = data if data is not None else self.session.heartbeat.group_failures.get(self.key)
        return None if data is None else GroupFailure.unpack(data)

    def reported(self) -> set[int]:
        """The ranks of the launch that some rank has given up; see report_failure()."""
        self.session.heartbeat.refresh(self.timings.last_answer_s)
        failure = self.group_failure()
        reason = FailureReason.REPORTED.value
        return {one.rank for one in failure.failures if one.reason == reason} if failure else set()

    def _prefetch(self, pending: PendingCall) -> None:
        """Ask rank 0 which ranks are late, and look at their stacks, before the deadline.

        They may not answer; and a rank that came while this one looks must not find that all came.
        """
        if self._prefetched[0] == pending.since:
            return
        membership = self.monitor.unwell(pending.left_s, pending.call)
        late = self.monitor.stragglers(pending.call, membership)
        stacks = self.stacks.describe(late, min(pending.left_s, self.timings.stack_s))
        self._prefetched = (pending.since, membership, stacks)

    def _at_deadline(self, pending: PendingCall) -> tuple[Membership | None, str]:
        """The findings of _prefetch() for this call; rank 0 is asked again if it did not answer."""
        since, membership, stacks = self._prefetched
        if since != pending.since:
            membership, stacks = None, ""
        if membership is None:
            membership = self.monitor.unwell(self.timings.last_answer_s, pending.call)
        return membership, stacks

    def broken(self, rank: int | None, why: str, pending: PendingCall) -> CoordinatorError:
        """The error for a broken connection to a rank of the group, or to one that nobody knows:
        the reason, if it arrives shortly."""
        until = min(
            time.monotonic() + self.timings.reason_s, pending.deadline + self.timings.answer_s
        )
        while time.monotonic() < until:
            self.session.heartbeat.refresh(self.timings.reason_answer_s)
            try:
                self.check(pending)
            except CoordinatorError as error:
                return error
            if self.session.server_lost_at and rank is not None:
                break  # nobody is left who could tell
            time.sleep(self.timings.shm_wait_s)
        state, reason = f"its connection broke: {why}", FailureReason.UNREACHABLE
        if rank is None:
            return self.fail(PeerLost, [], pending, f", for {state}")
        return self.fail(PeerLost, [ObservedRank(self.peers[rank], state, None, reason)], pending)

    # ---- failing the group ----

    def fail(
        self,
        kind: type[CoordinatorError],
        observed: Sequence[ObservedRank],
        pending: PendingCall,
        details: str = "",
    ) -> CoordinatorError:
        """Fail the group for a reason; the error for this rank, or that of who was quicker."""
        text = (" and ".join(map(str, observed)) or "a rank that nobody can name") + details
        ranks = [rank.peer.rank for rank in observed]
        failures = [FailureRecord.of(rank) for rank in observed if rank.reason is not None]
        return self._error(self._publish(kind, str(pending.call), text, ranks, failures), pending)

    def abandon(
        self, why: str, where: str, causes: Sequence[RankFailure] = (), details: str = ""
    ) -> None:
        """Fail the group because this rank leaves it in the middle.

        why: one line. causes: failures of other ranks that made it leave. details: a traceback.
        """
        if len(self.peers) > 1:
            text = f"{self.me}, which left because of {why}\n{_end_of(details)}"
            me = FailureRecord.of(ObservedRank(self.me, "left in the middle of a call"))
            earlier = map(FailureRecord.of, causes)
            self._publish(PeerLost, where, text, [self.me.rank], [*earlier, me])

    def report_failure(self, peer: Peer, how: str, where: str) -> None:
        """Fail the group because one of its ranks, `how` it is, keeps all others waiting."""
        observed = ObservedRank(peer, how)
        self._publish(PeerLost, where, str(observed), [peer.rank], [FailureRecord.of(observed)])

    def _publish(
        self,
        kind: type[CoordinatorError],
        where: str,
        text: str,
        ranks: Sequence[int] = (),
        failures: Sequence[FailureRecord] = (),
    ) -> GroupFailure:
        """Give the reason to all other ranks, or learn theirs if another rank was quicker."""
        failure = GroupFailure.of(kind, self.me.rank, where, text, ranks, failures)
        data, segment = failure.pack(), self.monitor.segment
        if segment is not None and not segment.publish_failure(data):
            return self.group_failure() or failure
        if segment is None:
            heard = self.session.heartbeat.group_failures
            data = heard.setdefault(self.key, data)  # for our other threads
        if self.monitor.has_remote:
            self.session.report(self.key, data)
        return GroupFailure.unpack(data)

    def _error(self, failure: GroupFailure, pending: PendingCall) -> CoordinatorError:
        """The error that this rank raises for the failure of its group."""
        self._forward(failure)
        kind, me = KINDS[failure.kind], self.me.rank
        if kind is CoordinatorError and not failure.ranks:  # else one of them could not join
            return CoordinatorError(
                f"rank {me} was in {pending.call}, but the ranks are in different calls: "
                f"{failure.text}. {SAME_CALLS}"
            )
        message = f"{failure.describe_to(me, pending)}{failure.advice()}"
        if kind is PeerLost:
            return PeerLost(message, failure.rank_failures(self.peers))
        return kind(message)

    def _forward(self, failure: GroupFailure) -> None:
        """Show the ranks of this node at once what was heard from another node."""
        segment = self.monitor.segment
        if segment is not None and segment.group_failure() is None:
            segment.publish_failure(failure.pack())

    def disagree(self, calls: Mapping[int, CallSite], pending: PendingCall) -> CoordinatorError:
        """The error for ranks of the launch that made these calls instead of one."""
        by_call: dict[tuple[str, int], list[int]] = {}
        for rank, call in calls.items():
            by_call.setdefault(call[:2], []).append(rank)
        texts = [f"{self._describe(ranks)} in {calls[ranks[0]]}" for ranks in by_call.values()]
        text = " and ".join(texts)
        if len(by_call) == 1:
            text += " with another src or dst"
        return self._error(self._publish(CoordinatorError, str(pending.call), text), pending)

    def _describe(self, ranks: Sequence[int]) -> str:
        first = next(peer for peer in self.peers if peer.rank == ranks[0])
        return f"{first} and {len(ranks) - 1} more" if len(ranks) > 1 else str(first)

    # ---- for messages ----

    def describe_failure(self) -> str:
        """The reason why the group failed, as another rank gave it; "" without one."""
        failure = self.group_failure()
        return "" if failure is None or failure.reporter == self.me.rank else failure.text


def _end_of(text: str, most: int = 8000) -> str:
    """The text, or its end if it is long: of a traceback that is what counts."""
    return text if len(text) < most else "..." + text[-most:]
