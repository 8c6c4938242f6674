"""What the ranks print, line by line, each line with the rank it came from.

Nothing here blocks: what the reader of our output has not taken yet waits, and when much waits,
`is_full` tells the launcher to leave the rest with the ranks.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections import deque
from io import FileIO
from pathlib import Path
from typing import TextIO

from launcher.records.pipe_records import Lines

COLOURS = (36, 33, 32, 35, 34, 31)  # ECMA-48 foreground colours, one rank after another
CHUNK = select.PIPE_BUF  # a pipe that is ready takes this much without blocking
FULL = 4 << 20
LONGEST_LINE = 1 << 20
PROMPT_S = 0.05  # a terminal shows a line without an end after this time


class Output:
    """Whole lines to our standard output and error, and bytes as they are to log files."""

    def __init__(self, log_dir: str | None = None, nprocs: int = 0) -> None:
        self._screens = {"out": Screen(sys.stdout), "err": Screen(sys.stderr)}
        self._queue: deque[tuple[Screen, bytes]] = deque()
        self._waiting = 0
        self._lines: dict[tuple[int, str], Lines] = {}
        self._cursor: tuple[int, str] | None = None  # whose unfinished line the terminal shows
        self._begun = time.monotonic()  # the line that is unfinished, or the last one ended
        self._logs = _open_logs(log_dir, nprocs) if log_dir else {}

    @property
    def is_full(self) -> bool:
        return self._waiting > FULL

    @property
    def is_waiting(self) -> bool:
        return bool(self._queue)

    def patience(self) -> float | None:
        """How long the launcher may sleep before it should call pump again; None is for ever."""
        return 0.02 if self._queue else PROMPT_S if self._prompts() else None

    def take(self, rank: int, stream: str, data: bytes) -> None:
        """What a rank printed, as it came; nothing at its end.

        Raises OSError if a log file takes no more.
        """
        self._log(rank, stream, data)
        lines = self._lines.setdefault((rank, stream), Lines())
        whole = lines.feed(data)
        if whole:
            self._put(rank, stream, b"\n".join([*whole, b""]))
        if lines.nbytes > LONGEST_LINE or (lines.nbytes and not data):
            self._put(rank, stream, lines.take() + b"\n")
        if whole or lines.nbytes == len(data):  # more of the same line does not put it off
            self._begun = time.monotonic()

    def log(self, rank: int, text: str) -> None:
        """Into the rank's log of errors only, if there is one."""
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
        """A line of the launcher's own."""
        screen = self._screens["err"]
        self._append(screen, self._fresh_line(screen) + f"[launcher] {text}\n".encode())
        self._cursor = None if screen.is_terminal else self._cursor

    def pump(self, wait_s: float = 0.0) -> None:
        """Write what the readers take, waiting that long at most.

        Raises OSError if they take no more, ever.
        """
        self._show_prompts()
        while self._queue:
            screen, data = self._queue[0]
            rest = screen.write(data, wait_s)
            self._waiting -= len(data) - len(rest)
            if rest:
                self._queue[0] = (screen, rest)
                return
            self._queue.popleft()

    def give_up(self) -> None:
        """After pump has raised: drop what waits, and print no more."""
        self._queue.clear()
        self._waiting = 0
        for screen in self._screens.values():
            screen.stream = None

    def close(self) -> None:
        for log in self._logs.values():
            log.close()

    def _put(self, rank: int, stream: str, text: bytes) -> None:
        """Queue lines of a rank, each after its prefix; the last may have no end on a terminal."""
        screen = self._screens[stream]
        mark = prefix(rank, stream, screen.is_terminal)
        begin, end = text[:-1], text[-1:]
        begin = begin.replace(b"\n", b"\n" + mark)
        if screen.is_terminal:
            begin = begin.replace(b"\r", b"\r" + mark)
        goes_on = screen.is_terminal and self._cursor == (rank, stream)
        self._append(screen, (b"" if goes_on else self._fresh_line(screen) + mark) + begin + end)
        if screen.is_terminal:
            self._cursor = None if end == b"\n" else (rank, stream)

    def _fresh_line(self, screen: Screen) -> bytes:
        return b"\n" if self._cursor and screen.is_terminal else b""

    def _append(self, screen: Screen, data: bytes) -> None:
        if screen.stream is not None:
            self._queue.append((screen, data))
            self._waiting += len(data)

    def _prompts(self) -> list[tuple[int, str]]:
        """The unfinished lines that a terminal should show before they end."""
        return [
            key
            for key, lines in self._lines.items()
            if lines.nbytes and self._screens[key[1]].is_terminal
        ]

    def _show_prompts(self) -> None:
        if time.monotonic() - self._begun >= PROMPT_S:
            for rank, stream in self._prompts():
                self._put(rank, stream, self._lines[rank, stream].take())


class Screen:
    """A standard stream of this process; one without a descriptor takes text, and at once."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream
        self.is_terminal = stream is not None and stream.isatty()
        self._fd = _descriptor(stream)
        self._poll = select.poll()
        if self._fd is not None:
            self._poll.register(self._fd, select.POLLOUT)

    def write(self, data: bytes, wait_s: float) -> bytes:
        """What is left of data."""
        if self.stream is None:
            return b""
        if self._fd is None:
            self.stream.write(data.decode(errors="replace"))
            return b""
        self.stream.flush()
        while data and self._poll.poll(wait_s * 1000):
            data = data[os.write(self._fd, data[:CHUNK]) :]
        return data


def _descriptor(stream: TextIO | None) -> int | None:
    try:
        return None if stream is None else stream.fileno()
    except OSError:
        return None


def prefix(rank: int, stream: str, coloured: bool) -> bytes:
    text = f"[{rank}]" if stream == "out" else f"[{rank} err]"
    if coloured and "NO_COLOR" not in os.environ:
        text = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{text}\x1b[0m"
    return f"{text} ".encode()


def _open_logs(folder: str, nprocs: int) -> dict[tuple[int, str], FileIO]:
    """rank-0.out, rank-0.err and so on, unbuffered. Raises OSError if folder cannot be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return {
            (rank, stream): FileIO(Path(folder, f"rank-{rank}.{stream}"), "w")
            for rank in range(nprocs)
            for stream in ("out", "err")
        }
    except OSError as error:
        raise OSError(
            error.errno,
            f"the folder {folder!r} for logs cannot be written ({error.strerror}: "
            f"{error.filename!r}), so what the ranks print would be lost and none was started. "
            "Make it yours to write, or name another with --log-dir.",
        ) from error
