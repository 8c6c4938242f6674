"""Calls subscribers when a rank of a group fails: one thread for each group that has some."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO

from coordinator.errors import FailureReason, RankFailure
from coordinator.failure.scan import FailureScan
from launcher import linux

log = logging.getLogger("coordinator")


def always() -> bool:
    return True


@dataclass(eq=False)
class Subscription:
    """A callback for failed ranks, until close() or the end of the `with` block.

    failures: the ranks it was called for, the first to fail first.
    """

    _callback: Callable[[RankFailure], None]
    _is_waiting: Callable[[], bool]
    _unreachable_s: float
    _on_close: Callable[[Subscription], None]
    failures: tuple[RankFailure, ...] = ()
    _is_closed: bool = False

    def close(self) -> None:
        """Call the callback no more. Not collective; from any thread, the callback's too."""
        self._is_closed = True
        self._on_close(self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def notify(self, current: tuple[RankFailure, ...]) -> None:
        """Call the callback for the ranks that it was not called for."""
        places = {failure.rank for failure in current}
        self.failures = tuple(failure for failure in self.failures if failure.rank in places)
        notified = {failure.rank for failure in self.failures}
        for failure in current:
            if failure.rank not in notified and not self._is_closed and self._is_due(failure):
                self.failures = (*self.failures, failure)
                self._call(failure)

    def _is_due(self, failure: RankFailure) -> bool:
        if not failure.reason.may_recover:
            return True
        is_reached = failure.reason is not FailureReason.UNREACHABLE
        return self._is_waiting() and (is_reached or failure.since_s >= self._unreachable_s)

    def _call(self, failure: RankFailure) -> None:
        try:
            self._callback(failure)
        except Exception:
            log.exception("a subscriber failed when %s failed", failure)


class FailureNotifier:
    """The subscribers of one group, and the thread that scans for them."""

    def __init__(self, scan: FailureScan) -> None:
        self._scan = scan
        self._timings = scan.monitor.session.timings
        self._lock = threading.Lock()
        self._subscriptions: list[Subscription] = []
        self._thread: threading.Thread | None = None
        self._wakeup: FileIO | None = None
        self._is_closed, self._pid = False, os.getpid()

    def subscribe(
        self,
        callback: Callable[[RankFailure], None],
        is_waiting: Callable[[], bool],
        unreachable_s: float,
    ) -> Subscription:
        subscription = Subscription(callback, is_waiting, unreachable_s, self._unsubscribe)
        with self._lock:
            self._subscriptions.append(subscription)
            if self._thread is None and not self._is_closed:
                self._start()
        return subscription

    def _start(self) -> None:
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakeup = wakeup = linux.closed_in_children(FileIO(fd))
        self._thread = threading.Thread(
            target=self._run, args=[wakeup], name="drumline-failures", daemon=True
        )
        self._thread.start()

    def _unsubscribe(self, subscription: Subscription) -> None:
        if self._pid != os.getpid():  # a forked child, where the thread does not run
            return
        with self._lock:
            self._subscriptions = [other for other in self._subscriptions if other != subscription]
        self._stop()

    def close(self) -> None:
        """End the thread; a callback that is running ends first, unless it is the caller."""
        self._is_closed = True
        self._stop()

    def _stop(self) -> None:
        """End the thread, unless there are subscribers: another may have come meanwhile."""
        with self._lock:
            if self._subscriptions and not self._is_closed:
                return
            thread, self._thread = self._thread, None
            if thread is not None and self._wakeup is not None:
                os.eventfd_write(self._wakeup.fileno(), 1)
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._timings.callback_s)

    def _run(self, wakeup: FileIO) -> None:
        """Scan at every interval, and at once when a process of this host ends."""
        dead = set[int]()
        while self._is_current():
            subscriptions = tuple(self._subscriptions)
            current = self._scan.scan()
            for subscription in subscriptions:
                subscription.notify(current)
            if self._is_current():
                dead |= self._sleep(wakeup.fileno(), dead)
        with self._lock:
            wakeup.close()

    def _is_current(self) -> bool:
        return self._thread is threading.current_thread()

    def _sleep(self, wakeup: int, dead: set[int]) -> set[int]:
        """Wait until the next scan is due; the pidfds that have become readable meanwhile."""
        poll = select.poll()
        poll.register(wakeup, select.POLLIN)
        for process in self._scan.processes():
            if process.fileno() not in dead:
                poll.register(process.fileno(), select.POLLIN)
        ready = {fd for fd, _ in poll.poll(self._timings.scan_s * 1000)}
        return ready - {wakeup}
