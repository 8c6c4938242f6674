"""Detects failed ranks, and makes all ranks of the group raise the same reason.

The rank that notices first publishes a GroupFailure: in the shared memory of its node, and through
rank 0 to the other nodes. So all survivors raise soon, and name the same rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from coordinator._node_shm import Board
from coordinator.call_site import Call, Waiting
from coordinator.control.session import ANSWER_S, Session
from coordinator.control.tables import Membership
from coordinator.errors import (
    KINDS,
    CoordinatorError,
    CoordinatorTimeout,
    FailureReason,
    PeerLost,
    RankFailure,
)
from coordinator.failure.group_failure import FailureRecord, GroupFailure
from coordinator.failure.peer_monitor import MAX_LINES, ObservedRank, PeerMonitor
from coordinator.failure.scan import FailureScan
from coordinator.failure.subscription import FailureNotifier, Subscription, always
from coordinator.peers import Peer

REASON_S = 1.5  # how long the reason of a broken connection may take to arrive
LAST_ANSWER_S = 0.2  # for rank 0 to say who is late, where it was not asked before the deadline
ADVICE = "The group is out of step: end the launch, and look at what those ranks printed last."
SAME_CALLS = (
    "All ranks must make the same calls, with the same src or dst, in the same order: end the "
    "launch, and look where the program goes different ways."
)


class FailureDetector:
    """Detects failures of the ranks of one group, for calls that wait and for subscribers."""

    def __init__(self, key: str, session: Session, rank: int, peers: Sequence[Peer]) -> None:
        self.key, self.session, self.peers = key, session, peers
        self.me = peers[rank]
        self.monitor = PeerMonitor(key, session, self.me, peers)
        self._scan = FailureScan(self.monitor, self.group_failure)
        self._notifier = FailureNotifier(self._scan)
        self._prefetched: tuple[float, Membership] = (0.0, {})

    def share(self, shm_domain: Sequence[int], board: Board) -> None:
        """From now on these places of the group share memory with us."""
        self.monitor.share(shm_domain, board)

    def close(self) -> None:
        self._notifier.close()
        self.monitor.close()

    def drop(self) -> None:
        """In a forked child: close the descriptors, which leaves those of the parent alone."""
        self._notifier.drop()
        self.monitor.close()

    # ---- without a call ----

    def subscribe(
        self,
        callback: Callable[[RankFailure], None],
        is_waiting: Callable[[], bool] = always,
    ) -> Subscription:
        """Call callback on the detector's thread, once for each rank that fails; see on_failure."""
        return self._notifier.subscribe(callback, is_waiting)

    def failures(self, wait_s: float = 0.0) -> tuple[RankFailure, ...]:
        """The failed ranks, the first to fail first; waits so long for there to be one."""
        deadline = time.monotonic() + wait_s
        while not (failures := self._scan.scan()) and time.monotonic() < deadline:
            time.sleep(min(self.session.timings.scan_s / 10, wait_s))
        return failures

    # ---- while waiting in a call ----

    def check(self, waiting: Waiting) -> None:
        """Return if there is still reason to wait; else raise why not."""
        self.check_group(waiting)
        exited = self.monitor.awaited_exits()
        if exited:
            raise self._lost(exited, waiting)
        now = time.monotonic()
        if now >= waiting.deadline:
            late = self.monitor.stragglers(waiting.call, self._membership(waiting))
            raise self.fail(CoordinatorTimeout, late, waiting)
        if waiting.deadline - now < min(ANSWER_S, waiting.timeout_s / 4):
            self._prefetch_membership(waiting)

    def check_group(self, waiting: Waiting) -> None:
        """Raise if the group has failed."""
        failure = self.group_failure()
        if failure is not None:
            raise self._error(failure, waiting)

    def check_members(
        self,
        ranks: Collection[int],
        waiting: Waiting,
        has_come: Callable[[], bool] = lambda: False,
    ) -> None:
        """Raise if one of these ranks of the launch will not come to what is no call of ours.

        has_come: asked before that: is what they were to do done already?
        """
        failure = self.group_failure()
        exited = self.monitor.exited(ranks) or self.monitor.departed_remote(ranks, waiting.left_s)
        if (failure is not None or exited) and has_come():
            return
        self.check_group(waiting)
        if exited:
            raise self._lost(exited, waiting)

    def check_alive(self, waiting: Waiting) -> None:
        """Raise if a rank has died: one that has left did what it had to do, perhaps."""
        self.check_group(waiting)
        died = self.monitor.died()
        if died:
            raise self._lost(died, waiting)

    def _lost(self, exited: Sequence[ObservedRank], waiting: Waiting) -> CoordinatorError:
        """The error for ranks that exited, or their own reason, which may still be at rank 0."""
        if any(self.monitor.is_remote(observed.peer.rank) for observed in exited):
            self.session.refresh(LAST_ANSWER_S)
        failure = self.group_failure()
        if failure is not None:
            return self._error(failure, waiting)
        return self.fail(PeerLost, exited, waiting)

    def group_failure(self) -> GroupFailure | None:
        """Why the group has failed; None while it has not."""
        board = self.monitor.board
        data = board.verdict() if board is not None else None
        data = data if data is not None else self.session.verdicts.get(self.key)
        return None if data is None else GroupFailure.unpack(data)

    def _prefetch_membership(self, waiting: Waiting) -> None:
        """Ask rank 0 which ranks are late before the deadline, since it may not answer."""
        if self.monitor.has_remote and self._prefetched[0] != waiting.since:
            self._prefetched = (waiting.since, self.session.membership(waiting.left_s))

    def _membership(self, waiting: Waiting) -> Membership:
        if not self.monitor.has_remote:
            return {}
        since, membership = self._prefetched
        return membership if since == waiting.since else self.session.membership(LAST_ANSWER_S)

    def broken(self, rank: int, why: str, waiting: Waiting) -> CoordinatorError:
        """The error for a broken connection to a rank of the group: the reason, if it arrives
        shortly."""
        until = min(time.monotonic() + REASON_S, waiting.deadline + ANSWER_S)
        while time.monotonic() < until:
            self.session.refresh(timeout_s=0.5)
            try:
                self.check(waiting)
            except CoordinatorError as error:
                return error
            if self.session.hub_lost_at:
                break  # nobody is left who could tell
            time.sleep(0.05)
        state, reason = f"its connection broke: {why}", FailureReason.UNREACHABLE
        return self.fail(PeerLost, [ObservedRank(self.peers[rank], state, None, reason)], waiting)

    # ---- failing the group ----

    def fail(
        self, kind: type[CoordinatorError], observed: Sequence[ObservedRank], waiting: Waiting
    ) -> CoordinatorError:
        """Fail the group for a reason; the error for this rank, or that of who was quicker."""
        text = " and ".join(map(str, observed)) or "a rank that nobody can name"
        ranks = [rank.peer.rank for rank in observed]
        failures = [FailureRecord.of(rank) for rank in observed if rank.reason is not None]
        return self._error(self._publish(kind, str(waiting.call), text, ranks, failures), waiting)

    def abandon(self, why: str, where: str, causes: Sequence[RankFailure] = ()) -> None:
        """Fail the group because this rank leaves it in the middle.

        causes: failures of other ranks that made it leave.
        """
        if len(self.peers) > 1:
            text = f"{self.me}, which left because of\n{_end_of(why)}"
            me = FailureRecord.of(ObservedRank(self.me, "left in the middle of a call"))
            earlier = map(FailureRecord.from_failure, causes)
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
        data, board = failure.pack(), self.monitor.board
        if board is not None and not board.give_verdict(data):
            return self.group_failure() or failure
        if board is None:
            data = self.session.verdicts.setdefault(self.key, data)  # for our other threads
        if self.monitor.has_remote:
            self.session.report(self.key, data)
        return GroupFailure.unpack(data)

    def _error(self, failure: GroupFailure, waiting: Waiting) -> CoordinatorError:
        """The error that this rank raises for the failure of its group."""
        self._forward(failure)
        kind, me, call = KINDS[failure.kind], self.me.rank, waiting.call
        reporter, text = failure.reporter, failure.text
        if kind is CoordinatorError:
            return CoordinatorError(
                f"rank {me} was in {call}, but the ranks are in different calls: {text}. "
                f"{SAME_CALLS}"
            )
        if me in failure.ranks and reporter != me:
            message = (
                f"rank {me} entered {call}, but rank {reporter} had already given up, in "
                f"{failure.where}, waiting for {text}. {ADVICE}"
            )
        else:
            noticed = "" if reporter == me else f"Rank {reporter} noticed it, in {failure.where}. "
            end = "" if text.endswith("\n") else ". "
            message = (
                f"rank {me} waited {waiting.waited_s:.1f} s in {call} for {text}{end}{noticed}"
                f"{ADVICE}"
            )
        if kind is PeerLost:
            return PeerLost(message, failure.rank_failures(self.peers))
        return kind(message)

    def _forward(self, failure: GroupFailure) -> None:
        """Show the ranks of this node at once what was heard from another node."""
        board = self.monitor.board
        if board is not None and board.verdict() is None:
            board.give_verdict(failure.pack())

    def in_different_calls(self, waiting: Waiting) -> CoordinatorError:
        """The error when all of this node have come, but to different calls."""
        return self.disagree(self.monitor.local_calls(), waiting)

    def disagree(self, calls: Mapping[int, Call], waiting: Waiting) -> CoordinatorError:
        """The error for ranks of the launch that made these calls instead of one."""
        by_call: dict[tuple[str, int], list[int]] = {}
        for rank, call in calls.items():
            by_call.setdefault(call[:2], []).append(rank)
        texts = [f"{self._describe(ranks)} in {calls[ranks[0]]}" for ranks in by_call.values()]
        text = " and ".join(texts)
        if len(by_call) == 1:
            text += " with another src or dst"
        return self._error(self._publish(CoordinatorError, str(waiting.call), text), waiting)

    def _describe(self, ranks: Sequence[int]) -> str:
        first = next(peer for peer in self.peers if peer.rank == ranks[0])
        return f"{first} and {len(ranks) - 1} more" if len(ranks) > 1 else str(first)

    # ---- for messages ----

    def describe_ranks(self, ranks: Collection[int]) -> str:
        """These ranks of the launch: where they are, and what they do."""
        membership = self.session.membership(LAST_ANSWER_S) if self.monitor.has_remote else {}
        return " and ".join(map(str, self.monitor.observe(ranks, membership))) or (
            f"ranks {list(ranks)}"
        )

    def describe_rank(self, rank: int) -> str:
        """A rank of the launch, and what it does if that is seen from here."""
        observed = self.monitor.observe_local(rank)
        peers = (str(peer) for peer in self.peers if peer.rank == rank)
        return str(observed) if observed is not None else next(peers, f"rank {rank}")

    def table(self, timeout_s: float = ANSWER_S, limit: int | None = None) -> str:
        """A line for every rank: where it is and what it does."""
        membership = self.session.membership(timeout_s) if self.monitor.has_remote else {}
        return self.monitor.table(membership, limit)

    def short_table(self) -> str:
        """As table(), for an error that is due already."""
        return self.table(LAST_ANSWER_S, MAX_LINES)


def _end_of(text: str, most: int = 8000) -> str:
    """The text, or its end if it is long: of a traceback that is what counts."""
    return text if len(text) < most else "..." + text[-most:]
