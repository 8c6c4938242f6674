"""The signals that stop programs, as calls in a loop rather than as interruptions of it."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterator

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def hold_back() -> None:
    """Let stopping signals wait for this thread, until heard or release lets them through."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)


def release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


@contextlib.contextmanager
def heard(selector: selectors.BaseSelector, action: Callable[[int], None]) -> Iterator[None]:
    """Within this context, action(number) is what the selector's loop calls for a stopping signal.

    A signal that this process ignores, as under nohup, stays ignored. Only the main
    thread can hear; on another, the program's own handlers stay in place.
    """
    if threading.current_thread() is not threading.main_thread():
        release()
        yield
        return
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    selector.register(reading, selectors.EVENT_READ, lambda: _each(reading, action))
    wanted = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    old_fd = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    old = {number: signal.signal(number, lambda *_: None) for number in wanted}
    release()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in old.items():
            signal.signal(number, handler)
        selector.unregister(reading)
        reading.close()
        writing.close()


def _each(reading: socket.socket, action: Callable[[int], None]) -> None:
    for number in reading.recv(4096):
        if number in STOPPING:
            action(number)
