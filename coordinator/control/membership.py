"""Membership: rank 0's record of each rank, from its connections and its heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coordinator.call_site import CallStatus

LEFT, SUSPENDED = "left", "suspended"  # notes of a RankReport
MAX_NEWS = 1 << 14  # that are kept: more than a launch has groups


class RankReport(NamedTuple):
    """A rank as rank 0 knows it.

    silent_s: since its last heartbeat. calls: of each of its groups, by key. note: LEFT, SUSPENDED
    or nothing. lost_s: since its last connection broke, or -1. is_unreachable: its host does not
    acknowledge what was sent to it.
    """

    silent_s: float
    calls: Mapping[str, CallStatus] | None
    note: str
    lost_s: float
    is_unreachable: bool

    @classmethod
    def from_wire(cls, fields: Sequence[Any]) -> RankReport:
        silent_s, calls, note, lost_s, is_unreachable = fields
        if calls is not None:
            calls = {key: CallStatus(*status) for key, status in calls.items()}
        return cls(silent_s, calls, note, lost_s, is_unreachable)


Membership = Mapping[int, RankReport]  # by rank of the launch; empty if rank 0 does not answer


@dataclass
class Member:
    """A rank of the launch, as long as rank 0 lives."""

    token: bytes = b""  # of the process that is this rank
    process: str = ""  # its host and pid
    connections: set[int] = field(default_factory=set)  # descriptors
    heartbeat_at: float = 0.0
    pinged_at: float = 0.0
    calls: Any = None  # of its last heartbeat, by group
    lost_at: float = 0.0
    is_leaving: bool = False  # it said so on one of its connections; the others end without a word

    def has_left(self) -> bool:
        return not self.connections and not self.lost_at

    def is_well_in(self, group: str, now: float, silent_s: float) -> bool:
        """True if it runs, and has not closed this group; False without a group."""
        is_heard = bool(self.connections) and now - self.heartbeat_at <= silent_s
        return bool(group) and is_heard and (self.calls is None or group in self.calls)

    def is_silent(self, now: float, silent_s: float) -> bool:
        """True if it has sent heartbeats before, and none for silent_s."""
        return self.calls is not None and now - self.heartbeat_at > silent_s


class MembershipTable:
    """All ranks that have ever come, and the news of them that every rank is to hear.

    News: (group, failure) where a group failed, ("", rank) where a rank's last connection broke.
    A heartbeat brings those that its rank has not heard of: of a rank that is MAX_NEWS behind, some
    twice and the oldest never.
    """

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self._suspended: dict[int, Sequence[int]] = {}  # by the rank of their host that says so
        self._news: list[tuple[str, Any]] = []
        self._num_forgotten = 0
        self._failed_groups: set[str] = set()

    def add_connection(self, rank: int, token: bytes, process: str, number: int) -> None:
        member = self.members.setdefault(rank, Member())
        member.token, member.process = token, process
        member.connections.add(number)
        member.lost_at, member.heartbeat_at = 0.0, time.monotonic()
        member.is_leaving = False

    def remove_connection(self, rank: int, number: int) -> None:
        self.members[rank].connections.discard(number)

    def mark_leaving(self, rank: int) -> None:
        """The rank said LEAVE, so that no end of a connection counts as its death."""
        self.members[rank].is_leaving = True

    def mark_lost(self, rank: int) -> None:
        """A connection broke: if it was the rank's last, the rank is lost."""
        member = self.members[rank]
        if not member.connections and not member.is_leaving:
            member.lost_at = time.monotonic()
            self._tell("", rank)

    def heartbeat(
        self, rank: int, num_news: int, calls: Any, suspended: Sequence[int]
    ) -> list[tuple[str, Any]]:
        member = self.members[rank]
        member.heartbeat_at, member.calls = time.monotonic(), calls
        self._suspended.pop(rank, None)
        if suspended:
            self._suspended[rank] = suspended
        return self._news[max(num_news - self._num_forgotten, 0) :]

    def report(self, group: str, failure: bytes) -> None:
        """The first failure of a group stays. Raises ValueError without a group."""
        if not group:
            raise ValueError("the failure of no group")
        if group not in self._failed_groups:
            self._failed_groups.add(group)
            self._tell(group, failure)

    @property
    def num_news(self) -> int:
        """The number of all news so far, the forgotten ones too."""
        return self._num_forgotten + len(self._news)

    def _tell(self, group: str, update: Any) -> None:
        self._news.append((group, update))
        if len(self._news) > MAX_NEWS:
            self._failed_groups.discard(self._news.pop(0)[0])
            self._num_forgotten += 1

    def processes(self, ranks: Sequence[int]) -> list[str]:
        """The process of each rank that has ever come, as it named itself."""
        return [self.members[rank].process for rank in ranks]

    def reports(
        self,
        group: str,
        ranks: Sequence[int],
        silent_s: float,
        is_unreachable: Callable[[Member], bool],
    ) -> dict[int, RankReport]:
        """A RankReport of each of these ranks, or of all if there are none.

        Of a group: only of those that are not well in it, so that most answers are empty.
        is_unreachable: does its host not acknowledge? Asked about ranks that were silent_s silent.
        """
        now = time.monotonic()
        suspended = {rank for ranks in self._suspended.values() for rank in ranks}
        members = {
            rank: self.members[rank] for rank in ranks or self.members if rank in self.members
        }
        return {
            rank: RankReport(
                now - member.heartbeat_at,
                member.calls,
                LEFT if member.has_left() else SUSPENDED * (rank in suspended),
                now - member.lost_at if member.lost_at else -1.0,
                now - member.heartbeat_at > silent_s and is_unreachable(member),
            )
            for rank, member in members.items()
            if rank in suspended or not member.is_well_in(group, now, silent_s)
        }
