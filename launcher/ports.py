"""The port of a launch: hashed from its launch_id, with linear probing upward on collision."""

from __future__ import annotations

import errno
import hashlib
import socket

from launcher.system import linux

FIRST_PORT = 10_000
END_PORT = 32_768  # where Linux begins to give ports to outgoing connections, by default
BACKLOG = 2048
IN_USE = (errno.EADDRINUSE, errno.EACCES)  # another port may do; for anything else none would
NOT_LOCAL = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)


def listen(launch_id: str, address: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A socket that listens on address, at port, or at the first free one from launch_id's hash on.

    It listens from the start: a bound socket that does not can be stolen by another that sets
    SO_REUSEADDR. Raises OSError if no port is free, or address does not belong to this node.
    """
    for candidate in [port] if port else candidates(launch_id):
        try:
            return _bound(address, candidate)
        except (OSError, UnicodeError) as error:
            if not isinstance(error, OSError) or error.errno not in IN_USE:
                raise _address_error(error, address) from error
            refused = error
    ports = f"port {port}" if port else f"every port from {FIRST_PORT} to {END_PORT}"
    raise OSError(
        refused.errno,
        f"{ports} of {address} cannot be bound ({refused.strerror}), and the ranks would not find "
        "each other. Free one, or choose another with --master-port.",
    )


def _address_error(error: OSError | UnicodeError, address: str) -> OSError | UnicodeError:
    """The error to raise where every port of the address would fail."""
    is_name = isinstance(error, (socket.gaierror, UnicodeError))
    if not (is_name or (isinstance(error, OSError) and error.errno in NOT_LOCAL)):
        return error
    return OSError(
        errno.EADDRNOTAVAIL,
        f"{address!r} is no address of this node ({error}), so rank 0 cannot listen there. "
        "`ip address` shows the addresses of this node: name one with --master-addr.",
    )


def candidates(launch_id: str) -> list[int]:
    """Every port of the range, from the hash of launch_id upward and around.

    Ephemeral ports of this node come last: an outgoing connection may take them at any time.
    """
    size = END_PORT - FIRST_PORT
    digest = hashlib.blake2b(launch_id.encode(), digest_size=8).digest()
    first = int.from_bytes(digest, "big") % size
    all_ports = [FIRST_PORT + (first + step) % size for step in range(size)]
    ephemeral = linux.ephemeral_ports()
    return sorted(all_ports, key=lambda port: port in ephemeral)


def _bound(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
