"""Framing of messages on a connection: a length and then the message, one packet if it is small."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from launcher import timings
from launcher.authentication.encryption import EncryptedSocket
from launcher.system import link_state, linux

LENGTH = struct.Struct("!Q")
MAX_NBYTES = 1 << 34  # of one message between ends that have proved themselves
SMALL = 1 << 16  # sent together with its length
PIECE = 1 << 18  # stays in the cache until it is joined to the others


class ConnectionBroken(Exception):
    """The connection has ended."""


class TruncatedMessage(ConnectionBroken):
    """The deadline passed in the middle of a message: the connection can carry no other."""


class NoMessage(Exception):
    """No message began before the deadline; the connection is as good as before."""


def noop() -> None:
    """The idle function of callers that have nothing to do while they wait."""


class FramedConnection:
    """One end of a connection, used by one thread at a time.

    Every method takes a deadline (time.monotonic()) and idle, which is called every idle_s while
    the method waits, and may raise: it does so unless what the method waits for has come by then.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.is_between_messages = True  # else it can carry no other
        self._pollers: dict[int, select.poll] = {}  # by event
        self._remote = link_state.remote_host(connection)
        linux.closed_in_children(self)
        connection.setblocking(False)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send_packed(self, body: bytes, deadline: float, idle: Callable[[], None] = noop) -> None:
        """Send one message."""
        self.is_between_messages = False
        if len(body) <= SMALL:
            self.write(LENGTH.pack(len(body)) + body, deadline, idle)
        else:
            self.write(LENGTH.pack(len(body)), deadline, idle)
            self.write(body, deadline, idle)
        self.is_between_messages = True

    def await_message(self, deadline: float, idle: Callable[[], None] = noop) -> None:
        """Return once a message begins. Raises NoMessage if none has by the deadline."""
        if not (isinstance(self.socket, EncryptedSocket) and self.socket.pending()):
            self._wait(select.POLLIN, deadline, idle, NoMessage)

    def receive(
        self,
        deadline: float,
        idle: Callable[[], None] = noop,
        unpack: Callable[[bytes], Any] = bytes,
    ) -> Any:
        """The next message, by unpack. Raises NoMessage if none has begun by the deadline."""
        self.await_message(deadline, idle)
        self.is_between_messages = False
        (nbytes,) = LENGTH.unpack(self.read_exactly(LENGTH.size, deadline, idle))
        if nbytes > MAX_NBYTES:
            raise ConnectionBroken(f"a message of {nbytes} bytes")
        body = self.read_exactly(nbytes, deadline, idle)
        try:
            message = unpack(body)
        except (ValueError, TypeError) as error:
            raise ConnectionBroken(f"what is not a message: {error!r}") from error
        self.is_between_messages = True
        return message

    def write(self, data: bytes, deadline: float, idle: Callable[[], None] = noop) -> None:
        unsent = memoryview(data)
        while unsent:
            try:
                unsent = unsent[self.socket.send(unsent) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline, idle, TruncatedMessage)
            except OSError as error:
                raise self._broken(error) from error

    def read_exactly(self, nbytes: int, deadline: float, idle: Callable[[], None] = noop) -> bytes:
        """`nbytes` bytes, read in pieces that stay in the cache until joined."""
        pieces = []
        while nbytes > 0:
            try:
                piece = self.socket.recv(min(nbytes, PIECE))
            except BlockingIOError:
                self._wait(select.POLLIN, deadline, idle, TruncatedMessage)
                continue
            except OSError as error:
                raise self._broken(error) from error
            if not piece:
                raise ConnectionBroken("the other end has closed the connection")
            nbytes -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    def _broken(self, error: OSError) -> ConnectionBroken:
        return ConnectionBroken(link_state.describe_error(self.socket, self._remote, error))

    def _wait(
        self, events: int, deadline: float, idle: Callable[[], None], error: type[Exception]
    ) -> None:
        poll = self._pollers.get(events)
        if poll is None:
            poll = self._pollers[events] = select.poll()
            poll.register(self.socket, events)
        while True:
            left_s = deadline - time.monotonic()
            if poll.poll(max(min(left_s, timings.TIMINGS.idle_s), 0) * 1000):
                return
            if left_s <= 0:
                raise error("the deadline passed")
            try:
                idle()
            except Exception:
                if not poll.poll(0):  # or what it waits for came, and its sender left afterwards
                    raise

    def close(self) -> None:
        self.socket.close()
