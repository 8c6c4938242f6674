"""Tells peers that closed a communicator from peers that crashed: the processes of both exit."""

from __future__ import annotations

from contextlib import suppress

from communicator import timings
from coordinator import Coordinator, CoordinatorError, Peer


class ExitNotice:
    """A key of the Coordinator for each rank, written when it has closed one communicator.

    name: the communicator's, unique in this Coordinator. Not collective, any thread.
    """

    def __init__(self, coor: Coordinator, name: str) -> None:
        self._coor, self._prefix = coor, f"communicator/{name}/left/"
        self._announced: set[int] = set()  # a notice that was read is not read again

    def announce(self) -> None:
        """Write that this rank has closed."""
        with suppress(CoordinatorError):  # rank 0 has exited, which the others notice themselves
            timeout_s = timings.TIMINGS.exit_notice_s
            self._coor.put(f"{self._prefix}{self._coor.rank}", b"1", timeout_s=timeout_s)

    def unannounced_exits(self) -> list[Peer]:
        """The peers of this host that are known dead and have not announced it."""
        peers = enumerate(self._coor.peers)
        return [
            peer for rank, peer in peers if peer.is_known_dead() and not self._has_announced(rank)
        ]

    def _has_announced(self, rank: int) -> bool:
        if rank not in self._announced:
            with suppress(CoordinatorError):  # unreadable counts as not announced
                timeout_s = timings.TIMINGS.exit_notice_s
                if self._coor.get(f"{self._prefix}{rank}", timeout_s=timeout_s):
                    self._announced.add(rank)
        return rank in self._announced
