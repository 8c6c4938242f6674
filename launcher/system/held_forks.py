"""Forks that go on only once all of them have proved safe."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

TOO_MANY_PROCESSES = (
    "Perhaps this user, or the container, may have no more processes and threads: end some, or "
    "raise that limit (`ulimit -u`)"
)


@contextlib.contextmanager
def explained_limit() -> Iterator[None]:
    """Let the error of a process that could not be started say what to do."""
    try:
        yield
    except BlockingIOError as error:  # EAGAIN
        raise OSError(error.errno, f"{error.strerror}. {TOO_MANY_PROCESSES}") from error


class HeldForks:
    """Fork children that wait; let them all go on, or let them all exit.

    Libraries may end their threads in fork handlers and start them again later, so that only after
    a fork it shows whether it was safe. If this process dies, the children exit too.
    """

    def __init__(self) -> None:
        self._waiting, self._release = os.pipe()
        self._count = 0

    def fork(self) -> int:
        """The child's pid; 0 in a child that was let go. Raises OSError, which says what to do."""
        with explained_limit():
            pid = os.fork()
        if pid == 0:
            os.close(self._release)
            if not os.read(self._waiting, 1):
                os._exit(1)
            os.close(self._waiting)
        self._count += 1
        return pid

    def end(self, let_go: bool) -> None:
        """Let all children go on, or exit."""
        if let_go:
            os.write(self._release, b"." * self._count)
        os.close(self._waiting)
        os.close(self._release)
