"""Tells peers that closed a communicator from peers that crashed: the processes of both exit."""

from __future__ import annotations

from collections.abc import Iterable

from communicator import timings
from coordinator import Coordinator, RankFailure


class ExitNotice:
    """A key of a shared store for each rank, written when it has closed one communicator.

    Collective to create, and then not. Any thread.
    """

    def __init__(self, coor: Coordinator) -> None:
        self._rank = coor.rank
        self._store = coor.store("exit notices", timeout_s=timings.TIMINGS.exit_notice_s)
        self._announced: set[int] = set()  # a notice that was read is not read again

    def announce(self) -> None:
        """Write that this rank has closed."""
        try:
            self._store.set(str(self._rank), "closed")
        except RuntimeError:
            pass  # rank 0 has exited, which the others notice themselves

    def unannounced(self, failures: Iterable[RankFailure]) -> tuple[RankFailure, ...]:
        """The failed ranks that had not closed."""
        return tuple(failure for failure in failures if not self._has_announced(failure.rank))

    def _has_announced(self, rank: int) -> bool:
        if rank not in self._announced:
            try:
                if self._store.check([str(rank)]):
                    self._announced.add(rank)
            except RuntimeError:
                return False  # rank 0 has exited: unreadable counts as not announced
        return rank in self._announced
