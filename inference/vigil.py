"""Notices a stopped rank of any team, and lets go of what all others wait in.

vigil = Vigil(coor, comms, holds)        # coor: over the ranks of all teams, the driver first
vigil.explained(work)                    # what fails meanwhile names the rank that is stopped
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from communicator import Communicator, CommunicatorError, Unsupported
from coordinator import Coordinator, CoordinatorError
from inference.errors import PeerLost
from inference.lookout import LOOK_S, Lookout

T = TypeVar("T")


class Vigil:
    """Looks after all ranks of a model while its driver waits for them.

    comms: in which this rank waits for others. holds: what each rank has, for errors.
    """

    def __init__(self, coor: Coordinator, comms: Iterable[Communicator], holds: Mapping[int, str]):
        self.coor, self.holds, self._comms = coor, holds, list(comms)
        self.is_waiting = coor.rank != 0
        self.verdict = ""
        self._is_decided = threading.Event()
        store = coor.store("inference teams")
        self._lookout = Lookout(coor, store, lambda: self.is_waiting, self._give_up)
        if any(peer.pid != coor.peers[0].pid for peer in coor.peers):
            self._lookout.start()

    def close(self) -> None:
        self._lookout.over.set()

    def explained(self, work: Callable[[], T]) -> T:
        """What work returns. If others are lost in it, PeerLost names the rank that is stopped."""
        try:
            return work()
        except (CommunicatorError, CoordinatorError, PeerLost) as error:
            if self._lookout.is_alive():
                self._is_decided.wait(2 * LOOK_S)  # who hears of it first leaves the others
            if self.verdict:
                raise PeerLost(self.verdict) from error
            raise

    def _give_up(self, culprit: int, how: str) -> None:
        self.verdict = (
            f"rank {self.coor.ranks[self.coor.rank]}: {self.coor.peers[culprit]} {how}. It holds "
            f"its part of {self.holds[culprit]}, so the model cannot run any more; find out what "
            "stopped it, and start all ranks again."
        )
        self._is_decided.set()
        if self.coor.rank == 0:
            self._lookout.over.wait(2 * LOOK_S)  # until the others have heard of it
        for comm in self._comms:
            self._abort(comm)

    def _abort(self, comm: Any) -> None:
        try:
            comm.abort()
        except Unsupported as error:  # gloo and MPI: all that can be done is to say so
            warnings.warn(f"{self.verdict} ({error})", stacklevel=2)
