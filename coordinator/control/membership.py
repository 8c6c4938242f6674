"""Membership: rank 0's record of each rank, from its connections and its heartbeats."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from coordinator.call_site import CallStatus
from coordinator.control.operations import CALLS, matches

LEFT, SUSPENDED = "left", "suspended"  # notes of a RankReport
MAX_FAILURES = 1 << 14  # of groups, that are kept: more than a launch has groups
MAX_GROUP_RANKS = 1 << 20  # of all groups together, that are kept
MAX_VIEW_S = 60.0  # for which one question of a viewer holds at most
NO_RANK = -1  # in place of a lost rank that has come again, as ranks count those that they know
MAX_LATE = 64  # ranks that are listed as not in a call: more than an error shows


class RankReport(NamedTuple):
    """A rank as rank 0 knows it.

    silent_s: since its last heartbeat. calls: of each of its groups, by key. note: LEFT, SUSPENDED
    or nothing. lost_s: since its last connection broke, or -1. is_unreachable: its host does not
    acknowledge what was sent to it. process: its host and pid, as it named itself.
    """

    silent_s: float
    calls: Mapping[str, CallStatus] | None
    note: str
    lost_s: float
    is_unreachable: bool
    process: str

    @classmethod
    def from_wire(cls, fields: Sequence[Any]) -> RankReport:
        report = cls(*fields)
        if report.calls is None:
            return report
        calls = {key: CallStatus(*status) for key, status in report.calls.items()}
        return report._replace(calls=calls)


Membership = Mapping[int, RankReport]  # by rank of the launch; empty if rank 0 does not answer


@dataclass
class Member:
    """A rank of the launch, from when it comes; one that comes again is another one."""

    token: bytes = b""  # of the process that is this rank
    process: str = ""  # its host and pid
    connections: set[int] = field(default_factory=set)  # descriptors
    heartbeat_at: float = 0.0
    is_suspended: bool = False
    calls: Any = None  # as it was last heard of, by group
    pinged_at: float = 0.0
    lost_at: float = 0.0
    page: bytes = b""  # that its host has shown to viewers
    shown_at: float = 0.0
    is_leaving: bool = False  # it said so on one of its connections; the others end without a word

    def has_left(self) -> bool:
        return not self.connections and not self.lost_at

    def is_well_in(self, group: str, now: float, silent_s: float) -> bool:
        """True if it runs, and has not closed this group."""
        is_heard = bool(self.connections) and now - self.heartbeat_at <= silent_s
        is_member = self.calls is None or group in self.calls
        return is_heard and is_member and not self.is_suspended

    def is_in(self, group: str, name: str, number: int) -> bool:
        """True if the call of this name and number was its last in the group."""
        status: Any = (self.calls or {}).get(group)
        return matches(status, CALLS[str]) and tuple(status[:2]) == (name, number)

    def report(self, now: float, is_unreachable: bool) -> RankReport:
        return RankReport(
            now - self.heartbeat_at,
            self.calls if matches(self.calls, CALLS) else None,
            LEFT if self.has_left() else SUSPENDED * self.is_suspended,
            now - self.lost_at if self.lost_at else -1.0,
            is_unreachable,
            self.process,
        )

    def is_silent(self, now: float, silent_s: float) -> bool:
        """True if it has sent heartbeats before, and none for silent_s."""
        return self.calls is not None and now - self.heartbeat_at > silent_s


class MembershipTable:
    """All ranks that have ever come, and what is known of them and their groups.

    silent_s: after which a rank may be unreachable. is_unreachable: does its host not acknowledge?
    """

    def __init__(
        self, silent_s: Callable[[], float], is_unreachable: Callable[[Member], bool]
    ) -> None:
        self._silent_s, self._is_unreachable = silent_s, is_unreachable
        self.members: dict[int, Member] = {}
        self._lost: list[int] = []  # NO_RANK for each that has come again
        self._failures: dict[str, bytes] = {}  # by group
        self._groups: dict[str, Sequence[int]] = {}  # of several nodes: their ranks
        self._viewed_until = 0.0

    def add_connection(self, rank: int, token: bytes, process: str, number: int) -> None:
        member = self.members.get(rank)
        if member is None or not member.connections:
            member = self.members[rank] = Member(token, process)
            self._lost = [NO_RANK if lost == rank else lost for lost in self._lost]
        member.connections.add(number)
        member.heartbeat_at, member.is_leaving = time.monotonic(), False

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
            self._lost.append(rank)

    def heartbeat(
        self, num_lost: int, groups: Iterable[str], states: Mapping[int, tuple[float, bool, Any]]
    ) -> tuple[list[int], dict[str, bytes], float]:
        """Note the states of ranks, as one of them tells: for how many seconds it has not heard of
        the rank, whether that is suspended, its calls.

        Returns the lost ranks after the first num_lost, the failures of these groups, and for how
        many seconds viewers look.
        """
        now = time.monotonic()
        for member, state in [(self.members[rank], states[rank]) for rank in states]:
            age_s, member.is_suspended, member.calls = state
            member.heartbeat_at = max(member.heartbeat_at, now - max(age_s, 0.0))
        failures = {group: self._failures[group] for group in groups if group in self._failures}
        return self._lost[max(num_lost, 0) :], failures, max(self._viewed_until - now, 0.0)

    def look(self, view_s: float) -> dict[int, tuple[float, bytes, str, bool]]:
        """For each rank the page that was shown, how many seconds ago, its process, and whether it
        has ended. Viewers look for view_s from now on."""
        now = time.monotonic()
        if now > self._viewed_until:
            for member in self.members.values():
                member.page = b""  # of an earlier time
        self._viewed_until = max(self._viewed_until, now + min(view_s, MAX_VIEW_S))
        return {
            rank: (now - member.shown_at, member.page, member.process, not member.connections)
            for rank, member in self.members.items()
        }

    def show(self, pages: Mapping[int, bytes]) -> None:
        """Note what ranks show to viewers."""
        now = time.monotonic()
        for member, page in [(self.members[rank], pages[rank]) for rank in pages]:
            member.page, member.shown_at = page, now

    def report(self, group: str, failure: bytes) -> None:
        """The first failure of a group stays. Raises ValueError without a group."""
        if not group:
            raise ValueError("the failure of no group")
        self._failures.setdefault(group, failure)
        if len(self._failures) > MAX_FAILURES:
            del self._failures[next(iter(self._failures))]

    def add_group(self, group: str, ranks: Sequence[int]) -> None:
        """Note the ranks of a group, for unwell(): of one that is forgotten it takes all ranks."""
        self._groups[group] = ranks
        while sum(map(len, self._groups.values())) > MAX_GROUP_RANKS:
            del self._groups[next(iter(self._groups))]

    def reports(self, ranks: Iterable[int]) -> dict[int, RankReport]:
        """A RankReport of each of these ranks that has ever come."""
        now, silent_s = time.monotonic(), self._silent_s()
        members = {rank: self.members[rank] for rank in ranks if rank in self.members}
        return {
            rank: member.report(
                now, now - member.heartbeat_at > silent_s and self._is_unreachable(member)
            )
            for rank, member in members.items()
        }

    def unwell(self, group: str, name: str, number: int) -> dict[int, RankReport]:
        """The ranks of a group that are not well in it, so that most answers are empty.

        name, number: of a call. If given, also those that are not in it; of all the first MAX_LATE.
        """
        now, silent_s = time.monotonic(), self._silent_s()
        members = {rank: self.members[rank] for rank in self._groups.get(group, self.members)}
        unwell = [
            rank for rank, member in members.items() if not member.is_well_in(group, now, silent_s)
        ]
        if not name:
            return self.reports(unwell)
        late = (rank for rank, member in members.items() if not member.is_in(group, name, number))
        return self.reports(itertools.islice(dict.fromkeys([*unwell, *late]), MAX_LATE))
