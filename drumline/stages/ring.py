"""The ring of pipeline stages, 0 -> 1 -> ... -> N -> 0: each rank receives from the one before.

An error in a stage travels the same way, in place of the result, so nobody waits for a rank that
will not send. The loss of a rank does not: the failure detector notifies every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from coordinator import Coordinator
from drumline.core.group_monitor import GroupMonitor
from drumline.errors import DrumlineError, PeerLost
from drumline.stages.device_link import DeviceLink
from drumline.stages.messages import Message, MessageChannel, MessageKind, OnPredicted


class StageRing(Protocol):
    """The way of messages through a stage, on one of the ranks that hold it.

    hop: of the stage, by which programs know it. check_all_failed: return if a step failed on all
    ranks of the stage, or raise PeerLost. check_whole: raise DrumlineError for tensors that a layer
    hands on and of which each rank of the stage has a part.
    """

    rank: int
    hop: int
    coor: Coordinator

    def receive(self, on_predicted: OnPredicted | None = None) -> Message: ...
    def send(self, message: Message) -> Any: ...
    def check_all_failed(self, failure: str) -> None: ...
    def check_whole(self, tensors: Sequence[torch.Tensor], module: str) -> None: ...
    def close(self, error: BaseException | None = None) -> None: ...


class Ring:
    """This rank's two neighbours.

    forward, back: communicators over the same ranks. What returns to rank 0 comes over the second,
        as rank 0 sends and receives at the same time from different threads.
    layers_by_rank: in words, for errors. resources: the communicators and all that they stand on.
    monitor: over more ranks than the ring's, if given.
    on_device: forward and back between the devices of the ranks, for tensors that lie there; where
        there are none, all tensors go through the memory of the CPU.
    """

    def __init__(
        self,
        forward: Any,
        back: Any,
        layers_by_rank: Mapping[int, str],
        resources: contextlib.ExitStack,
        monitor: GroupMonitor | None = None,
        on_device: Sequence[Any] = (),
    ):
        self.coor, self._resources = forward.coor, resources
        self.rank = self.hop = forward.rank
        self.world_size = forward.world_size
        self.layers_by_rank = layers_by_rank
        # The way back on the device ends first, lest a stage pass on what it could not receive.
        comms = [*reversed(on_device), forward, back]
        self.monitor = monitor or GroupMonitor(self.coor, comms, layers_by_rank)
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        out, into = after == 0, self.rank == 0  # whether by the way back
        links: list[DeviceLink | None] = [None, None]
        if on_device:
            links = [DeviceLink(on_device[out], after), DeviceLink(on_device[into], before, into)]
        self.next = MessageChannel(back if out else forward, after, links[0])
        self.previous = MessageChannel(back if into else forward, before, links[1])

    def send(self, message: Message) -> Message | None:
        """Pass a message on. Returns the reply where it is known at once; here it comes round."""
        self.monitor.waits.append(None)
        try:
            self.next.send(message)
        except DrumlineError as error:
            raise self._lost(self.next.peer, error) from error
        finally:
            self.monitor.waits.pop()
        return None

    def receive(self, on_predicted: OnPredicted | None = None) -> Message:
        """The next message. Blocks until it is here; PeerLost if a rank fails."""
        self.monitor.waits.append(None)
        try:
            message = self.previous.receive(on_predicted)
            if self.previous.link is not None and self.monitor.has_failed:
                # A stage that lost the one before has passed on what it never received.
                raise DrumlineError("a rank failed while tensors were on their way")
            return message
        except DrumlineError as error:
            raise self._lost(self.previous.peer, error) from error
        finally:
            self.monitor.waits.pop()

    def check_all_failed(self, failure: str) -> None:
        """Return: this rank is all of its stage."""

    def check_whole(self, tensors: Sequence[torch.Tensor], module: str) -> None:
        """Return, for the same reason."""

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
            # It overtakes nothing, so replies that nobody waits for any longer come first.
            self.send(Message(MessageKind.LEAVE, ints=[code]))
            while self.receive().kind is not MessageKind.LEAVE:
                pass

    def _lost(self, neighbour: int, error: DrumlineError) -> PeerLost:
        self.monitor.raise_cause(error)
        return PeerLost(
            f"{self.coor.rank_name(self.rank)} lost its connection to "
            f"{self.coor.peers[neighbour]}, which holds {self.layers_by_rank[neighbour]}, so the "
            "model cannot run any longer.",
            advice=f"Start all ranks again. ({error})",
        )
