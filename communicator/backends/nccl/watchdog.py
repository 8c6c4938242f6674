"""The thread that aborts an NCCL communicator whose peer has died, or that NCCL reports broken."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from communicator import timings
from communicator.errors import PeerLost


class Watched(Protocol):
    """A communicator of NCCL, as its watchdog knows it."""

    rank: int

    def is_usable(self) -> bool: ...
    def find_failure(self) -> PeerLost | None: ...
    def abort_because(self, reason: PeerLost, is_known: bool = False) -> None: ...


class Watchdog(threading.Thread):
    """Looks for failures a few times a second, and aborts comm at the first.

    A kernel that waits for a dead peer would wait for ever, and so would a synchronization with
    it. Makes no CUDA call: one could end the capture of a graph. Holds no reference to comm.
    """

    def __init__(self, comm: Watched) -> None:
        super().__init__(name=f"nccl watchdog of rank {comm.rank}", daemon=True)
        self._comm = weakref.ref(comm)
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(timings.TIMINGS.watchdog_poll_s) and self._check():
            pass

    def _check(self) -> bool:
        """Check once; False when there is nothing more to watch."""
        comm = self._comm()
        if comm is None or not comm.is_usable():
            return False
        failure = comm.find_failure()
        if failure is not None and not self._stopped.is_set():
            comm.abort_because(failure)
        return failure is None

    def stop(self) -> None:
        self._stopped.set()
