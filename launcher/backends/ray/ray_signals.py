"""Stop signals while waiting for Ray, in whose calls a signal handler must not raise."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from launcher import errors, timings
from launcher.system.stop_signals import STOP_SIGNALS


class DeferredSignals:
    """In this context, stop signals are noted, and raise LaunchInterrupted in wait."""

    def __init__(self) -> None:
        self._received: list[int] = []

    def __enter__(self) -> DeferredSignals:
        self._old = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        self.install()
        return self

    def install(self) -> None:
        """Set the handlers, anew after Ray has replaced them."""
        if threading.current_thread() is threading.main_thread():
            for number, old in self._old.items():
                is_ignored = old == signal.SIG_IGN  # as by nohup
                signal.signal(number, old if is_ignored else lambda n, _: self._received.append(n))

    def __exit__(self, *_error: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._old.items():
                signal.signal(number, handler)

    def wait(self, ray: Any, calls: list[Any], deadline: float) -> list[Any]:
        """The finished ones of calls, as soon as there is one; empty at the deadline."""
        done: list[Any] = []
        while not (done or self._received) and (left := deadline - time.monotonic()) > 0:
            done, _ = ray.wait(calls, timeout=min(left, timings.TIMINGS.idle_s))
        if self._received and not done:
            raise errors.interrupted(self._received[0])
        return done
