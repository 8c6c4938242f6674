"""The ring of pipeline stages, 0 -> 1 -> ... -> N -> 0: each rank receives from the one before.

An error in a stage travels the same way, in place of the result, so nobody waits for a rank that
will not send. The loss of a rank does not: the failure detector notifies every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from drumline.core.group_monitor import GroupMonitor
from drumline.errors import DrumlineError, PeerLost
from drumline.stages.messages import Message, MessageChannel, MessageKind, OnPredicted


class Ring:
    """This rank's two neighbours.

    forward, back: communicators over the same ranks. What returns to rank 0 comes over the second,
        as rank 0 sends and receives at the same time from different threads.
    layers_by_rank: in words, for errors. resources: the communicators and all that they stand on.
    monitor: over more ranks than the ring's, if given.
    """

    def __init__(
        self,
        forward: Any,
        back: Any,
        layers_by_rank: Mapping[int, str],
        resources: contextlib.ExitStack,
        monitor: GroupMonitor | None = None,
    ):
        self.coor, self._resources = forward.coor, resources
        self.rank, self.world_size = forward.rank, forward.world_size
        self.layers_by_rank = layers_by_rank
        self.monitor = monitor or GroupMonitor(self.coor, [forward, back], layers_by_rank)
        last = self.rank == self.world_size - 1
        self.next = MessageChannel(back if last else forward, (self.rank + 1) % self.world_size)
        self.previous = MessageChannel(
            forward if self.rank else back, (self.rank - 1) % self.world_size
        )

    def send(self, message: Message) -> Message | None:
        """Pass a message on. Returns the reply where it is known at once; here it comes round."""
        self.monitor.is_waiting = True
        try:
            self.next.send(message)
        except DrumlineError as error:
            raise self._lost(self.next.peer, error) from error
        return None

    def receive(self, on_predicted: OnPredicted | None = None) -> Message:
        """The next message. Blocks until it is here; PeerLost if a rank fails."""
        self.monitor.is_waiting = True
        try:
            return self.previous.receive(on_predicted)
        except DrumlineError as error:
            raise self._lost(self.previous.peer, error) from error
        finally:
            self.monitor.is_waiting = False

    def close(self, error: BaseException | None = None) -> None:
        """Give back the communicators and all under them; without waiting for other ranks if there
        was an error."""
        self.monitor.close()
        self._resources.__exit__(type(error) if error else None, error, None)

    def leave(self, code: int) -> None:
        """Release the other ranks, which end with this exit code, and close. For rank 0."""
        try:
            self.release_stages(code)
        finally:
            self.close()

    def release_stages(self, code: int) -> None:
        """Send LEAVE, which every rank passes on before it ends; returns once it has come round."""
        with contextlib.suppress(PeerLost):
            # It overtakes nothing, so replies that nobody waits for any more come first.
            self.send(Message(MessageKind.LEAVE, ints=[code]))
            while self.receive().kind is not MessageKind.LEAVE:
                pass

    def _lost(self, neighbour: int, error: DrumlineError) -> PeerLost:
        self.monitor.raise_cause(error)
        return PeerLost(
            f"rank {self.coor.ranks[self.rank]} lost its connection to "
            f"{self.coor.peers[neighbour]}, which holds {self.layers_by_rank[neighbour]}, so the "
            f"model cannot run any more. Start all ranks again. ({error})"
        )
