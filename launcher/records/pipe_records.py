"""JSON records over pipes, one a line, between the launcher, its keeper and its ranks.

A record starts with the ASCII record separator (as in RFC 7464), so that raw text on the same pipe,
such as the dump of a crash, is told apart.
"""

from __future__ import annotations

import os
from typing import Any

from launcher.records import json_values

MARK = "\x1e"


def send(fd: int, record: dict[str, Any]) -> None:
    data = memoryview(f"{MARK}{json_values.dumps(record)}\n".encode())
    while data:
        data = data[os.write(fd, data) :]


def parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if the line is raw text."""
    if not line.startswith(MARK.encode()):
        return None
    record: dict[str, Any] = json_values.loads(line[1:])
    return record


class Lines:
    """Bytes in, whole lines out; the last, without an end, is kept in parts, for it may be long."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.nbytes = 0  # of the line that has no end yet

    def feed(self, data: bytes) -> list[bytes]:
        head, newline, tail = data.rpartition(b"\n")
        whole = b"".join([*self._parts, head]).split(b"\n") if newline else []
        if newline:
            self._parts.clear()
            self.nbytes = 0
        self._parts.append(tail)
        self.nbytes += len(tail)
        return whole

    def take(self) -> bytes:
        """What has no end yet; it will not be given again."""
        rest = b"".join(self._parts)
        self._parts.clear()
        self.nbytes = 0
        return rest
