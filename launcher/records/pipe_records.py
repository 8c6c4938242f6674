"""JSON records over pipes, one a line, between the launcher, its fork server and its ranks.

A record starts with the ASCII record separator (as in RFC 7464), so that it can be told from raw
text on the same pipe, such as the stack dump of a crash.
"""

from __future__ import annotations

import os
from typing import Any

from launcher.records import json_values

SEPARATOR = "\x1e"


def send(fd: int, record: dict[str, Any]) -> None:
    """Write all of a record; it blocks while the pipe is full."""
    data = memoryview(f"{SEPARATOR}{json_values.dumps(record)}\n".encode())
    while data:
        data = data[os.write(fd, data) :]


def parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line, {} if a stack dump cut into it; None if the line is raw text."""
    if not line.startswith(SEPARATOR.encode()):
        return None
    try:
        return json_values.loads(line[1:])  # type: ignore[no-any-return]
    except ValueError:
        return {}


class LineBuffer:
    """Bytes in, whole lines out; an unfinished line is kept in parts, for it may be long."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.nbytes = 0  # of the unfinished line

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that end in data, without their ends."""
        head, newline, tail = data.rpartition(b"\n")
        lines = (self.take() + head).split(b"\n") if newline else []
        self._parts.append(tail)
        self.nbytes += len(tail)
        return lines

    def take(self) -> bytes:
        """The unfinished line; it will not be returned again."""
        rest = b"".join(self._parts)
        self._parts.clear()
        self.nbytes = 0
        return rest
