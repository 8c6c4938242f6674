"""Pipeline stages whose layers are sharded over a TP group, all ranks of which run each call.

Rank 0 only drives: every layer, its own too, is called by a message. The message goes to the first
group, and from there round the ring of the groups' first ranks, the leaders; each leader broadcasts
what it receives to its group before it runs it. Only leaders send to other groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from communicator import Communicator
from coordinator import CoordinatorError, DrumlineError
from drumline.core.group_monitor import GroupMonitor
from drumline.errors import PeerLost
from drumline.stages.device_link import DeviceLink
from drumline.stages.messages import Message, MessageChannel, MessageKind, OnPredicted
from drumline.stages.program import NOTHING
from drumline.stages.ring import Ring
from drumline.stages.stage import Stage
from drumline.timings import TIMINGS

T = TypeVar("T")


class StageGroup:
    """The ranks of one stage.

    rank: of this one among all ranks of the model. frames: over the group, its leader being rank 0.
    monitor: over all ranks of the model. on_device: over the group's devices, that of the layers'
        collectives, for tensors that lie there; without it they go through the memory of the CPU.
    """

    def __init__(
        self,
        rank: int,
        frames: Communicator,
        monitor: GroupMonitor,
        on_device: Communicator | None = None,
    ):
        self.rank, self.coor, self.monitor = rank, frames.coor, monitor
        link = DeviceLink(_BroadcastCommunicator(on_device), 0) if on_device else None
        self.channel = MessageChannel(_BroadcastCommunicator(frames), 0, link)

    def broadcast(self, message: Message) -> None:
        """Send the leader's message to all other ranks of the group."""
        if self.coor.world_size > 1:
            self._together(lambda: self.channel.send(message))

    def receive(self, on_predicted: OnPredicted | None = None) -> Message:
        return self._together(lambda: self.channel.receive(on_predicted))

    def check_all_failed(self, failure: str) -> None:
        """Return if a step failed on all ranks of the group. Collective.

        Otherwise the others wait in the step for ever, so it is PeerLost on all ranks of the model.
        """
        # An error of the model itself is the same on all ranks of the group, and each of them comes
        # here; one that a single rank has, such as too little memory, leaves it alone here.
        if self.monitor.has_failed:  # which made the step fail: the group will not agree on it
            self.monitor.raise_cause(DrumlineError(failure))
        self._together(
            lambda: self.coor.allgather(b"failed", timeout_s=TIMINGS.step_agreement_s), failure
        )

    def check_whole(self, tensors: Sequence[torch.Tensor], module: str) -> None:
        """Raise DrumlineError on all ranks of the group if what they hand on differs. Collective.

        Gemma's later layers take keys and values of earlier ones, and messages carry the leader's.
        """
        sums = repr([float(tensor.double().sum()) for tensor in tensors]).encode()
        if len({*self._together(lambda: self.coor.allgather(sums))}) > 1:
            raise DrumlineError(
                f"{module} hands on to later layers what is split over the ranks of a TP group, "
                "and messages carry the part of one; load the model with tp= alone, or with "
                "device_map= alone."
            )

    def _together(self, work: Callable[[], T], own_failure: str = "") -> T:
        """The result of work, in which all ranks of the group take part.

        A rank that does not do it with its group is reported to all ranks of the model."""
        try:
            return work()
        except DrumlineError as error:
            self.monitor.raise_cause(error)
            why, coor = own_failure or str(error), self.monitor.coor
            coor.report_failure(coor.rank, f"is desynchronised from its TP group: {why}")
            raise PeerLost(
                f"{self.coor.rank_name()}: the ranks {list(self.coor.ranks)}, which hold "
                f"{self.monitor.layers_by_rank[self.rank]} each, are desynchronised, so the model "
                f"cannot run any longer. Start all ranks again.\nThis rank failed first: {why}"
            ) from error


class _BroadcastCommunicator:
    """The channel to a group: what is sent to one peer reaches all of them."""

    def __init__(self, comm: Communicator):
        self.comm, self.device = comm, comm.device

    def group(self) -> contextlib.AbstractContextManager[None]:
        """Nothing: broadcasts follow each other."""
        return contextlib.nullcontext()

    def send(self, frame: torch.Tensor, peer: int) -> None:
        self.comm.broadcast(frame, peer)

    def recv(self, frame: torch.Tensor, peer: int) -> torch.Tensor:
        return self.comm.broadcast(frame, peer)


class TpRing:
    """The ring for a rank of a TP group: its leader passes on what comes, to the group too.

    hop: of the stage. leaders: the ring of all groups' leaders; None on other ranks, or where there
    is one group. resources: the communicators and all that they stand on.
    """

    def __init__(
        self, group: StageGroup, hop: int, leaders: Ring | None, resources: contextlib.ExitStack
    ):
        self.group, self.hop, self.leaders = group, hop, leaders
        self.rank, self.coor, self.check_all_failed = group.rank, group.coor, group.check_all_failed
        self.check_whole = group.check_whole
        self._resources = resources

    def receive(self, on_predicted: OnPredicted | None = None) -> Message:
        if self.leaders is None:
            return self.group.receive(on_predicted)
        message = self.leaders.receive(on_predicted)
        self.group.broadcast(message)
        return message

    def send(self, message: Message) -> None:
        """Pass a message on, if this rank leads its group: the leader sends for all."""
        if self.leaders is not None:
            self.leaders.send(message)

    def close(self, error: BaseException | None = None) -> None:
        self.group.monitor.close()
        self._resources.__exit__(type(error) if error else None, error, None)


class TpDriverRing:
    """The ring for rank 0: the first stage is one like the others, and this rank leads it."""

    def __init__(self, stage: Stage, ring: TpRing):
        self.stage, self.group, self.leaders = stage, ring.group, ring.leaders
        self.rank, self.coor, self.close = ring.rank, ring.coor, ring.close
        self.next = self.group.channel if self.leaders is None else self.leaders.next

    @torch.no_grad()  # and not inference_mode, as the results are the user's
    def send(self, message: Message) -> Message | None:
        """Run the first stage and pass the message on. Returns the reply, if no other group has
        anything to do with it."""
        is_call = message.kind is MessageKind.CALL
        self.group.monitor.waits.append(None)
        try:
            # The group has the message before its leader runs it: in the layers' collectives the
            # leader waits for all others.
            self.group.broadcast(message)
            reply = self.stage._reply(message) if is_call else message
        finally:
            self.group.monitor.waits.pop()
        if self.leaders is not None and not (is_call and self._ends_here(message)):
            return self.leaders.send(reply)
        return reply

    def _ends_here(self, message: Message) -> bool:
        """True if all steps of a message are in the first stage."""
        route = self.stage.routes.get(message.program)
        if route is None or route.program.operations != NOTHING:
            return False
        return all(step.rank <= self.stage.ring.hop for step in route.program.steps)

    def receive(self) -> Message:
        assert self.leaders is not None
        return self.leaders.receive()

    def leave(self, code: int) -> None:
        """Release every group, and close; returns once LEAVE has come round."""
        with contextlib.suppress(PeerLost, CoordinatorError):
            self.group.broadcast(Message(MessageKind.LEAVE, ints=[code]))
        try:
            if self.leaders is not None:
                self.leaders.release_stages(code)
        finally:
            self.close()
