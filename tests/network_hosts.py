"""Hosts with networks of their own: network namespaces of this machine, joined by a switch.

with NetworkHosts(3, rate="200mbit") as hosts:
    process = subprocess.Popen(hosts.command(0, ["python", "script.py"]))

As root on Linux, with iproute2. Each host's link is held to the rate in both directions; with a
delay, what it sends is. What a killed process leaves is cleared away by a process of its own.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

INTERFACE = "eth0"  # of every host
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000  # of sched.h
REMOTE_SHELL = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case $1 in {names} *) exit 255;; esac
shift
exec {ip} netns exec $host unshare --uts sh -c "hostname $host; $*"
"""
CLEAR_AFTER_DEATH = """
tail --pid="$1" -s 0.5 -f /dev/null
for path in /run/netns/"$2"*; do
    [ -e "$path" ] || continue
    ip netns pids "${path##*/}" | xargs -r kill -9
    ip netns del "${path##*/}"
    rm -rf "/etc/netns/${path##*/}"
done
for group in /sys/fs/cgroup/"$2"* /sys/fs/cgroup/memory/"$2"*; do
    [ -d "$group" ] || continue
    for _ in 1 2 3 4 5 6 7 8 9; do
        xargs -r kill -9 < "$group/cgroup.procs"
        rmdir "$group" && break
        sleep 0.2
    done
done
"""
_numbers = itertools.count()


class NoNetworkNamespaces(Exception):
    """This machine cannot make them, or this user may not."""


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def enter(name: str) -> None:
    """Move this process, which has one thread, to the host of that name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"{name} cannot be entered")
    socket.sethostname(name)


class Namespaces:
    """So many hosts without a network between them. Raises NoNetworkNamespaces."""

    def __init__(self, count: int) -> None:
        self._stack = ExitStack()
        self._prefix = f"nh{os.getpid()}x{next(_numbers)}"
        self._stack.callback(os.killpg, self._watch().pid, signal.SIGKILL)
        self.names = [f"{self._prefix}h{k}" for k in range(count)]
        for name in self.names:
            self._add(name)

    def _watch(self) -> subprocess.Popen[bytes]:
        """A process that clears away these hosts, and cgroups of their names, after our death."""
        command = ["sh", "-c", CLEAR_AFTER_DEATH, "sh", str(os.getpid()), self._prefix]
        nothing = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        return subprocess.Popen(command, start_new_session=True, **nothing)

    def _add(self, name: str) -> None:
        try:
            ip("netns", "add", name)
            self._stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            raise NoNetworkNamespaces(
                f"no network namespaces ({error}): runs as root on Linux with iproute2"
            ) from error

    def command(self, index: int, command: Sequence[str]) -> list[str]:
        """The command, on that host, which has a name of its own."""
        name = self.names[index]
        inside = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c"]
        return [*inside, f'hostname {name}; exec "$@"', "sh", *command]

    def enter(self, index: int) -> None:
        enter(self.names[index])

    def write_table(self, index: int, text: str) -> None:
        """Give commands on the host an /etc/hosts of their own; ip-netns(8) mounts it."""
        folder = Path("/etc/netns", self.names[index])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{text}\n")
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)

    def kill_processes(self) -> None:
        """Kill all that run on the hosts, daemons too."""
        for name in self.names:
            for pid in ip("netns", "pids", name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NetworkHosts(Namespaces):
    """So many hosts. rate: of each link, as tc(8) writes it; the machine's own if empty.

    delay_ms: of what passes from one host to another. addresses: of the hosts, in order.
    """

    def __init__(
        self, count: int, rate: str = "", network: str = "10.79.0", delay_ms: float = 0
    ) -> None:
        super().__init__(count)
        self.addresses = [f"{network}.{k + 1}" for k in range(count)]
        try:
            ends = self._slow_cables(delay_ms) if delay_ms else self._cables()
            for name, address in zip(self.names, self.addresses, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            for place, device in ends:
                ip("-n", place, "link", "set", device, "up")
                if rate:
                    shape = ["qdisc", "add", "dev", device, "root", "tbf", "rate", rate]
                    limits = ["burst", "64kb", "latency", "200ms"]
                    subprocess.run(["tc", "-n", place, *shape, *limits], check=True, timeout=10)
        except BaseException:
            self.close()
            raise

    def _cables(self) -> list[tuple[str, str]]:
        """From each host's eth0 to a port of a bridge; the ends, by namespace and name."""
        switch = f"{self._prefix}s"
        self._add(switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        ports = [(name, f"port{k}") for k, name in enumerate(self.names)]
        for name, port in ports:
            ip(
                *("link", "add", INTERFACE, "netns", name, "type", "veth"),
                *("peer", "name", port, "netns", switch),
            )
            ip("-n", switch, "link", "set", port, "master", "br0")
        return [end for name, port in ports for end in ((name, INTERFACE), (switch, port))]

    def _slow_cables(self, delay_ms: float) -> list[tuple[str, str]]:
        """From each host's eth0 to a process that hands on later; the ends."""
        program = Path(__file__).parent / "programs" / "slow_switch.py"
        command = [sys.executable, "-S", str(program), str(delay_ms), *self.names]
        switch = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert switch.stdout is not None
        self._stack.enter_context(switch)
        self._stack.callback(switch.kill)
        if not switch.stdout.readline():
            raise OSError("no switch with a delay: it needs /dev/net/tun")
        return [(name, INTERFACE) for name in self.names]

    @functools.cached_property
    def remote_shell(self) -> Path:
        """A program to call in place of ssh: with options, a host, a command."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        places = zip(self.addresses, self.names, strict=True)
        names = "".join(f"{address}|{name}) host={name};; " for address, name in places)
        path = folder / "remote_shell"
        path.write_text(REMOTE_SHELL.format(names=names, ip=shutil.which("ip")))
        path.chmod(0o755)
        return path

    def set_link(self, index: int, state: str) -> None:
        """Cut the host's link ("down"), or mend it ("up")."""
        ip("-n", self.names[index], "link", "set", INTERFACE, state)
