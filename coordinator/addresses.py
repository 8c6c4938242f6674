"""Addresses: of rank 0's listening socket, and of this host as others reach it."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import Any

from coordinator.errors import CoordinatorError
from launcher import LaunchInfo, host_addresses, listener_at

Address = tuple[Any, ...]  # as of getaddrinfo(3): in numbers, and so its family is known, too


def spans_nodes(info: LaunchInfo) -> bool:
    return info.local_world_size != info.world_size


def candidates(info: LaunchInfo) -> list[Address]:
    """Addresses where rank 0 may listen, the likeliest first: those of master_addr on this host.

    On many hosts their own name means the loopback, which no other host reaches. If the launch
    spans nodes, that is then replaced by the address this host uses towards others.
    """
    addresses = _resolve(info)
    if any(map(_is_wildcard, addresses)):
        raise CoordinatorError(
            f"rank {info.rank}: master_addr {info.master_addr!r} is every interface and no host, "
            "so strangers could reach rank 0 by any of them. Give the one address of rank 0's host "
            "by which the others reach it."
        )
    if spans_nodes(info) and all(map(_is_link_local, addresses)):
        raise CoordinatorError(
            f"rank {info.rank}: master_addr {info.master_addr!r} is good on one link alone, where "
            "each host calls that link by a name of its own, so the nodes could not connect to "
            "each other. Give an address of rank 0's host that is good everywhere."
        )
    is_name = not _is_literal(info.master_addr)
    if spans_nodes(info) and is_name and any(map(_is_loopback, addresses)):
        outside = [address for address in addresses if not _is_loopback(address)]
        routable = host_addresses.routable_addresses()
        return outside + [(text, info.master_port) for text in routable] or addresses
    return addresses


def _resolve(info: LaunchInfo) -> list[Address]:
    try:
        # As bytes: for text, getaddrinfo first loads the tables of international names.
        host = info.master_addr
        records = socket.getaddrinfo(
            host.encode() if host.isascii() else host, info.master_port, type=socket.SOCK_STREAM
        )
    except (socket.gaierror, UnicodeError) as error:  # a name that is too long, too
        raise CoordinatorError(
            f"rank {info.rank} (host {socket.gethostname()}) does not know where "
            f"{info.master_addr!r} is ({getattr(error, 'strerror', error)}), so it cannot reach "
            "rank 0. Give an address that every host knows with --master-addr."
        ) from error
    return [address for *_, address in records]


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(host.partition("%")[0])


def _is_literal(host: str) -> bool:
    try:
        _parsed(host)
    except ValueError:
        return False
    return True


def _is_loopback(address: Address) -> bool:
    return _parsed(address[0]).is_loopback


def is_loopback_down(target: Address, error: Exception) -> bool:
    """True if error, of a connection to target, is what it would be without that interface."""
    return getattr(error, "errno", 0) == errno.ENETUNREACH and target[0] in ("127.0.0.1", "::1")


def _is_wildcard(address: Address) -> bool:
    parsed = _parsed(address[0])
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_unspecified


def _is_link_local(address: Address) -> bool:
    parsed = _parsed(address[0])
    return parsed.version == 6 and parsed.is_link_local


def listen(info: LaunchInfo) -> socket.socket:
    """A socket that listens where the others look for rank 0, at that one address."""
    if "master_fd" in info.extras:
        return _adopt(info)
    refused: OSError | None = None
    for address in candidates(info):
        try:
            return listener_at(address)
        except OSError as error:
            refused = error
    raise CoordinatorError(
        f"rank 0 (host {socket.gethostname()}) cannot listen at {info.master_addr}:"
        f"{info.master_port}: {refused}. master_addr must be an address of rank 0's host and the "
        "port free: choose another --master-port, or give --master-addr."
    ) from refused


def _adopt(info: LaunchInfo) -> socket.socket:
    try:
        listener = socket.socket(fileno=os.dup(int(info.extras["master_fd"])))
        problem = _why_unfit(listener)
        if not problem:
            return listener
        listener.close()
        raise OSError(problem)
    except OSError as error:
        raise CoordinatorError(
            f"rank 0 cannot adopt descriptor {info.extras['master_fd']} as the listening socket "
            f"of the launch ({error}), so nobody could join. Was this process started by rank 0 "
            "without its descriptors? Pass them on, or let rank 0 itself make the Coordinator."
        ) from error


def _why_unfit(listener: socket.socket) -> str:
    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return "it does not listen"
    return "it listens on every interface" if _is_wildcard(listener.getsockname()) else ""
