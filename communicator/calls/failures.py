"""Failed peers, for the errors of a communicator."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

from communicator import timings
from coordinator import Coordinator, CoordinatorError, FailureReason, RankFailure


def lost_peers(coor: Coordinator, wait_s: float = 0.0) -> tuple[RankFailure, ...]:
    """The peers that exited or were reported, the first to fail first. Not collective.

    Not those that may recover, nor one that has closed its Coordinator while its process is alive.
    wait_s: how long to wait for there to be one. The Coordinator may be closed: that of a subgroup
    is needed only to open it. Then only peers whose process is visible from here are known.
    """
    try:
        failures = coor.failures(wait_s=wait_s)
    except CoordinatorError:
        return _dead_processes(coor, wait_s)
    return tuple(failure for failure in failures if _is_lost(failure))


def _is_lost(failure: RankFailure) -> bool:
    if failure.reason is FailureReason.LEFT:
        return failure.peer.is_known_dead()
    return failure.reason in (FailureReason.EXITED, FailureReason.REPORTED)


def _dead_processes(coor: Coordinator, wait_s: float) -> tuple[RankFailure, ...]:
    deadline = time.monotonic() + wait_s
    while True:
        failures = tuple(
            RankFailure(rank, peer, FailureReason.EXITED)
            for rank, peer in enumerate(coor.peers)
            if peer.is_known_dead()
        )
        if failures or time.monotonic() >= deadline:
            return failures
        time.sleep(timings.TIMINGS.exit_poll_s)


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
