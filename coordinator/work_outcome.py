"""The outcome of work that every rank does for itself: a result, or the error of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.call_site import caller, traceback_of
from coordinator.errors import DrumlineError, PeerLost, RemoteError
from coordinator.failure.group_failure import FailureRecord
from coordinator.peers import Peer
from coordinator.transport.object_codec import packed, unpacked, why_unsendable

ErrorClasses = type[DrumlineError] | tuple[type[DrumlineError], ...]
"""See `Collectives.run_on_all_ranks`."""


@dataclass(frozen=True)
class WorkOutcome:
    """A result, or error_type and more of an exception; error: itself, on its own rank."""

    result: Any = None
    error: Exception | None = None
    error_type: str = ""
    error_text: str = ""
    traceback: str = ""
    is_ours: bool = False  # its text names the rank, and says what to do
    failures: tuple[FailureRecord, ...] = ()

    @classmethod
    def of(cls, work: Callable[[], Any]) -> WorkOutcome:
        try:
            return cls(work())
        except Exception as error:
            failures = error.failures if isinstance(error, PeerLost) else ()
            return cls(
                None,
                error,
                "PeerLost" if isinstance(error, PeerLost) else type(error).__name__,
                _printable(str(error)),
                _printable(traceback_of(error)),
                isinstance(error, DrumlineError),
                tuple(map(FailureRecord.of, failures)),
            )

    def packed(self, rank: int) -> bytes:
        """rank: of the launch, for a result that cannot be sent."""
        if self.error is None:
            data = packed(self.result, rank)
            return data if why_unsendable(data) else packed([self.result], rank)
        fields = [self.error_type, self.error_text, self.traceback, self.is_ours]
        return packed([None, *fields, [list(failure) for failure in self.failures]], rank)

    @classmethod
    def unpacked(cls, packet: bytes, rank: int) -> WorkOutcome:
        why = why_unsendable(packet)
        if why:
            return cls(None, None, "ValueError", why, "", is_ours=True)
        result, *error = unpacked(packet, rank)
        if not error:
            return cls(result)
        kind, text, trace, is_ours, failures = error
        records = tuple(FailureRecord(*fields) for fields in failures)
        return cls(None, None, kind, text, trace, is_ours, records)


def _printable(text: str) -> str:
    """Names of files need not be UTF-8, but what is sent must."""
    return text.encode(errors="backslashreplace").decode()


def raise_first_failure(
    outcomes: Sequence[WorkOutcome], rank: int, peers: Sequence[Peer], classes: ErrorClasses
) -> None:
    """Raise for the rank that failed, if one did: the same on all ranks that did not."""
    failed = [index for index, outcome in enumerate(outcomes) if outcome.error_type]
    if not failed:
        return
    # A rank that lost another only says so: the other is the cause.
    first = next((i for i in failed if outcomes[i].error_type != "PeerLost"), failed[0])
    outcome, peer = outcomes[first], peers[first]
    text = f"rank {peers[rank].rank}: {peer} failed in run_on_all_ranks ({caller()})"
    if outcome.error_type == "PeerLost":
        failures = [failure.to_failure(peers) for failure in outcome.failures]
        lost = [failure for failure in failures if failure is not None]
        raise PeerLost(f"{text}: {outcome.error_text}", lost)
    why = f" {outcome.error_type}: {outcome.error_text}" if outcome.is_ours else ""
    text = f"{text}:{why}" if why else f"{text}:\n{outcome.traceback}"
    kind, own_text = outcome.error_type, outcome.error_text
    error = RemoteError(text, first, peer, kind, own_text, outcome.traceback)
    if classes is RemoteError:
        raise error
    offered = classes if isinstance(classes, tuple) else (classes,)
    own_class = next((one for one in offered if one.__name__ == kind), None)
    if own_class is None:
        raise offered[0](text) from error
    own_error = own_class(own_text if own_text.startswith("rank ") else f"{peer}: {own_text}")
    own_error.__context__ = error  # says which rank is to blame
    raise own_error from None
