"""Processes of this host: alive, suspended or how they ended, through a pidfd and /proc."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time

from coordinator.peers import Peer
from launcher import linux

# linux/pidfd.h: PIDFD_GET_INFO tells, since Linux 6.15, how a process ended that is not our child.
INFO_NBYTES = 64
PIDFD_GET_INFO = 0xC0000000 | INFO_NBYTES << 16 | 0xFF << 8 | 11
PIDFD_INFO_EXIT = 1 << 3
EXIT_CODE_OFFSET = 60


class PeerProcess:
    """The process of a peer; one that this process cannot see in /proc is never seen dead."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._fd = -1
        self._exit_state = ""
        self.exit_status: int | None = None  # once it is dead: its exit code, or minus the signal
        if not peer.is_visible:
            return
        try:
            self._fd = os.pidfd_open(peer.pid)
        except OSError:
            return  # gone already, or a kernel or container without pidfds: /proc must do
        linux.closed_in_children(self)
        if peer.is_known_dead() and not _is_signalled(self._fd):
            self.close()  # the number belongs to another process by now

    def fileno(self) -> int:
        """The pidfd, readable once the process is dead; -1 if there is none."""
        return self._fd

    def is_dead(self) -> bool:
        if self._exit_state:
            return True
        fd = self._fd
        is_dead = _is_signalled(fd) if fd >= 0 else self.peer.is_known_dead()
        if is_dead:
            status = self._wait_status()
            self.exit_status = None if status is None else os.waitstatus_to_exitcode(status)
            self._exit_state = describe_exit(self.exit_status)
        return is_dead

    def is_suspended(self) -> bool:
        stat = linux.process_stat(self.peer.pid) if self.peer.is_visible else None
        return stat is not None and stat.is_stopped

    def dies_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.is_dead() and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.is_dead()

    def state(self) -> str:
        """Its end in words, or suspended, running, sleeping; "" if it cannot be seen."""
        if self.is_dead():
            return self._exit_state
        if not self.peer.is_visible:
            return ""
        stat = linux.process_stat(self.peer.pid)
        if stat is not None and stat.is_stopped:
            return "suspended"
        return "running" if stat is not None and stat.state == "R" else "sleeping"

    def _wait_status(self) -> int | None:
        """The status that waitpid gives; None where the kernel does not tell."""
        stat = linux.process_stat(self.peer.pid)
        if stat is not None and not stat.is_alive and stat.wait_status is not None:
            return stat.wait_status
        if self._fd < 0:
            return None
        info = bytearray(struct.pack("Q", PIDFD_INFO_EXIT).ljust(INFO_NBYTES, b"\0"))
        try:
            fcntl.ioctl(self._fd, PIDFD_GET_INFO, info)
        except OSError:
            return None
        (mask,) = struct.unpack_from("Q", info)
        (status,) = struct.unpack_from("i", info, EXIT_CODE_OFFSET)
        return int(status) if mask & PIDFD_INFO_EXIT else None

    def close(self) -> None:
        fd, self._fd = self._fd, -1  # first: a child that is forked meanwhile closes no other file
        if fd >= 0:
            os.close(fd)


def _is_signalled(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def describe_exit(exit_status: int | None) -> str:
    if exit_status is None:
        return "exited"
    if exit_status >= 0:
        return f"exited with code {exit_status}"
    try:
        return f"exited with {signal.Signals(-exit_status).name}"
    except ValueError:
        return f"exited with signal {-exit_status}"
