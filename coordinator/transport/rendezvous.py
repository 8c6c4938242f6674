"""The rendezvous of ranks that become a group: at rank 0, before they have connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.call_site import PendingCall
from coordinator.control.client import ServerLost
from coordinator.control.heartbeat import NO_ANSWER
from coordinator.control.operations import Op
from coordinator.control.session import Session
from coordinator.errors import (
    CoordinatorError,
    CoordinatorTimeout,
    FailureReason,
    PeerLost,
    RankFailure,
)
from coordinator.failure.detector import FailureDetector
from coordinator.failure.group_failure import GroupFailure
from coordinator.peers import Peer
from coordinator.waiting_notice import WaitingNotice
from launcher import NoMessage, noop

SAME_GROUP = "All members of a group must make the call that makes it, with the same ranks."


class Rendezvous:
    """Exchanges of data among the members of one group that is being made.

    members: ranks of the launch, by their place in the group. parent: of a group that has all of
    them, if there is one. pending: the call that makes it. check: as in Coordinator.split.
    """

    def __init__(
        self,
        key: str,
        session: Session,
        members: Sequence[int],
        parent: FailureDetector | None,
        pending: PendingCall,
        check: Callable[[], None] = noop,
    ) -> None:
        self.key, self.session, self.members = key, session, members
        self._check_more = check
        self.parent, self.pending = parent, pending
        self._timings = session.timings
        self._rank = session.info.rank
        self._refresh_at = time.monotonic() + self._timings.departed_s
        self._notice = WaitingNotice(session.info, session.timings.waiting_notice_s)
        self._among: Sequence[int] = ()  # the places that take part in the exchange
        self._arrived: list[int] | None = None  # of these, asked for shortly before the deadline

    def exchange(
        self, name: str, data: bytes, places: Sequence[int] | None = None, scope: str = ""
    ) -> dict[int, bytes]:
        """Exchange data with all members, or those at some places; what they gave, by place.

        Of nothing nobody hears, and of those with another scope. Collective.
        """
        among = range(len(self.members)) if places is None else places
        packets = self._ask(Op.RENDEZVOUS, name, among, data, scope)
        return {among[index]: data for index, data in packets.items()}

    def number_nodes(self, data: bytes) -> tuple[int, int, dict[int, bytes]]:
        """As RendezvousTable.number. Collective; the first rank of each node gives data."""
        index, size, nodes = self._ask(Op.NUMBER, "nodes", range(len(self.members)), data)
        return index, size, nodes

    def _ask(self, op: Op, name: str, among: Sequence[int], *arguments: Any) -> Any:
        key, self._among, self._arrived = f"{self.key}/{name}", among, None
        place = among.index(self.members.index(self._rank))
        try:
            return self.session.ask(
                op, key, place, len(among), *arguments,
                timeout_s=self.pending.left_s, idle=lambda: self._check(key),
            )  # fmt: skip
        except ServerLost as error:
            raise self._without_server() from error
        except NoMessage as error:
            raise self._timeout(key) from error

    def _check(self, key: str) -> None:
        """Raise if a member will not come; ask who has, before it is too late to ask."""
        left_s, patience_s = self.pending.left_s, self.pending.timeout_s / 4
        limit_s = min(self._timings.answer_s, left_s)
        # Of one that is over rank 0 knows nobody: who has its answer already may have left since.
        self.check_lost(lambda: self._ask_arrived(key, limit_s) == [])
        if self.parent is None:
            self._notice.log_if_due(lambda: self._describe_missing(key))
        if self._arrived is None and left_s < min(self._timings.answer_s, patience_s):
            self._arrived = self._ask_arrived(key, left_s)

    def _describe_missing(self, key: str) -> str:
        """The ranks of the launch that have not joined, where they should, and those that have."""
        info, arrived = self.session.info, self._ask_arrived(key, self._timings.last_answer_s)
        if arrived is None:
            return f"rank 0: {self.session.describe_silence()}"
        ranks = [self.members[place] for place in self._among]
        seen = sorted(ranks[index] for index in arrived)
        missing, where = sorted({*ranks} - {*seen}), self.session.client.server_address
        return f"ranks {missing} of {info.world_size} at {where}; ranks seen: {seen}"

    def check_lost(self, has_come: Callable[[], bool] = lambda: False) -> None:
        """Raise if a member is dead or has left, or what the caller knows besides.

        has_come: as in FailureDetector.check_members.
        """
        self._check_more()
        if self.parent is not None:
            self.parent.check_members(self.members, self.pending, has_come)
        if time.monotonic() > self._refresh_at:
            limit_s = min(self._timings.answer_s, self.pending.left_s)
            self.session.heartbeat.refresh(limit_s, self.key)
            self._refresh_at = time.monotonic() + self._timings.departed_s
        self._check_withdrawn()
        # The first to be lost comes first: others may have been ended because of it.
        lost = [rank for rank in self.session.heartbeat.lost if rank in self.members]
        if lost and self.parent is None:
            failures = self._failures(lost)
            names = " and ".join(map(str, failures))
            raise PeerLost(
                f"rank {self._rank} was in {self.pending.call} when {names} "
                "exited, or lost the connection to rank 0, before all of launch "
                f"{self.session.info.launch_id} had joined. Look at what was printed there last.",
                failures,
            )

    def _check_withdrawn(self) -> None:
        """Raise if another member has given up already."""
        data = self.session.heartbeat.group_failures.get(self.key)
        if data is None:
            return
        failure = GroupFailure.unpack(data)
        text = failure.describe_to(self._rank, self.pending)
        if failure.kind == CoordinatorError.__name__:
            raise CoordinatorError(f"{text}Look at what was printed there last.")
        raise CoordinatorTimeout(f"{text}{SAME_GROUP}")

    def fail(self, error: BaseException) -> None:
        """Publish an error of this rank alone, which so cannot join: the others wait for it."""
        if not isinstance(error, CoordinatorError):
            text = f"rank {self._rank}, which cannot join: {type(error).__name__}: {error}"
            self._withdraw(text, [self._rank], CoordinatorError)

    def _withdraw(
        self,
        text: str,
        missing: Sequence[int],
        kind: type[CoordinatorError] = CoordinatorTimeout,
    ) -> None:
        """Publish that this rank waits no more, for those who come later."""
        failure = GroupFailure.of(kind, self._rank, str(self.pending.call), text, missing)
        self.session.report(self.key, failure.pack())

    def _failures(self, ranks: Sequence[int]) -> list[RankFailure]:
        """Lost ranks of the launch, named with their processes if rank 0 can tell these."""
        reports, exited = self.session.reports(ranks, self._timings.last_answer_s), []
        for rank in ranks:
            text = f"rank {rank}" + (f" ({reports[rank].process})" if rank in reports else "")
            place, peer = self.members.index(rank), Peer.unseen(rank)
            exited.append(RankFailure(place, peer, FailureReason.EXITED, text=text))
        return exited

    def _ask_arrived(self, key: str, timeout_s: float) -> list[int] | None:
        try:
            return list(self.session.ask(Op.ARRIVED, key, timeout_s=timeout_s))
        except NO_ANSWER:
            return None

    def _without_server(self) -> CoordinatorError:
        """The error when rank 0 is gone. A process that ends closes its connections first; which
        rank it was shows a little later."""
        until = time.monotonic() + self._timings.exit_s
        while self.parent is not None and time.monotonic() < until:
            try:
                self.parent.check_members(self.members, self.pending)
            except CoordinatorError as error:
                return error
            time.sleep(self._timings.shm_wait_s)
        return PeerLost(
            f"rank {self._rank} was in {self.pending.call} when {self.session.describe_master()} "
            "was found to have ended, while ranks were joining. Look at what rank 0 printed last."
        )

    def _timeout(self, key: str) -> CoordinatorTimeout:
        info = self.session.info
        waited = f"rank {self._rank} waited {self.pending.timeout_s:g} s in {self.pending.call}"
        arrived = self._arrived
        if arrived is None:
            arrived = self._ask_arrived(key, self._timings.last_answer_s)
        if arrived is None:
            return CoordinatorTimeout(
                f"{waited} to join launch {info.launch_id} at {self.session.describe_master()} "
                f"but {self.session.describe_silence()}."
            )
        missing = [self.members[place] for i, place in enumerate(self._among) if i not in arrived]
        if self.parent is not None:
            text = self.parent.monitor.describe(missing)
            self._withdraw(text, missing)
            return CoordinatorTimeout(f"{waited} for {text}. {SAME_GROUP}")
        return CoordinatorTimeout(
            f"{waited} for ranks {missing} to join launch {info.launch_id}. Check that all "
            f"{info.world_size} ranks were started, and that the missing ones reach "
            f"{info.master_addr}:{info.master_port}."
        )
