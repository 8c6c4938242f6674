"""The output of ranks, line by line, each line with the rank it came from.

Nothing here blocks: what the reader of our output has not taken yet is queued, and when much is
queued, `is_full` tells the launcher to leave the rest in the pipes of the ranks.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import deque
from io import FileIO
from pathlib import Path
from typing import TextIO

from launcher import timings
from launcher.job import Job
from launcher.records.pipe_records import LineBuffer

COLOURS = (36, 33, 32, 35, 34, 31)  # ECMA-48 foreground colours, one rank after another
CHUNK = select.PIPE_BUF  # a pipe that is ready takes this much without blocking
QUEUE_NBYTES = 4 << 20
LINE_NBYTES = 1 << 20  # a longer line is printed in parts


class Output:
    """Writer of whole lines to our standard output and error, and of unchanged bytes to logs."""

    def __init__(self, job: Job | None = None) -> None:
        self._standard_streams = {
            "out": StandardStream(sys.stdout),
            "err": StandardStream(sys.stderr),
        }
        self._queue: deque[tuple[StandardStream, bytes]] = deque()
        self._queued_nbytes = 0
        self._buffers: dict[tuple[int, str], LineBuffer] = {}
        # Whose unfinished line the terminal shows, and since when it, or the last line, is there.
        self._cursor: tuple[int, str] | None = None
        self._line_began_s = time.monotonic()
        self._logs = _open_logs(job.log_dir, job) if job and job.log_dir else {}

    @property
    def is_full(self) -> bool:
        return self._queued_nbytes > QUEUE_NBYTES

    @property
    def is_waiting(self) -> bool:
        return bool(self._queue)

    def next_pump_s(self) -> float | None:
        """Seconds until pump should be called again; None for never."""
        if self._queue:
            return timings.TIMINGS.output_poll_s
        return timings.TIMINGS.prompt_s if self._prompts() else None

    def take(self, rank: int, stream: str, data: bytes) -> None:
        """Take what a rank printed, as it came; empty data is the end of the stream.

        Raises OSError if a log file cannot be written.
        """
        self._log(rank, stream, data)
        buffer = self._buffers.setdefault((rank, stream), LineBuffer())
        lines = buffer.feed(data)
        if lines:
            self._put(rank, stream, b"\n".join([*lines, b""]))
        if buffer.nbytes > LINE_NBYTES or (buffer.nbytes and not data):
            self._put(rank, stream, buffer.take() + b"\n")
        if lines or buffer.nbytes == len(data):  # more of the same line does not delay it
            self._line_began_s = time.monotonic()

    def log(self, rank: int, text: str) -> None:
        """Write text only to the rank's log of standard error, if there is one."""
        self._log(rank, "err", text.encode(errors="replace"))

    def _log(self, rank: int, stream: str, data: bytes) -> None:
        log = self._logs.get((rank, stream))
        if log is None:
            return
        try:
            while data:
                data = data[log.write(data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, log.name) from error

    def notice(self, text: str) -> None:
        """Print a line of the launcher's own."""
        standard_stream = self._standard_streams["err"]
        line = self._fresh_line(standard_stream) + f"[launcher] {text}\n".encode(errors="replace")
        self._append(standard_stream, line)
        self._cursor = None if standard_stream.is_terminal else self._cursor

    def pump(self, wait_s: float = 0.0) -> None:
        """Write what the readers accept, waiting wait_s at most.

        Raises OSError if they have gone, or a disk is full.
        """
        if time.monotonic() - self._line_began_s >= timings.TIMINGS.prompt_s:
            for rank, stream in self._prompts():
                self._put(rank, stream, self._buffers[rank, stream].take())
        while self._queue:
            standard_stream, data = self._queue[0]
            rest = standard_stream.write(data, wait_s)
            self._queued_nbytes -= len(data) - len(rest)
            if rest:
                self._queue[0] = (standard_stream, rest)
                return
            self._queue.popleft()

    def give_up(self) -> None:
        """After pump has raised: drop the queue, and print no more."""
        self._queue.clear()
        self._queued_nbytes = 0
        for standard_stream in self._standard_streams.values():
            standard_stream.stream = None

    def close(self) -> None:
        for log in self._logs.values():
            log.close()

    def _put(self, rank: int, stream: str, text: bytes) -> None:
        """Queue lines of a rank, each after its prefix; the last may have no end on a terminal."""
        standard_stream = self._standard_streams[stream]
        label = prefix(rank, stream, standard_stream.is_terminal)
        begin, end = text[:-1], text[-1:]
        begin = begin.replace(b"\n", b"\n" + label)
        if standard_stream.is_terminal:
            begin = begin.replace(b"\r", b"\r" + label)
        continues = standard_stream.is_terminal and self._cursor == (rank, stream)
        start = b"" if continues else self._fresh_line(standard_stream) + label
        self._append(standard_stream, start + begin + end)
        if standard_stream.is_terminal:
            self._cursor = None if end == b"\n" else (rank, stream)

    def _fresh_line(self, standard_stream: StandardStream) -> bytes:
        return b"\n" if self._cursor and standard_stream.is_terminal else b""

    def _append(self, standard_stream: StandardStream, data: bytes) -> None:
        if standard_stream.stream is not None:
            self._queue.append((standard_stream, data))
            self._queued_nbytes += len(data)

    def _prompts(self) -> list[tuple[int, str]]:
        """The unfinished lines that a terminal should show before they end."""
        return [
            key
            for key, buffer in self._buffers.items()
            if buffer.nbytes and self._standard_streams[key[1]].is_terminal
        ]


class StandardStream:
    """A standard stream of this process; one without a descriptor takes text at once."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.is_terminal = stream is not None and stream.isatty()
        self._fd: int | None = None
        if stream is not None:
            with contextlib.suppress(OSError):  # a stream in memory has none
                self._fd = stream.fileno()
        self._poll = select.poll()
        if self._fd is not None:
            self._poll.register(self._fd, select.POLLOUT)

    def write(self, data: bytes, wait_s: float) -> bytes:
        """Write without blocking for longer than wait_s; return the rest of data."""
        if self.stream is None:
            return b""
        if self._fd is None:
            self.stream.write(data.decode(errors="replace"))
            return b""
        with contextlib.suppress(BlockingIOError):  # another process has filled it
            self.stream.flush()
            while data and self._poll.poll(wait_s * 1000):
                data = data[os.write(self._fd, data[:CHUNK]) :]
        return data


def prefix(rank: int, stream: str, coloured: bool) -> bytes:
    """The label before each line of a rank."""
    text = f"[{rank}]" if stream == "out" else f"[{rank} err]"
    if coloured and "NO_COLOR" not in os.environ:
        text = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{text}\x1b[0m"
    return f"{text} ".encode()


def _open_logs(folder: str, job: Job) -> dict[tuple[int, str], FileIO]:
    """rank-0.out, rank-0.err and so on, unbuffered. Raises OSError if folder cannot be written."""
    mode = "a" if job.restart_count else "w"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return {
            (rank, stream): FileIO(Path(folder, f"rank-{rank}.{stream}"), mode)
            for rank in range(job.first_rank, job.first_rank + job.nprocs)
            for stream in ("out", "err")
        }
    except OSError as error:
        raise _unwritable_logs(folder, error) from error


def check_log_folder(folder: str) -> None:
    """Make the folder for logs. Raises OSError if it cannot be written."""
    import tempfile  # not needed by a launch of one node

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable_logs(folder, error) from error


def _unwritable_logs(folder: str, error: OSError) -> OSError:
    """The error to raise where the log folder, or a file in it, cannot be written."""
    return OSError(
        error.errno,
        f"the log folder {folder!r} cannot be written ({error.strerror}: {error.filename!r}), so "
        "the output of the ranks would be lost and none was started. Make it writable, or name "
        "another with --log-dir.",
    )
