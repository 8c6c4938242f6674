"""One rank of a group: its names in errors, its numbered calls, and whether it may make any."""

from __future__ import annotations

import math
import os
import threading

import launcher
from coordinator.call_site import PendingCall, begin_call, caller
from coordinator.control.session import this_process
from coordinator.errors import CoordinatorError
from coordinator.peers import Peer


class GroupMember:
    """The base of what a Coordinator can do."""

    info: launcher.LaunchInfo
    rank: int
    ranks: tuple[int, ...]  # of the launch, by rank of this group
    world_size: int
    peers: tuple[Peer, ...]
    timeout_s: float
    _pid: int
    _closed: bool
    _broken: CoordinatorError | None
    _counts: dict[object, int]  # of splits and stores, by name
    _call: PendingCall | None  # the collective call that a thread is in
    _busy: threading.Lock

    def is_master(self) -> bool:
        """True on rank 0 of the group."""
        return self.rank == 0

    def rank_name(self, rank: int | None = None) -> str:
        """A rank of this group in errors, or this one: numbered as in the launch, like all."""
        return f"rank {self.ranks[self.rank if rank is None else rank]}"

    def describe_numbering(self) -> str:
        """The beginning of a library's error, which numbers the ranks of this group from 0.

        "" if the launch numbers them so. Not collective.
        """
        if self.ranks == tuple(range(len(self.ranks))):
            return ""
        names = ", ".join(map(self.rank_name, range(len(self.ranks))))
        return f"{self._me}, in the group of {names:.200}, numbered from 0 here: "

    @property
    def _me(self) -> str:
        return self.rank_name()

    def pending_call(self) -> PendingCall | None:
        """The collective call that a thread of this rank is in; for those who look at it."""
        return self._call if self._busy.locked() else None

    def _begin_call(
        self, name: str, timeout_s: float | None, number: int | None = None
    ) -> PendingCall:
        """A call that begins now; numbered by its name, unless it is a collective one."""
        if number is None:
            number = self._count(("call", name)) + 1
        return begin_call(name, number, self._limit(timeout_s))

    def _limit(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else self.checked_timeout(timeout_s)

    def checked_timeout(self, timeout_s: float) -> float:
        """The deadline, in seconds. Raises ValueError for what is none."""
        if not hasattr(timeout_s, "__float__") or not 0 <= timeout_s < math.inf:
            raise ValueError(
                f"rank {self.info.rank}: timeout_s={timeout_s!r} is not a deadline. Give seconds: "
                "a number from 0 on, and not infinity, so that nothing hangs for ever."
            )
        return float(min(timeout_s, threading.TIMEOUT_MAX))  # no lock waits longer

    def _count(self, key: object) -> int:
        """The number of earlier calls with this key: equal on ranks that make the same calls."""
        number = self._counts.get(key, 0)
        self._counts[key] = number + 1
        return number

    def _check_open(self, name: str, *, may_be_broken: bool = False) -> None:
        """Raise in a forked process, after close(), and once the ranks are desynchronised."""
        if self._pid != this_process.pid:
            raise CoordinatorError(
                f"{self._me}: {name} ({caller()}) in process {os.getpid()}, which was forked from "
                f"the rank, process {self._pid}. Only the rank itself may use this Coordinator: "
                "have it pass on what the child needs."
            )
        if self._closed:
            raise CoordinatorError(
                f"{self._me}: {name} ({caller()}) on a closed Coordinator. Make a new one, or "
                "close it later."
            )
        if self._broken is not None and not may_be_broken:
            raise CoordinatorError(
                f"{self._me}: {name} ({caller()}) cannot run: a failure has desynchronised "
                f"the ranks. Close this Coordinator and start over. It was: {self._broken}"
            ) from self._broken

    # ---- arguments ----

    def _bytes(self, data: object, verb: str) -> bytes:
        if isinstance(data, bytes):
            return data
        if isinstance(data, bytearray | memoryview):
            return bytes(data)
        raise ValueError(f"{self._me} {verb} {type(data).__name__}, not bytes")

    def _check_rank(self, rank: int, name: str) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise ValueError(
                f"{self._me}: {name}={rank!r} is not a rank of this group of {self.world_size}"
            )
