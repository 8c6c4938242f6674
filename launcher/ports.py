"""The ports of a launch: hashed from its launch_id, with linear probing upward on collision.

One is the Coordinator's, on which rank 0 listens from the start; the next is for torch's TCPStore.
"""

from __future__ import annotations

import errno
import hashlib
import socket
from collections.abc import Iterable
from typing import Any

from launcher.system import linux

FIRST_PORT = 10_000
END_PORT = 32_768  # where Linux begins to give ports to outgoing connections, by default
NODES_PORT = 29_600  # where the commands of several nodes meet, unless --master-port is given
BACKLOG = 2048
OF_IPV4 = bytes(10) + b"\xff\xff"  # before an IPv4 address that is written as one of IPv6
IN_USE = (errno.EADDRINUSE, errno.EACCES)  # another port may do; for anything else none would
NOT_LOCAL = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL)


def listen(launch_id: str, address: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A socket that listens on address, at port, or at the first free one from launch_id's hash on.

    It listens from the start: a bound socket that does not can be stolen by another that sets
    SO_REUSEADDR. Raises OSError if no port is free, or address does not belong to this node.
    """
    for candidate in [port] if port else candidates(launch_id):
        try:
            return listener_at((address, candidate), may_share=bool(port))
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
        f"{address!r} is not an address of this node ({error}), so rank 0 cannot listen there. "
        "`ip address` shows the addresses of this node: name one with --master-addr.",
    )


def candidates(launch_id: str) -> list[int]:
    """Every port of the range, from the hash of launch_id upward and around.

    Ephemeral ports of this node come last: an outgoing connection may take them at any time.
    """
    digest = hashlib.blake2b(launch_id.encode(errors="surrogatepass"), digest_size=8).digest()
    first = FIRST_PORT + int.from_bytes(digest, "big") % (END_PORT - FIRST_PORT)
    all_ports = [*range(first, END_PORT), *range(FIRST_PORT, first)]
    ephemeral = linux.ephemeral_ports()
    fixed = [port for port in all_ports if port not in ephemeral]
    return fixed + [port for port in all_ports if port in ephemeral]


def of_torch(launch_id: str, port: int) -> int:
    """The port of torchrun's store where each node has a torchrun: or by launch_id if it is 0."""
    return port or candidates(launch_id)[0]


def of_nodes(launch_id: str, master_port: int) -> dict[str, Any]:
    """The ports of a launch over nodes, for one to tell the others: they may not find the same."""
    port = master_port or candidates(launch_id)[0]
    return {"master_port": port, "torch_port": torch_candidates(launch_id, port)[0]}


def torch_candidates(launch_id: str, master_port: int) -> list[int]:
    """The ports for torch's TCPStore: those of the launch after its first, but master_port."""
    return [port for port in candidates(launch_id)[1:] if port != master_port]


def reserve_for_torch(launch_id: str, master_port: int) -> socket.socket:
    """A socket that keeps the first free one of them, see reserve."""
    return reserve(torch_candidates(launch_id, master_port))


def reserve(candidate_ports: Iterable[int]) -> socket.socket:
    """A socket that keeps the first free one of the ports until torch's TCPStore listens there.

    It is bound on every address, as the store will be, but does not listen. With SO_REUSEADDR,
    which the store sets, a port can be bound beside such a socket; without, by nobody.
    """
    is_dual = socket.has_dualstack_ipv6()
    for port in candidate_ports:
        holder = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET)
        try:
            if is_dual:
                holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            holder.bind(("", port))
            # Not before: it must fail where the holder of another launch is bound.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return holder
        except OSError as error:
            holder.close()
            if error.errno not in IN_USE:
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"port {port} is in use, so torch.distributed could not listen there on rank 0. Start the "
        "launch again with another --launch-id, from which its ports follow.",
    )


def listener_at(address: tuple[Any, ...], may_share: bool = True) -> socket.socket:
    """A socket that listens at one address of this host. Raises OSError.

    may_share: take the port even where a socket that does not listen keeps it, see reserve.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, may_share)
        listener.bind(address)
        host = socket.inet_pton(family, listener.getsockname()[0].partition("%")[0])
        if not any(host.removeprefix(OF_IPV4)):
            raise OSError(errno.EADDRNOTAVAIL, "it is every interface, and no host")
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
