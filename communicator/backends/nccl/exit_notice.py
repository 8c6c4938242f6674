"""Who left a communicator in good order, and who died: both are processes that are gone."""

from __future__ import annotations

from contextlib import suppress

from coordinator import Coordinator, CoordinatorError, Peer

ANSWER_S = 5.0


class Farewell:
    """A key of the Coordinator for each rank, put when it has closed one communicator.

    name: the communicator's, no other of this Coordinator has it. Not collective, any thread.
    """

    def __init__(self, coor: Coordinator, name: str) -> None:
        self._coor, self._prefix = coor, f"communicator/{name}/left/"
        self._left: set[int] = set()  # what is once known is not asked for again

    def say(self) -> None:
        """This rank has done all it had to do."""
        with suppress(CoordinatorError):  # rank 0 is gone: the others see that by themselves
            self._coor.put(f"{self._prefix}{self._coor.rank}", b"1", timeout_s=ANSWER_S)

    def died(self) -> list[Peer]:
        """The peers that are seen dead on this host, without having left before."""
        peers = enumerate(self._coor.peers)
        return [peer for rank, peer in peers if peer.is_known_dead() and not self._has_left(rank)]

    def _has_left(self, rank: int) -> bool:
        if rank not in self._left:
            with suppress(CoordinatorError):  # nobody can tell any more: not in good order
                if self._coor.get(f"{self._prefix}{rank}", timeout_s=ANSWER_S):
                    self._left.add(rank)
        return rank in self._left
