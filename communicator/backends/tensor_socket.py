"""A connection between two ranks, and the messages on it.

A message is a header, a text that describes it, and its bytes; a small one is one packet.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Generator
from typing import TypeVar

from communicator import timings
from coordinator import FailureReason, link_state

T = TypeVar("T")
Steps = Generator[int, None, T]
"""Work that yields the events of poll(2) that it has to wait for, and returns its result."""

HEADER = struct.Struct("<QI")  # bytes of data, bytes of text
# In place of a size, of the last header: the text says why no message follows.
END_NOTICE, CLOSE_NOTICE = 2**64 - 1, 2**64 - 2
NOTICES = {END_NOTICE: None, CLOSE_NOTICE: FailureReason.LEFT}
BUFFER = 1 << 16  # bytes that have arrived and are not read yet
SMALL = 1 << 14  # bytes that are copied to be sent with their header
LONGEST_TEXT = 1 << 12
KEEP_ALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}  # tcp(7); in seconds
# For what was sent to be acknowledged, in ms: as soon as an idle connection is given up.
USER_TIMEOUT_MS = 5000
# Bytes that wait in the system to be sent: more, and a rank seems to have sent what has not left.
UNSENT_NBYTES = 1 << 17


class SocketClosed(Exception):
    """The connection has ended; the text says how.

    reason: LEFT if the other end closed in good order, UNREACHABLE if its host does not answer.
    """

    def __init__(self, why: str, reason: FailureReason | None = None) -> None:
        super().__init__(why)
        self.reason = reason


def configure(connection: socket.socket) -> None:
    """Let the connection not block, not hold small messages back, and notice that a host died."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_NBYTES)
    for option, value in KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class TensorSocket:
    """One end of a connection. One thread may send while another receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._remote = connection, link_state.remote_host(connection)
        configure(connection)
        self._is_sending = False  # part of a message is sent, and the rest is not
        polled = (select.POLLIN, select.POLLOUT, select.POLLRDHUP)
        self._polls = {events: select.poll() for events in polled}
        for events, poll in self._polls.items():
            poll.register(connection, events)
        self._buffer = memoryview(bytearray(BUFFER))
        self._begin = self._end = 0  # of what is in it

    def shut_down(self) -> None:
        """Make waits at both ends raise SocketClosed; from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _broken(self, error: OSError) -> SocketClosed:
        why = link_state.describe_error(self._socket, self._remote, error)
        is_network_error = link_state.is_network_error(error)
        return SocketClosed(why, FailureReason.UNREACHABLE if is_network_error else None)

    def network_failure(self) -> str:
        """The network failure under the connection, if there is one; else ""."""
        return link_state.describe_silence(self._socket, timings.TIMINGS.liveness_poll_s)

    def wait(self, events: int, timeout_s: float) -> bool:
        """Wait for one of the events for at most that time; whether it came."""
        return bool(self._polls[events].poll(timeout_s * 1e3))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, text: bytes, data: memoryview) -> Steps[None]:
        """Send a message. Raises SocketClosed too if the other end will not read it."""
        if self.wait(select.POLLRDHUP, 0):
            raise self._closed()
        head = HEADER.pack(len(data), len(text)) + text
        is_small = len(data) <= SMALL
        self._is_sending = True
        for left in [memoryview(head + data)] if is_small else [memoryview(head), data]:
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except BlockingIOError:
                    yield select.POLLOUT
                except OSError as error:
                    raise self._broken(error) from error
        self._is_sending = False

    def receive_header(self) -> Steps[tuple[int, bytes]]:
        """The size of the next message, and its text."""
        yield from self._fill(HEADER.size)
        nbytes, length = HEADER.unpack(self._take(HEADER.size))
        if length > LONGEST_TEXT:
            raise SocketClosed(
                f"a header announces a text of {length} bytes, more than {LONGEST_TEXT}"
            )
        yield from self._fill(length)
        text = bytes(self._take(length))
        if nbytes in NOTICES:
            raise SocketClosed(text.decode(errors="replace"), NOTICES[nbytes])
        return nbytes, text

    def _closed(self) -> SocketClosed:
        """The reason that the other end gave for closing, if it is in reach."""
        try:
            peeked = self._socket.recv(HEADER.size + LONGEST_TEXT, socket.MSG_PEEK)
        except OSError as error:
            return self._broken(error)
        unread = bytes(self._buffer[self._begin : self._end]) + peeked
        while len(unread) >= HEADER.size:
            nbytes, length = HEADER.unpack_from(unread)
            message, unread = unread[HEADER.size :], unread[HEADER.size + length + nbytes :]
            if nbytes in NOTICES:
                return SocketClosed(message[:length].decode(errors="replace"), NOTICES[nbytes])
        return SocketClosed("it closed the connection")

    def receive_into(self, data: memoryview) -> Steps[None]:
        """The bytes of the message."""
        count = min(len(data), self._end - self._begin)
        data[:count] = self._take(count)
        while count < len(data):
            received = self._receive(data[count:])
            count += received
            if not received:
                yield select.POLLIN

    def drop(self, nbytes: int) -> Steps[None]:
        """Receive the bytes of the message and drop them."""
        waste = memoryview(bytearray(min(nbytes, BUFFER)))
        while nbytes > 0:
            yield from self.receive_into(waste[:nbytes])
            nbytes -= len(waste)

    def _fill(self, nbytes: int) -> Steps[None]:
        """Wait until so much is in the buffer."""
        while self._end - self._begin < nbytes:
            if self._begin + nbytes > BUFFER or self._begin == self._end:
                left = bytes(self._buffer[self._begin : self._end])
                self._begin, self._end = 0, len(left)
                self._buffer[: self._end] = left
            received = self._receive(self._buffer[self._end :])
            self._end += received
            if not received:
                yield select.POLLIN

    def _take(self, nbytes: int) -> memoryview:
        self._begin += nbytes
        return self._buffer[self._begin - nbytes : self._begin]

    def _receive(self, data: memoryview) -> int:
        """Read into data what has arrived; the number of bytes, maybe 0."""
        try:
            count = self._socket.recv_into(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._broken(error) from error
        if count == 0:
            raise SocketClosed("it closed the connection")
        return count

    def announce_end(self, why: str, notice: int = END_NOTICE) -> None:
        """Send the other end why no message follows, if that takes no waiting."""
        text = why.encode()[:LONGEST_TEXT]
        try:
            if not self._is_sending:
                self._socket.send(HEADER.pack(notice, len(text)) + text)
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits here, too
        except OSError:
            pass  # the other end has closed

    def close(self) -> None:
        self._socket.close()
