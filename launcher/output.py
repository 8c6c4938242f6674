"""What the ranks print, line by line, each line with the rank it came from."""

from __future__ import annotations

import os
import sys
from typing import TextIO

COLOURS = (36, 33, 32, 35, 34, 31)  # ECMA-48 foreground colours, one rank after another


class Output:
    """Writes whole lines to this process's standard output and error."""

    def __init__(self) -> None:
        self._streams = {"out": sys.stdout, "err": sys.stderr}

    def line(self, rank: int, stream: str, text: bytes) -> None:
        target = self._streams[stream]
        if target is not None:
            _write(target, _prefix(rank, stream, _is_terminal(target)) + text + b"\n")

    def notice(self, text: str) -> None:
        """A line of the launcher's own."""
        if sys.stderr is not None:
            _write(sys.stderr, f"[launcher] {text}\n".encode())


def _prefix(rank: int, stream: str, coloured: bool) -> bytes:
    text = f"[{rank}]" if stream == "out" else f"[{rank} err]"
    if coloured:
        text = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{text}\x1b[0m"
    return f"{text} ".encode()


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ


def _write(stream: TextIO, data: bytes) -> None:
    """All of data, past the stream's own buffer where it has a descriptor."""
    stream.flush()
    try:
        fd = stream.fileno()
    except OSError:
        stream.write(data.decode(errors="replace"))
        return
    while data:
        data = data[os.write(fd, data) :]
