"""An end for code that may wait for ever."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def seconds(limit: int) -> Iterator[None]:
    """Raise TimeoutError in this block after so many seconds, whatever it waits for."""

    def ring(*unused: Any) -> None:
        raise TimeoutError(f"still there after {limit} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
