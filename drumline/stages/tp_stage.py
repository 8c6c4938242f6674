"""Stages whose layers are cut over several ranks: a team, which hears of each call as one.

The master only drives: every layer, its own too, is called by a message. It goes to the first team,
whose ranks all run it, and from there round the ring of the teams' first ranks; each of those says
what it heard to its team before it runs it. Only first ranks speak to other teams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import DistNetworkError, DistStoreError

from communicator import Communicator
from coordinator import CoordinatorError, DrumlineError
from drumline.errors import PeerLost
from drumline.liveness.group_monitor import Vigil
from drumline.stages.messages import Foresee, Kind, Link, Message
from drumline.stages.program import NOTHING
from drumline.stages.ring import Ring
from drumline.stages.stage import Stage

NOBODY = "nobody"
AGREE_S = 4.0
"""How long a rank whose step failed waits to hear that it failed alike on the whole team. Its ranks
do the same, but not at the same time: the first step loads libraries, and cores are shared. Whoever
has not failed by then is taken to wait for this one in a sum. The master is to hear within 5 s."""


class Team:
    """The ranks of one stage. frames: over them all, the first of the stage being its rank 0."""

    def __init__(self, rank: int, frames: Communicator, vigil: Vigil):
        self.rank, self.coor, self.vigil = rank, frames.coor, vigil
        self.link = Link(_Aloud(frames), 0)
        self.failures, self.num_failures = frames.coor.store("failed steps"), 0

    def tell(self, message: Message) -> None:
        """The first rank's message to all others of the team."""
        if self.coor.world_size > 1:
            self._guarded(lambda: self.link.send(message))

    def hear(self, foresee: Foresee | None = None) -> Message:
        message: Message = self._guarded(lambda: self.link.receive(foresee))
        return message

    def fail_together(self, story: str) -> None:
        """Return if a step failed on all ranks; otherwise some wait in it for ever: PeerLost."""
        if self.vigil.verdict:
            raise PeerLost(self.vigil.verdict)
        self._failed_first(story)
        self._guarded(lambda: self.coor.allgather(b"failed", timeout_s=AGREE_S))
        self.num_failures += 1

    def _failed_first(self, story: str = "") -> str:
        """The story of the rank that was first to fail in this step; if none was, `story`, which is
        kept. Those of others, who lost that one because it left, may well be the first to be heard.
        """
        expected = "" if story else NOBODY  # which only looks
        try:
            found = self.failures.compare_set(str(self.num_failures), expected, story or NOBODY)
        except (DistNetworkError, DistStoreError, CoordinatorError):
            return story  # the rank that keeps them is gone
        return "" if found == NOBODY.encode() else found.decode()

    def _guarded(self, work: Callable[[], Any]) -> Any:
        try:
            return self.vigil.explained(work)
        except DrumlineError as error:
            story = self._failed_first()
            raise PeerLost(
                f"rank {self.rank}: {self._what_is_lost()}, so the model cannot run any more; "
                f"start all ranks again. ({error})"
                + (f"\nWhat failed first: {story}" if story else "")
            ) from error

    def _what_is_lost(self) -> str:
        holds = self.vigil.holds[self.rank]
        dead = [str(peer) for peer in self.coor.peers if peer.is_known_dead()]
        if dead:
            return f"{' and '.join(dead)} is gone. It held its part of {holds}"
        return (
            f"the ranks {list(self.coor.ranks)}, which compute {holds} together, are no longer in "
            "step or not all there"
        )


class _Aloud:
    """What a Link sends to its peer reaches the whole team."""

    def __init__(self, comm: Communicator):
        self.comm = comm

    def send(self, frame: torch.Tensor, peer: int) -> None:
        self.comm.broadcast(frame, peer)

    def recv(self, frame: torch.Tensor, peer: int) -> torch.Tensor:
        return self.comm.broadcast(frame, peer)


class Follower:
    """The ring as a rank hears it that is not the first of its team: results stay here.

    under: the communicators and all that they stand on.
    """

    def __init__(self, team: Team, under: contextlib.ExitStack):
        self.rank, self.coor, self._under = team.rank, team.coor, under
        self.receive = team.hear

    def send(self, message: Message) -> None:
        """Nowhere: the first of the team has the same."""

    def close(self, error: BaseException | None = None) -> None:
        self._under.__exit__(type(error) if error else None, error, None)


class Leader:
    """The ring as the first rank of a team has it: what it hears, its team hears."""

    def __init__(self, team: Team, ring: Ring):
        self.team, self.ring = team, ring
        self.rank, self.coor, self.close = team.rank, ring.coor, ring.close

    def send(self, message: Message) -> None:
        self.team.vigil.explained(lambda: self.ring.send(message))

    def receive(self, foresee: Foresee | None = None) -> Message:
        message = self.team.vigil.explained(lambda: self.ring.receive(foresee))
        try:
            self.team.tell(message)
        except PeerLost as lost:
            if message.kind is not Kind.LEAVE and not self.team.vigil.verdict:
                is_told = message.kind is Kind.LOST
                self.ring.send(message if is_told else Message(Kind.LOST, note=str(lost)))
            raise
        return message


class TeamStage(Stage):
    """A stage that several ranks compute together; what fails on one has to fail on all."""

    def __init__(self, model: Any, ring: Any, device: torch.device, hop: int, team: Team):
        super().__init__(model, ring, device)
        self.hop, self.team = hop, team

    def _reply(self, message: Message) -> Message:
        reply = super()._reply(message)
        if reply.kind is Kind.ERROR:
            try:
                self.team.fail_together(reply.note)
            except PeerLost as lost:
                if not self.team.vigil.verdict:  # the driver knows it, and is told nothing else
                    self.ring.send(Message(Kind.LOST, note=str(lost)))
                raise
        return reply


class Driver:
    """The master's end: the first team is a stage like the others, and it is here.

    ring: over the first ranks of all teams; None if there is one team.
    """

    def __init__(self, stage: TeamStage, team: Team, ring: Ring | None):
        self.stage, self.team, self.ring = stage, team, ring
        self.rank, self.coor = team.rank, team.coor
        self.next = team.link if ring is None else ring.next
        self.close: Callable[..., None] = stage.ring.close if ring is None else ring.close
        if ring is not None:
            ring.close = lambda *how: self.close(*how)  # type: ignore[method-assign]

    @torch.no_grad()  # and not inference_mode, as the results are the user's
    def send(self, message: Message) -> Message | None:
        """The reply, if no other team has anything to do with it."""
        ring, vigil = self.ring, self.team.vigil
        vigil.is_waiting = True
        self.team.tell(message)
        reply = self.stage._reply(message)
        if ring is None or self._is_done(message):
            vigil.is_waiting = False
            return reply
        vigil.explained(lambda: ring.send(reply))
        return None

    def _is_done(self, message: Message) -> bool:
        route = self.stage.routes.get(message.program)
        if route is None or route.program.operations != NOTHING:
            return False
        return all(step.rank <= self.stage.hop for step in route.program.steps)

    def receive(self) -> Message:
        assert self.ring is not None
        vigil = self.team.vigil
        vigil.is_waiting = True
        try:
            return vigil.explained(self.ring.receive)
        finally:
            vigil.is_waiting = False

    def leave(self, code: int) -> None:
        """Release every team; returns once the goodbye has come round."""
        try:
            self.team.tell(Message(Kind.LEAVE, ints=[code]))
        except PeerLost:
            pass  # whoever is left of the team sees it too
        if self.ring is None:
            self.close()
        else:
            self.ring.leave(code)
