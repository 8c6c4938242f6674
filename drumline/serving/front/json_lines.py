"""Messages between the front and rank 0: one line of JSON each, over a stream socket.

connection.sendall(to_line({"cancel": 3}))
for message in messages(connection): ...
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any


def to_line(message: dict[str, Any]) -> bytes:
    """The message as its line."""
    return json.dumps(message).encode() + b"\n"


def messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield until the other end is gone, or hang_up() was called here."""
    with contextlib.suppress(ConnectionError), connection.makefile("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):  # else it was being sent when the other end died
                yield json.loads(line)


def hang_up(connection: socket.socket) -> None:
    """End messages() at both ends; from any thread."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
