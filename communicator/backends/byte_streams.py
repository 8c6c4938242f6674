"""Streams of bytes between any two ranks, beside all calls: what messages are made of.

Libraries that offer the stream entries of communicator.h have them, and TCP connections here.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import select
import socket
import sys
import termios
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from communicator import timings
from communicator.errors import PeerLost
from coordinator import Coordinator, EncryptedSocket, link_state

if TYPE_CHECKING:
    from communicator._native import Comm

# Without a ctypes type for each size, which would stay until the garbage collector comes.
view_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
READ, WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE
READABLE, WRITABLE = 1, 2  # COMM_STREAM_READABLE, COMM_STREAM_WRITABLE
DISARM, ARM, WAKE = 0, 1, 2  # COMM_STREAM_DISARM and so on
# By the sum of those. Where nothing is read, no read finds the end.
EVENTS = (
    select.EPOLLRDHUP,
    select.EPOLLIN,
    select.EPOLLOUT | select.EPOLLRDHUP,
    select.EPOLLIN | select.EPOLLOUT,
)

KEEP_ALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}  # tcp(7); in seconds
SILENT_S = 5.0  # as soon as an idle connection is given up by these
# Bytes that wait in the system to be sent: more, and a rank seems to have sent what has not left.
UNSENT_NBYTES = 1 << 17


def silent_s(coor: Coordinator) -> float:
    """For how long a peer's host may be silent before the peer counts as lost."""
    return max(SILENT_S, coor.patience_s)


def configure(connection: socket.socket, silent_s: float) -> None:
    """Let the connection not block, not hold small messages back, and notice that a host died.

    silent_s: for how long that host may not answer, while nothing is on its way to it. What is, has
    no TCP_USER_TIMEOUT: that ends a connection to a peer that does not read, though its host
    answers (tcp_probe_timer of Linux). network_failure looks instead.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_NBYTES)
    probes = {"TCP_KEEPCNT": max(1, math.ceil(silent_s) - KEEP_ALIVE["TCP_KEEPIDLE"])}
    for option, value in {**KEEP_ALIVE, **probes}.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def network_failure(link: socket.socket, silent_s: float) -> str:
    """The network failure under a connection whose host is silent; "" if there is none."""
    if not link_state.describe_silence(link, silent_s):
        return ""
    # A probe may be on its way: of a peer that does not read they become rarer than silent_s.
    time.sleep(max(timings.TIMINGS.liveness_poll_s, 2 * link_state.round_trip_s(link)))
    return link_state.describe_silence(link, silent_s)


class TcpStreams:
    """Streams over one connection to each peer.

    One epoll has the connections, and the event that wakes a thread in stream_wait; the other has
    the first, while armed, and the event for stream_sleep.
    """

    def __init__(self, connections: dict[int, socket.socket], silent_s: float) -> None:
        self._connections, self._silent_s, self._pid = connections, silent_s, os.getpid()
        self._peers = {link.fileno(): peer for peer, link in connections.items()}
        self._encrypted = {
            peer: link for peer, link in connections.items() if isinstance(link, EncryptedSocket)
        }
        self._ends: dict[int, str] = {}
        self._drain_until = math.inf
        self._events: dict[int, int] = {}  # of the peers that are in the first epoll
        self._closing = threading.Lock()
        self._ready, self._service = select.epoll(), select.epoll()
        self._wake, self._wake_service = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0)
        for link in connections.values():
            configure(link, silent_s)
        self._ready.register(self._wake, select.EPOLLIN)
        self._service.register(self._wake_service, select.EPOLLIN)
        self._service.register(self._ready, 0)

    def stream_write(self, dst: int, prefix: bytes, address: int, nbytes: int, /) -> int:
        data = view_memory(address, nbytes, READ) if nbytes else b""
        try:
            return self._connections[dst].sendmsg([prefix, data])
        except BlockingIOError:
            return 0
        except OSError as error:
            self._ends.setdefault(dst, str(error))
            return 0

    def stream_read(self, src: int, address: int, nbytes: int, /) -> int:
        memory = view_memory(address, nbytes, WRITE)
        try:
            count = self._connections[src].recv_into(memory)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._ends.setdefault(src, str(error))
            count = 0
        if count == 0:
            self._ends.setdefault(src, "it closed the connection")
            self._set_events(src, 0)
        return count

    def stream_wait(self, interest: bytearray, timeout_ms: int, /) -> int:
        for peer, bits in enumerate(interest):
            events = 0 if peer in self._ends else EVENTS[bits]
            if events != self._events.get(peer, 0):
                self._set_events(peer, events)
        for peer, link in self._encrypted.items():
            if interest[peer] & READABLE and link.pending():
                return peer
        for fd, events in self._ready.poll(timeout_ms / 1e3, 1):
            if fd == self._wake:
                os.eventfd_read(self._wake)
                return -1
            peer = self._peers[fd]
            if events & select.EPOLLRDHUP and peer not in self._ends:
                error = self._connections[peer].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                self._ends[peer] = os.strerror(error) if error else "it closed the connection"
            return peer
        return -1

    def _set_events(self, peer: int, events: int) -> None:
        link = self._connections.get(peer)
        before = self._events.pop(peer, 0)
        if link is None or before == events:
            pass
        elif not events:  # one that is registered reports its end again and again
            self._ready.unregister(link)
        elif before:
            self._ready.modify(link, events)
        else:
            self._ready.register(link, events)
        if link is not None and events:
            self._events[peer] = events

    def stream_sleep(self, timeout_ms: int, /) -> None:
        for fd, _ in self._service.poll(timeout_ms / 1e3):
            if fd == self._wake_service:
                os.eventfd_read(fd)

    def stream_notify(self, what: int, /) -> None:
        if what == WAKE:
            os.eventfd_write(self._wake, 1)
            os.eventfd_write(self._wake_service, 1)
        else:
            self._service.modify(self._ready, select.EPOLLIN if what == ARM else 0)

    def stream_check(self, peer: int, /) -> None:
        link = self._connections.get(peer)  # none to this rank itself
        if why := self._ends.get(peer) or (link and network_failure(link, self._silent_s)):
            raise PeerLost(f"rank {peer}: {why}")

    def close(self, limit_s: float | None = None) -> None:
        """Close the connections once the peers' hosts have what was sent, or are silent.

        limit_s: for how long to wait for hosts that answer and peers that do not read; None: as for
        a silent host. No other thread may use the streams then. Twice, it only returns once they
        are closed.
        """
        if os.getpid() != self._pid:  # in a forked child they are the parent's, and so may the lock
            return self._close()
        limit_s = self._silent_s if limit_s is None else limit_s
        self._drain_until = min(self._drain_until, time.monotonic() + limit_s)  # of all that close
        with self._closing:
            if not self._ready.closed:
                self._drain()
                self._close()

    def _drain(self) -> None:
        """Send the end of each stream, and wait until the peers' hosts have acknowledged the rest.

        What comes meanwhile is dropped. If a connection is closed before that, and something is
        unread or comes later, the system resets it, and drops what has not left (RFC 1122,
        4.2.2.13).
        """
        links = list(self._connections.values())
        for link in links:
            with suppress(OSError):  # it has ended
                link.shutdown(socket.SHUT_WR)
        while links and time.monotonic() <= self._drain_until:
            links = [link for link in links if self._is_awaited(link)]
            if links:
                time.sleep(timings.TIMINGS.exit_poll_s)

    def _is_awaited(self, link: socket.socket) -> bool:
        return _has_unacknowledged(link) and not network_failure(link, self._silent_s)

    def _close(self) -> None:
        if self._ready.closed:
            return
        for link in self._connections.values():
            link.close()
        self._ready.close()
        self._service.close()
        os.close(self._wake)
        os.close(self._wake_service)


def _has_unacknowledged(link: socket.socket) -> bool:
    """Drop what has come. False too if the peer has closed its end."""
    size = bytearray(4)
    try:
        while socket.socket.recv(link, 1 << 16):  # of an encrypted one too, as it comes
            pass
    except BlockingIOError:
        fcntl.ioctl(link, termios.TIOCOUTQ, size)  # SIOCOUTQ, tcp(7)
    except OSError:
        pass
    return int.from_bytes(size, sys.byteorder) > 1  # the end of the stream counts as a byte


ByteStreams: TypeAlias = "Comm | TcpStreams"
"""The stream entries of communicator.h, where each is documented. Memory is an address."""
