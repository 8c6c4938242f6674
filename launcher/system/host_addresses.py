"""Addresses of this host, as other hosts reach it."""

from __future__ import annotations

import contextlib
import fcntl
import re
import socket
import struct
from pathlib import Path
from typing import Any

from launcher.system import linux

SIOCGIFADDR = 0x8915  # netdevice(7)
# Nobody has these (RFC 5737, RFC 3849): asking for the way to them gives the way out.
OUTSIDE = ("192.0.2.1", "2001:db8::1")


def routable_addresses() -> list[str]:
    """Addresses of this host on its default routes; without those, of its interfaces."""
    addresses = []
    for outside in OUTSIDE:
        with contextlib.suppress(OSError):  # no such route
            addresses.append(local_address_for((outside, 9)))
    return addresses or _interface_addresses()


def family_of(host: str) -> socket.AddressFamily:
    """The family of an address in numbers."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def endpoint(host: str, port: int, *_: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address_for(address: tuple[Any, ...]) -> str:
    """The local address from which the kernel would send there; nothing is sent."""
    with socket.socket(family_of(address[0]), socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_ipv6(text: str) -> bool:
    try:
        return bool(socket.inet_pton(socket.AF_INET6, text.partition("%")[0]))
    except (OSError, ValueError):
        return False


def _interface_addresses() -> list[str]:
    """The addresses of real interfaces, IPv4 first: a bridge is inside this host."""
    real = {name: texts for name, texts in interfaces().items() if name != "lo"}
    texts = [text for name in real if not _is_bridge(name) for text in real[name]]
    return sorted(texts, key=is_ipv6)


def _is_bridge(name: str) -> bool:
    return Path("/sys/class/net", name, "bridge").exists()


def ipv4_of(name: str) -> str:
    request = struct.pack("256s", name.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
        except OSError:
            return ""


def ipv6_addresses() -> list[tuple[str, str]]:
    """Interface and address, of those that are not for one link only (scope 0, if_inet6)."""
    fields = [line.split() for line in linux.read_proc("net/if_inet6").splitlines()]
    return [
        (name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(text)))
        for text, scope, name in (line[:1] + line[3:6:2] for line in fields if len(line) == 6)
        if scope == "00" and re.fullmatch("[0-9a-f]{32}", text)
    ]


def interfaces() -> dict[str, list[str]]:
    """The addresses of each interface, without link-local ones."""
    by_name = {name: [text] if (text := ipv4_of(name)) else [] for _, name in socket.if_nameindex()}
    for name, text in ipv6_addresses():
        by_name.setdefault(name, []).append(text)
    return by_name
