"""Why a group cannot go on: the record that the first rank to notice gives to all others.

It travels as msgpack: in the shared memory of a node, and through rank 0 to other nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coordinator.call_site import PendingCall
from coordinator.control.framing import pack, unpack
from coordinator.errors import CoordinatorError, FailureReason, RankFailure
from coordinator.failure.peer_monitor import ObservedRank
from coordinator.peers import Peer

# Together they must fit failure_bytes of node_shm.h.
MAX_TEXT, MAX_TAIL = 8000, 1000  # bytes of the text, and of its end if it is longer
MAX_RANKS = 256
MAX_FAILURES, MAX_FAILURE_TEXT = 8, 300  # bytes of a text
ADVICE = "The group is desynchronised: end the launch, and look at what those ranks printed last."
FEWER_CALLS = (
    "It made fewer calls than the others: let all ranks make the same calls before they close."
)
NETWORK_ADVICE = (
    "Those ranks may well run: check the link between the hosts, end the launch on both, and start "
    "it again."
)


class FailureRecord(NamedTuple):
    """A RankFailure as it travels; rank: of the launch."""

    rank: int
    reason: str
    since_s: float = 0.0
    call: str = ""
    exit_status: int | None = None
    text: str = ""

    @classmethod
    def of(cls, failed: ObservedRank | RankFailure) -> FailureRecord:
        reason = failed.reason or FailureReason.REPORTED
        since_s = failed.since_s if isinstance(failed, RankFailure) else 0.0
        text = clipped(str(failed), MAX_FAILURE_TEXT, tail=0)
        rank, call, status = failed.peer.rank, failed.call, failed.exit_status
        return cls(rank, reason.value, since_s, call, status, text)

    def to_failure(self, peers: Sequence[Peer]) -> RankFailure | None:
        """The failure in the numbering of these peers' group; None if it is not among them."""
        for place, peer in enumerate(peers):
            if peer.rank == self.rank:
                reason = FailureReason(self.reason)
                return RankFailure(
                    place, peer, reason, self.since_s, self.call, self.exit_status, self.text
                )
        return None


class GroupFailure(NamedTuple):
    """The reason, from the rank that noticed first.

    kind: name of the error's class. reporter: rank of the launch, and `where` its call. ranks: of
    the launch, that are named in text. failures: those of them that died, left or are suspended.
    """

    kind: str
    reporter: int
    where: str
    text: str
    ranks: list[int]
    failures: list[FailureRecord]

    @classmethod
    def of(
        cls,
        kind: type[CoordinatorError],
        reporter: int,
        where: str,
        text: str,
        ranks: Sequence[int] = (),
        failures: Sequence[FailureRecord] = (),
    ) -> GroupFailure:
        named = list(ranks or [failure.rank for failure in failures])[:MAX_RANKS]
        return cls(kind.__name__, reporter, where, clipped(text), named, [*failures[:MAX_FAILURES]])

    def pack(self) -> bytes:
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> GroupFailure:
        kind, reporter, where, text, ranks, failures = unpack(data)
        records = [FailureRecord(*failure) for failure in failures]
        return cls(kind, reporter, where, text, ranks, records)

    def describe_to(self, rank: int, pending: PendingCall) -> str:
        """Why this rank of the launch waited for nothing: sentences that advice can follow."""
        if rank in self.ranks and self.reporter != rank:
            return (
                f"rank {rank} entered {pending.call}, but rank {self.reporter} had already given "
                f"up, in {self.where}, waiting for {self.text}. "
            )
        is_own = self.reporter == rank
        noticed = "" if is_own else f"Rank {self.reporter} noticed it, in {self.where}. "
        end = "" if self.text.endswith("\n") else ". "
        waited = f"rank {rank} waited {pending.waited_s:.1f} s in {pending.call}"
        return f"{waited} for {self.text}{end}{noticed}"

    def advice(self) -> str:
        """Advice for the end of an error."""
        reasons = {failure.reason for failure in self.failures}
        if FailureReason.UNREACHABLE.value in reasons:
            return NETWORK_ADVICE
        return FEWER_CALLS if reasons == {FailureReason.LEFT.value} else ADVICE

    def rank_failures(self, peers: Sequence[Peer]) -> list[RankFailure]:
        """The failed ranks, in the numbering of the group of these peers."""
        failures = [failure.to_failure(peers) for failure in self.failures]
        return [failure for failure in failures if failure is not None]


def clipped(text: str, head: int = MAX_TEXT, tail: int = MAX_TAIL) -> str:
    """The text with its middle left out if it has more bytes; file names need not be UTF-8."""
    data = text.encode(errors="backslashreplace")
    return (data[:head] + data[max(head, len(data) - tail) :]).decode(errors="ignore")
