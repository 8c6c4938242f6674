"""A communicator of the ranks of an old one that are left, by ncclCommShrink."""

from __future__ import annotations

import time
from typing import Any

from communicator import timings
from communicator.backends.plugin import PluginBackend
from communicator.errors import CommunicatorError


def options(backend: PluginBackend, old: Any) -> dict[str, Any]:
    """Options of the library for `backend`, whose ranks are those of `old` that are left.

    old: a Communicator. Collective. Raises CommunicatorError on every rank.
    """
    facts = backend.coor.allgather_object((old.rank, _has_ended(old, backend.name)))
    left = [rank for rank, _ in facts]
    excluded = sorted({*range(old.world_size)} - {*left})
    if not excluded or left != sorted(left) or not all(has_ended for _, has_ended in facts):
        raise CommunicatorError(
            f"{backend._me}: shrink_of= takes a Communicator over {backend.name} that has lost "
            f"peers, on the ranks that are left, in its order; these are its ranks {left} of "
            f"{old.world_size}, over {old.backend}. Leave shrink_of= out."
        )
    return {"parent": old._backend._comm.handle(), "excluded": ":".join(map(str, excluded))}


def _has_ended(old: Any, name: str) -> bool:
    """True if old is over the backend of that name, and its watchdog has ended it.

    Waits for that as long as a watchdog may take: another rank's may have been quicker.
    """
    grace_s = 2 * timings.TIMINGS.watchdog_grace_s + timings.TIMINGS.watchdog_poll_s
    deadline = time.monotonic() + grace_s
    while old.backend == name and old._backend.is_usable() and time.monotonic() < deadline:
        time.sleep(timings.TIMINGS.exit_poll_s)
    return old.backend == name and not old._backend.is_usable()
