"""Messages on a connection: a length and then msgpack, so one packet if they are small."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import msgpack

LENGTH = struct.Struct("!Q")
MAX_NBYTES = 1 << 34  # of one message between ranks that have proved themselves
SMALL = 1 << 16
PIECE = 1 << 18
SLICE_S = 0.1


class LinkBroken(Exception):
    """The connection has ended."""


class Halfway(LinkBroken):
    """The deadline has passed in the middle of a message: the connection can serve no other."""


class Late(Exception):
    """Nothing came until the deadline; the connection is as good as before."""


def pack(message: Any) -> bytes:
    return bytes(msgpack.packb(message))


def unpack(data: bytes | bytearray | memoryview) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)


def nothing() -> None:
    """What to do while waiting, for who has nothing to do."""


class Link:
    """One end of a connection, used by one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.is_between_messages = True  # else it can serve no other
        connection.setblocking(False)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Any, deadline: float, idle: Callable[[], None] = nothing) -> None:
        """Send one message. idle is called now and then while waiting, and may raise."""
        body = pack(message)
        self.is_between_messages = False
        if len(body) <= SMALL:
            self.write(LENGTH.pack(len(body)) + body, deadline, idle)
        else:
            self.write(LENGTH.pack(len(body)), deadline, idle)
            self.write(body, deadline, idle)
        self.is_between_messages = True

    def receive(self, deadline: float, idle: Callable[[], None] = nothing) -> Any:
        """The next message. Raises Late if none has begun by the deadline."""
        self._wait(select.POLLIN, deadline, idle, Late)
        self.is_between_messages = False
        (nbytes,) = LENGTH.unpack(self.read_exactly(LENGTH.size, deadline, idle))
        if nbytes > MAX_NBYTES:
            raise LinkBroken(f"a message of {nbytes} bytes")
        message = unpack(self.read_exactly(nbytes, deadline, idle))
        self.is_between_messages = True
        return message

    def write(self, data: bytes, deadline: float, idle: Callable[[], None] = nothing) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline, idle, Halfway)
            except OSError as error:
                raise LinkBroken(str(error)) from error

    def read_exactly(
        self, nbytes: int, deadline: float, idle: Callable[[], None] = nothing
    ) -> bytearray:
        data = bytearray(nbytes)
        left = memoryview(data)
        while left:
            try:
                count = self.socket.recv_into(left)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline, idle, Halfway)
                continue
            except OSError as error:
                raise LinkBroken(str(error)) from error
            if count == 0:
                raise LinkBroken("the other end has closed the connection")
            left = left[count:]
        return data

    def read_bytes(self, nbytes: int, deadline: float, idle: Callable[[], None] = nothing) -> bytes:
        """As read_exactly; for much, in pieces that stay in the cache until they are joined."""
        pieces = []
        while nbytes > 0:
            try:
                piece = self.socket.recv(min(nbytes, PIECE))
            except BlockingIOError:
                self._wait(select.POLLIN, deadline, idle, Halfway)
                continue
            except OSError as error:
                raise LinkBroken(str(error)) from error
            if not piece:
                raise LinkBroken("the other end has closed the connection")
            nbytes -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    def _wait(
        self, events: int, deadline: float, idle: Callable[[], None], late: type[Exception]
    ) -> None:
        poll = select.poll()
        poll.register(self.socket, events)
        while True:
            left_s = deadline - time.monotonic()
            if poll.poll(max(min(left_s, SLICE_S), 0) * 1000):
                return
            if left_s <= 0:
                raise late("the deadline passed")
            idle()

    def close(self) -> None:
        self.socket.close()
