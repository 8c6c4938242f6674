"""A launch as other threads see it: its pids, its first failure, a way to stop it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence

from launcher.errors import Failure
from launcher.runtime.rank_state import LaunchedRank

log = logging.getLogger("launcher")


class LaunchWatch:
    """Shared by the launch's thread and those that watch it.

    on_failure: called on the launch's thread with the first rank's failure, as soon as it is known.
    requests: readable once there is one to stop, as the number of a signal.
    """

    def __init__(self, on_failure: Callable[[Failure], object] | None = None) -> None:
        self._on_failure = on_failure
        self._ranks: Sequence[LaunchedRank] = ()
        self.requests, self._requesting = socket.socketpair()

    def follow(self, ranks: Sequence[LaunchedRank]) -> None:
        self._ranks = ranks

    @property
    def pids(self) -> list[int]:
        """By rank; 0 for one that has not started."""
        return [rank.pid for rank in self._ranks]

    def report(self, failure: Failure) -> None:
        """Call on_failure, once. What it raises is logged: the ranks are still to be ended."""
        callback, self._on_failure = self._on_failure, None
        if callback is not None:
            try:
                callback(failure)
            except Exception:
                log.exception("on_failure raised, for %s", failure.summary())

    def request_stop(self, number: int) -> None:
        """Do as if the launcher had got the signal; after the end of the launch, nothing."""
        try:
            self._requesting.send(bytes([number]))
        except OSError:
            pass  # closed: the launch has ended

    def close(self) -> None:
        self.requests.close()
        self._requesting.close()
