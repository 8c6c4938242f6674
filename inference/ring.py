"""The ranks in a circle, 0 -> 1 -> ... -> N -> 0: each hears only the one before it.

What goes wrong in a stage travels the same way, in place of the result, so nobody waits for
somebody who will not speak. A rank that loses a neighbour writes down whom it accuses and closes
its end; the next one notices that, and follows the accusations to who was lost first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError

from communicator import CommunicatorError
from inference.errors import PeerLost
from inference.frames import Kind, Link, Message

FOREVER_S = 20.0 * 24 * 3600
"""How long a rank waits for the next message: the master's user may think, a death is noticed."""

ACCUSATION_S = 1.0
"""How long a rank that is gone may have taken to say whom it had lost itself."""


class Ring:
    """This rank's two neighbours.

    outward, homeward: communicators over the same ranks; what comes back to the master comes over
        the second, as it sends and receives at the same time from different threads.
    holds: what each rank has, for errors. close: gives back the communicators and all under them.
    """

    def __init__(
        self, outward: Any, homeward: Any, holds: Mapping[int, str], close: Callable[[], None]
    ):
        self.coor, self.holds, self.close = outward.coor, holds, close
        self.rank, self.world_size = outward.rank, outward.world_size
        self.accusations = self.coor.store("inference accusations")
        last = self.rank == self.world_size - 1
        self.next = Link(homeward if last else outward, (self.rank + 1) % self.world_size)
        self.previous = Link(outward if self.rank else homeward, (self.rank - 1) % self.world_size)

    def send(self, message: Message) -> None:
        try:
            self.next.send(message)
        except CommunicatorError as error:
            raise self._lost(self.next.peer, error) from error

    def receive(self) -> Message:
        try:
            return self.previous.receive()
        except CommunicatorError as error:
            raise self._lost(self.previous.peer, error) from error

    def leave(self, code: int) -> None:
        """The master's goodbye: everybody passes it on and goes; returns once it has come round."""
        try:
            self.send(Message(Kind.LEAVE, ints=[code]))
            while self.receive().kind is not Kind.LEAVE:
                pass
        except PeerLost:
            pass
        finally:
            self.close()

    def _lost(self, peer: int, error: CommunicatorError) -> PeerLost:
        culprit = self._culprit(peer)
        return PeerLost(
            f"rank {self.rank}: {self.coor.peers[culprit]} is gone. It held "
            f"{self.holds[culprit]}, so the model cannot run any more; start all ranks again. "
            f"({error})"
        )

    def _culprit(self, peer: int) -> int:
        """Who was lost first, if `peer` is the neighbour that this rank lost."""
        passed = {self.rank}
        accused = peer
        try:
            self.accusations.set(str(self.rank), str(peer))
            while accused not in passed:
                passed.add(accused)
                accused = self._accused_by(accused)
        except DistNetworkError:
            return 0  # the master keeps the accusations, so it went first
        return peer if accused == self.rank else accused

    def _accused_by(self, peer: int) -> int:
        """Whom `peer` had lost; itself if it lost nobody."""
        key = str(peer)
        if not self.accusations.check([key]) and self.coor.peers[peer].is_seen_dead():
            return peer
        try:
            self.accusations.wait([key], timedelta(seconds=ACCUSATION_S))
        except DistStoreError:
            return peer
        return int(self.accusations.get(key))
