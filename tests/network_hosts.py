"""Hosts with networks of their own: network namespaces of this machine, joined by a switch.

with NetworkHosts(3, rate="200mbit") as hosts:
    process = subprocess.Popen(hosts.command(0, ["python", "script.py"]))

As root on Linux, with iproute2. Each host's link is held to the rate in both directions.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack

INTERFACE = "eth0"  # of every host
_numbers = itertools.count()


class NoNetworkNamespaces(Exception):
    """This machine cannot make them, or this user may not."""


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class NetworkHosts:
    """So many hosts. rate: of each link, as tc(8) writes it; the machine's own if empty.

    addresses: of the hosts, in order. Raises NoNetworkNamespaces.
    """

    def __init__(self, count: int, rate: str = "", network: str = "10.79.0") -> None:
        self._stack = ExitStack()
        prefix = f"nh{os.getpid()}x{next(_numbers)}"
        self.addresses = [f"{network}.{k + 1}" for k in range(count)]
        self.names = [f"{prefix}h{k}" for k in range(count)]
        self._switch = f"{prefix}s"
        try:
            for name in (self._switch, *self.names):
                self._namespace(name)
            ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            ip("-n", self._switch, "link", "set", "br0", "up")
            for k, name in enumerate(self.names):
                self._connect(name, f"port{k}", f"{self.addresses[k]}/24", rate)
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            raise NoNetworkNamespaces(
                f"no network namespaces ({error}): runs as root on Linux with iproute2"
            ) from error

    def _namespace(self, name: str) -> None:
        ip("netns", "add", name)
        self._stack.callback(ip, "netns", "del", name)
        ip("-n", name, "link", "set", "lo", "up")

    def _connect(self, name: str, port: str, address: str, rate: str) -> None:
        """A cable from the host's eth0 to a port of the switch."""
        ip(
            *("link", "add", INTERFACE, "netns", name, "type", "veth"),
            *("peer", "name", port, "netns", self._switch),
        )
        ip("-n", self._switch, "link", "set", port, "master", "br0")
        ip("-n", name, "addr", "add", address, "dev", INTERFACE)
        for place, device in ((name, INTERFACE), (self._switch, port)):
            ip("-n", place, "link", "set", device, "up")
            if rate:
                shape = ["qdisc", "add", "dev", device, "root", "tbf", "rate", rate]
                limits = ["burst", "64kb", "latency", "200ms"]
                subprocess.run(["tc", "-n", place, *shape, *limits], check=True, timeout=10)

    def command(self, index: int, command: Sequence[str]) -> list[str]:
        """The command, on that host, which has a name of its own."""
        name = self.names[index]
        inside = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c"]
        return [*inside, f'hostname {name}; exec "$@"', "sh", *command]

    def cut(self, index: int) -> None:
        """Take the host's link down."""
        ip("-n", self.names[index], "link", "set", INTERFACE, "down")

    def sent_nbytes(self, index: int) -> int:
        """What the host has sent since it was made, headers included."""
        counter = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return int(subprocess.check_output(self.command(index, ["cat", counter]), timeout=10))

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> NetworkHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
