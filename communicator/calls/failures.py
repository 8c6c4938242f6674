"""Failed peers, for the errors of a communicator."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from communicator import timings
from coordinator import Coordinator, CoordinatorError, FailureReason, Peer, RankFailure


def lost_peers(coor: Coordinator, wait_s: float = 0.0) -> tuple[RankFailure, ...]:
    """The peers that exited or were reported, the first to fail first. Not collective.

    Not those that may recover, nor one that has closed its Coordinator while its process is alive.
    wait_s: how long to wait for there to be one. The Coordinator may be closed: that of a subgroup
    is needed only to open it. Then only peers whose process is visible from here are known.
    """
    try:
        failures = coor.failures(wait_s=wait_s)
    except CoordinatorError:
        deadline = time.monotonic() + wait_s
        while not (dead := dead_peers(coor.peers)) and time.monotonic() < deadline:
            time.sleep(timings.TIMINGS.exit_poll_s)
        return dead
    return tuple(failure for failure in failures if _is_lost(failure))


def _is_lost(failure: RankFailure) -> bool:
    if failure.reason is FailureReason.LEFT:
        return failure.peer.is_known_dead()
    return failure.reason in (FailureReason.EXITED, FailureReason.REPORTED)


def dead_peers(peers: Sequence[Peer]) -> tuple[RankFailure, ...]:
    """The peers whose process has ended, as far as that is visible from here."""
    dead = [(rank, peer) for rank, peer in enumerate(peers) if peer.is_known_dead()]
    return tuple(RankFailure(rank, peer, FailureReason.EXITED) for rank, peer in dead)


def describe_lost(failures: Iterable[RankFailure]) -> str:
    """A sentence for an error; empty if there are none."""
    texts = "; ".join(map(str, failures))
    return f" Lost: {texts}." if texts else ""


def describe_late(coor: Coordinator) -> str:
    """The ranks of this node and where they are, for the error of a deadline; may be empty."""
    try:
        text = coor.describe_late()
    except CoordinatorError:  # closed first
        return ""
    return f"\n{text}" if text else ""


def report(coor: Coordinator, failure: RankFailure) -> None:
    """Let all ranks of the group know of a failure, if they share a Coordinator that is open."""
    with suppress(CoordinatorError):
        coor.report_failure(failure.rank, f"lost: {failure}")
