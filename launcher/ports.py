"""A port for each launch: hashed from its launch_id, so that launches rarely meet, and probed
upward where they do.
"""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

FIRST_PORT = 10_000
BACKLOG = 2048


def listen(launch_id: str, address: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A socket bound to address and listening, on `port` or on the first free one at the hash of
    launch_id.

    It listens from the start: a bound socket that does not listen can be stolen by another that
    sets SO_REUSEADDR. Raises OSError if no port is free.
    """
    if port:
        return _bound(address, port)
    for candidate in candidates(launch_id):
        try:
            return _bound(address, candidate)
        except OSError as error:
            refused = error
    raise OSError(
        refused.errno,
        f"no port of {address} from {FIRST_PORT} to {_end()} could be bound ({refused.strerror}): "
        "the ranks "
        "would not find each other. Give one with --master-port, or free some.",
    )


def candidates(launch_id: str) -> list[int]:
    """Every port of the range, from the launch's own upward and around."""
    size = _end() - FIRST_PORT
    digest = hashlib.blake2b(launch_id.encode(), digest_size=8).digest()
    first = int.from_bytes(digest, "big") % size
    return [FIRST_PORT + (first + step) % size for step in range(size)]


def _bound(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((address, port))
        opened.listen(BACKLOG)
    except BaseException:
        opened.close()
        raise
    return opened


def _end() -> int:
    """The first port that the kernel gives to outgoing connections: ours must stay below."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first = 32768
    return first if first > FIRST_PORT + 1000 else 32768
