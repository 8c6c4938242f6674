"""The ranks in a circle, 0 -> 1 -> ... -> N -> 0: each hears only the one before it.

Whatever happens to a stage travels the same way, so nobody waits for somebody who will not speak:
an error is passed on in place of the result, and a rank whose neighbour died says so to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from communicator import CommunicatorError

from .errors import PeerLost
from .frames import Kind, Link, Message

FOREVER_S = 10.0 * 365 * 24 * 3600


class Ring:
    """This rank's two neighbours.

    holds: what each rank has, for errors. close: gives back the communicator and what is under it.
    """

    def __init__(self, comm: Any, holds: Mapping[int, str], close: Callable[[], None]):
        self.comm, self.holds, self.close = comm, holds, close
        self.rank, self.world_size = comm.rank, comm.world_size
        comm.timeout_s = FOREVER_S  # a user may think for an hour; a death is noticed without it
        self.next = Link(comm, (self.rank + 1) % self.world_size)
        self.previous = Link(comm, (self.rank - 1) % self.world_size)

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
        return PeerLost(
            f"rank {self.rank}: {self.comm.coor.peers[peer]} is gone. It held {self.holds[peer]}, "
            "so the model "
            f"cannot run any more; start all ranks again. ({error})"
        )
