"""Lines in the log about ranks of other nodes: awaited at the beginning, or cut off later."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

from coordinator.addresses import spans_nodes
from launcher import LaunchInfo

log = logging.getLogger("coordinator")


class WaitingNotice:
    """Logs every period_s whom this rank awaits; of each node only the first rank does."""

    def __init__(self, info: LaunchInfo, period_s: float) -> None:
        self._info, self._period_s = info, period_s
        self._speaks = spans_nodes(info) and info.local_rank == 0
        self._began = self._logged_at = time.monotonic()

    def log_if_due(self, describe: Callable[[], str]) -> None:
        """describe: for whom it waits, and why; asked only where that is logged."""
        now = time.monotonic()
        if not self._speaks or now - self._logged_at < self._period_s:
            return
        self._logged_at = now
        waited_s, host = now - self._began, socket.gethostname()
        rank, text = self._info.rank, describe()
        log.warning("rank %d (host %s) has waited %.0f s for %s", rank, host, waited_s, text)
