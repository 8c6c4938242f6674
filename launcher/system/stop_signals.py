"""The signals that stop programs, dispatched by a selector loop instead of interrupting it."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A stop signal, raised by its handler. No Exception: a library would take that for an error of
    its import, and a loop over connections for one of a connection."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def block() -> None:
    """Keep stop signals pending for this thread until dispatched_to or unblock delivers them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def unblock() -> None:
    """Deliver stop signals again, those that are pending at once."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def reset_in_child() -> None:
    """Between fork and exec: undo the handlers' SIG_IGN and the mask, which exec would keep."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    unblock()


@contextlib.contextmanager
def handled_by(handle: Callable[[int], object]) -> Iterator[None]:
    """Within this context, call handle(number) for a stop signal, but not for an ignored one.

    Python runs handlers on the main thread only; on another, the program's own stay in place.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    old = {number: signal.signal(number, lambda n, _frame: handle(n)) for number in handled}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def dispatched_to(
    selector: selectors.BaseSelector, on_signal: Callable[[int], None]
) -> Iterator[None]:
    """Within this context, the selector's loop calls on_signal(number) for a stop signal.

    A signal that this process ignores, as under nohup, stays ignored; on a thread other than the
    main one, the program's own handlers stay in place.
    """
    if threading.current_thread() is not threading.main_thread():
        unblock()
        yield
        return
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)

    def dispatch() -> None:
        for number in reading.recv(4096):
            if number in STOP_SIGNALS:
                on_signal(number)

    selector.register(reading, selectors.EVENT_READ, dispatch)
    # The handler itself does nothing: Python writes the number to the wakeup descriptor. Only now,
    # with the descriptor in place, may a signal that arrived since block() be delivered.
    old_fd = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    with reading, writing, handled_by(lambda _: None):
        unblock()
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_fd)
            selector.unregister(reading)
