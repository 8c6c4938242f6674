"""Being stopped while waiting for Ray, whose calls cannot bear a signal handler that raises."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from launcher.errors import LaunchInterrupted, signal_name
from launcher.external.backend_launcher import STOPPING_SIGNALS

NOTICE_S = 0.2  # until a signal is noticed


class Signals:
    """In this context, what stops programs is noted, and raised where Ray can bear it: in wait."""

    def __init__(self) -> None:
        self._seen: list[int] = []

    def __enter__(self) -> Signals:
        self._old = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
        self.note()
        return self

    def note(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING_SIGNALS:
                signal.signal(number, lambda n, _frame: self._seen.append(n))

    def __exit__(self, *_error: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._old.items():
                signal.signal(number, handler)

    def wait(self, ray: Any, calls: list[Any], timeout_s: float) -> list[Any]:
        """Those of calls that are done, as soon as one is; empty after timeout_s."""
        deadline = time.monotonic() + timeout_s
        done: list[Any] = []
        while not done and (left := deadline - time.monotonic()) > 0:
            if self._seen:
                raise interrupted(self._seen[0])
            done, _ = ray.wait(calls, timeout=min(left, NOTICE_S))
        return done


def interrupted(number: int) -> LaunchInterrupted:
    what = f"the launch was stopped by {signal_name(number)}"
    return LaunchInterrupted(what, exit_code=128 + number)
