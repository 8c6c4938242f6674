"""JSON records over pipes, one a line, between the launcher, its keeper and its ranks.

A record starts with the ASCII record separator (as in RFC 7464), so that raw text on the same pipe,
such as the dump of a crash, is told apart.
"""

from __future__ import annotations

import os
from typing import Any

from launcher import values

MARK = "\x1e"


def send(fd: int, record: dict[str, Any]) -> None:
    data = f"{MARK}{values.dumps(record)}\n".encode()
    while data:
        data = data[os.write(fd, data) :]


def parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if the line is raw text."""
    if not line.startswith(MARK.encode()):
        return None
    record: dict[str, Any] = values.loads(line[1:])
    return record


class Lines:
    """Bytes in, whole lines out. `rest` is what has no end yet."""

    def __init__(self) -> None:
        self.rest = b""
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines
