"""Who a thread is, where ranks are threads: a context variable, which no other thread sees."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from launcher.launch_info import LaunchInfo

_info: contextvars.ContextVar[LaunchInfo | None] = contextvars.ContextVar("info", default=None)


def current() -> LaunchInfo | None:
    return _info.get()


@contextlib.contextmanager
def rank_of(info: LaunchInfo | None) -> Iterator[None]:
    """Within this context, on this thread, `launcher.current()` is info."""
    token = _info.set(info)
    try:
        yield
    finally:
        _info.reset(token)
