"""Errors of the ranks, and the base of those of the layers above.

DrumlineError (RuntimeError)  every error of the layers above the launcher
 |- CoordinatorError          the ranks could not agree
 |   |- CoordinatorTimeout    a deadline passed (also a TimeoutError)
 |   |- RemoteError           the work of run_on_all_ranks() failed on another rank
 |   `- PeerLost              a rank died, left or closed; the one class of it in all layers
 |- CommunicatorError         communicator/errors.py
 `- PlanError, ...            drumline/errors.py

try:
    coor.barrier()
except PeerLost as error:
    print(error.rank, error.failures[0].exit_status)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from coordinator.peers import Peer


class DrumlineError(RuntimeError):
    """The base of every error of the layers above the launcher; its text starts with the rank."""


class CoordinatorError(DrumlineError):
    """The ranks could not agree. The message starts with the rank that says so."""


class CoordinatorTimeout(CoordinatorError, TimeoutError):
    """A deadline passed. The message names the ranks that did not come."""


class RemoteError(CoordinatorError):
    """The work of run_on_all_ranks() failed on another rank.

    rank: in the numbering of the group. error_type, error_text, traceback: of the exception there.
    """

    def __init__(
        self,
        text: str,
        rank: int = -1,
        peer: Peer | None = None,
        error_type: str = "",
        error_text: str = "",
        traceback: str = "",
    ) -> None:
        super().__init__(text)
        self.rank, self.peer = rank, peer
        self.error_type, self.error_text, self.traceback = error_type, error_text, traceback


class FailureReason(Enum):
    """Why a rank counts as failed."""

    EXITED = "exited"  # its process ended, or its connection broke, before it closed
    SUSPENDED = "suspended"  # its process is stopped (SIGSTOP), or sends no heartbeats
    UNREACHABLE = "unreachable"  # its host does not answer
    LEFT = "left"  # it closed its Coordinator, in good order
    REPORTED = "reported"  # report_failure(), or it left because of an exception

    @property
    def may_recover(self) -> bool:
        """True if the rank may go on, and then counts as failed no longer."""
        return self in (FailureReason.SUSPENDED, FailureReason.UNREACHABLE)


@dataclass(frozen=True)
class RankFailure:
    """A rank of a group that failed, as one other rank noticed it.

    rank: in the numbering of that group; peer.rank is its number in the launch.
    since_s: how long it had been so when it was noticed, or until now if it may recover.
    call: the call it was last seen in. exit_status: its exit code, or minus the signal; None where
    nobody can tell. text: one line with host, pid, call and state.
    """

    rank: int
    peer: Peer
    reason: FailureReason
    since_s: float = 0.0
    call: str = ""
    exit_status: int | None = None
    text: str = ""

    def __str__(self) -> str:
        return self.text or str(self.peer)


class PeerLost(CoordinatorError):
    """A rank died or left while others needed it. The message names it.

    failures: the failed ranks, the first to fail first; empty where only the text is known.
    what, advice: the two parts of the message.
    """

    def __init__(
        self, text: str = "", failures: Sequence[RankFailure] = (), advice: str = ""
    ) -> None:
        super().__init__(f"{text} {advice}" if advice else text)
        self.failures, self.what, self.advice = tuple(failures), text, advice

    @property
    def rank(self) -> int | None:
        """The first failed rank, as its group numbers it."""
        return self.failures[0].rank if self.failures else None

    @property
    def peer(self) -> Peer | None:
        """The first failed rank: its host, pid and number in the launch."""
        return self.failures[0].peer if self.failures else None

    @property
    def call(self) -> str:
        """The call that the first failed rank was last seen in."""
        return self.failures[0].call if self.failures else ""


KINDS: dict[str, type[CoordinatorError]] = {
    kind.__name__: kind for kind in (CoordinatorError, CoordinatorTimeout, PeerLost)
}
