"""A port for each launch: hashed from its launch_id, and probed upward where two launches meet."""

from __future__ import annotations

import errno
import hashlib
import socket
from pathlib import Path

FIRST_PORT = 10_000
END_PORT = 32_768  # where Linux begins to give ports to outgoing connections, unless told otherwise
BACKLOG = 2048
TAKEN = (errno.EADDRINUSE, errno.EACCES)  # another port may do; for anything else none would
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)


def listen(launch_id: str, address: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A socket that listens on address, at port, or at the first free one from launch_id's hash on.

    It listens from the start: a bound socket that does not can be stolen by another that sets
    SO_REUSEADDR. Raises OSError if no port is free, or if address is none of this node.
    """
    for candidate in [port] if port else candidates(launch_id):
        try:
            return _bound(address, candidate)
        except (OSError, UnicodeError) as error:
            if not isinstance(error, OSError) or error.errno not in TAKEN:
                raise _explained(error, address) from error
            refused = error
    span = f"no port from {FIRST_PORT} to {END_PORT} of {address} can be bound"
    which = f"port {port} of {address} cannot be bound" if port else span
    raise OSError(
        refused.errno,
        f"{which} ({refused.strerror}), and the ranks would not find "
        "each other. Free one, or choose another with --master-port.",
    )


def _explained(error: OSError | UnicodeError, address: str) -> OSError | UnicodeError:
    """The error to raise for an address on which no port can be listened at."""
    is_name = isinstance(error, (socket.gaierror, UnicodeError))
    if not (is_name or (isinstance(error, OSError) and error.errno in NOT_HERE)):
        return error
    return OSError(
        errno.EADDRNOTAVAIL,
        f"{address!r} is no address of this node ({error}), so rank 0 cannot listen there. "
        "`ip address` shows those it has: name one with --master-addr.",
    )


def candidates(launch_id: str) -> list[int]:
    """Every port of the range, from the launch's own upward and around.

    Those that this node may give to an outgoing connection come last: they may be taken any time.
    """
    size = END_PORT - FIRST_PORT
    digest = hashlib.blake2b(launch_id.encode(), digest_size=8).digest()
    first = int.from_bytes(digest, "big") % size
    every = [FIRST_PORT + (first + step) % size for step in range(size)]
    outgoing = _ephemeral()
    return sorted(every, key=lambda port: port in outgoing)


def _ephemeral() -> range:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return range(0)
    return range(int(first), int(last) + 1)


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
