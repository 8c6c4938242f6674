"""Standard output and error for ranks that share one process: whole lines, each with its rank."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

from launcher import launch_context
from launcher.job import Job
from launcher.runtime.output import Output

WAIT_S = 0.1


@contextlib.contextmanager
def replaced(job: Job) -> Iterator[None]:
    """Within this context, a rank's thread prints the way a rank's process does."""
    output, lock = Output(job.log_dir, job.nprocs), threading.Lock()
    before = sys.stdout, sys.stderr
    sys.stdout = _RankStream(output, lock, "out", before[0])
    sys.stderr = _RankStream(output, lock, "err", before[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        with lock:
            for rank in range(job.nprocs):
                output.take(rank, "out", b"")
                output.take(rank, "err", b"")
            _flush(output)
            output.close()


def _flush(output: Output) -> None:
    while output.is_waiting:
        output.pump(WAIT_S)


class _RankStream(io.TextIOBase):
    """Text of threads that are no rank's goes to the stream that was there before."""

    def __init__(self, output: Output, lock: threading.Lock, name: str, before: TextIO) -> None:
        self._output = output
        self._lock = lock
        self._name = name
        self._before = before

    def write(self, text: str) -> int:
        info = launch_context.current()
        if info is None:
            return self._before.write(text)
        with self._lock:
            self._output.take(info.rank, self._name, text.encode(errors="backslashreplace"))
            _flush(self._output)
        return len(text)

    def flush(self) -> None:
        """Nothing waits here but lines without an end."""

    def isatty(self) -> bool:
        return self._before.isatty()
