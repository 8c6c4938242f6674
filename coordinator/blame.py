"""Who is missing when a call fails.

gloo says at best which socket closed. So each rank that sees a call fail writes down which call it
was in; whoever has not written anything shortly after is the one the others waited for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch.distributed import Store

from coordinator.calls import Call
from coordinator.errors import CoordinatorError, CoordinatorTimeout, PeerLost
from coordinator.peers import Peer

GRACE_S = 1.0
POLL_S = 0.02


def report_failure(store: Store, rank: int, what: str) -> None:
    """Tell the ranks that will look why this one is out of step."""
    try:
        store.set(f"failed/{rank}", what)
    except RuntimeError:
        pass  # the store went with rank 0, and blame() will say that


def blame(
    store: Store, rank: int, peers: Sequence[Peer], call: Call, waited_s: float, cause: Exception
) -> CoordinatorError:
    """The error to raise for a call that failed: what was waited for, how long, and for whom."""
    report_failure(store, rank, f"in {call}")
    reports = _collect(store, rank, peers)
    kind = _kind(cause, reports, peers)
    return kind(
        f"rank {rank} waited {waited_s:.1f} s in {call} for {_culprits(reports, peers, call)}. "
        f"The group is out of step: end the launch, and look at what those ranks printed last. "
        f"({cause})"
    )


def _collect(store: Store, rank: int, peers: Sequence[Peer]) -> dict[int, str | None]:
    """What each other rank reported within GRACE_S; None if nothing."""
    reports: dict[int, str | None] = {other: None for other in range(len(peers)) if other != rank}
    deadline = time.monotonic() + GRACE_S
    while None in reports.values() and time.monotonic() < deadline:
        for other in [other for other, report in reports.items() if report is None]:
            try:
                if store.check([f"failed/{other}"]):
                    reports[other] = store.get(f"failed/{other}").decode()
            except RuntimeError:
                return reports
        time.sleep(POLL_S)
    return reports


def _kind(
    cause: Exception, reports: dict[int, str | None], peers: Sequence[Peer]
) -> type[CoordinatorError]:
    silent = [peers[rank] for rank, report in reports.items() if report is None]
    left = any(report and report.startswith("left") for report in reports.values())
    if left or any(peer.is_seen_dead() for peer in silent):
        return PeerLost
    timed_out = "time" in str(cause).lower() and "out" in str(cause).lower()
    return CoordinatorTimeout if timed_out else PeerLost if silent else CoordinatorError


def _culprits(reports: dict[int, str | None], peers: Sequence[Peer], call: Call) -> str:
    """The ranks that are not where this one is, each with what is known of it."""
    found = []
    for rank, report in reports.items():
        if report is None:
            state = "is gone" if peers[rank].is_seen_dead() else "did not come"
            found.append(f"{peers[rank]}, which {state}")
        elif _name_and_number(report) != f"{call.name} #{call.number}":
            verb = report if report.startswith("left") else f"was {report}"
            found.append(f"{peers[rank]}, which {verb}")
    return "; ".join(found) or "a peer whose connection broke"


def _name_and_number(report: str) -> str:
    return report.removeprefix("in ").partition(" (")[0]
