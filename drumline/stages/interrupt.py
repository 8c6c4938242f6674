"""Lets Ctrl-C wait until a message is read: the rest of it would be taken for the next one."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enumerations: 20 us in place of 1
import threading
from typing import Any

SIGINT = _signal.SIGINT


class DelayedInterrupt:
    """Within this block, a SIGINT that reaches the main thread is handled when the block is left.

    A second one is handled at once.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._noted: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            handler = _signal.getsignal(SIGINT)
            if callable(handler):
                self._before = handler
                _signal.signal(SIGINT, self._note)

    def __exit__(self, *how: object) -> None:
        if self._before is not None:
            _signal.signal(SIGINT, self._before)
            if self._noted:
                self._before(*self._noted)

    def _note(self, *signal: Any) -> None:
        if self._noted:
            self._before(*signal)
        self._noted = signal
