"""Framing of messages on a connection: a length and then msgpack, one packet if they are small."""

from __future__ import annotations

import select
import socket
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import msgpack

from coordinator import link_state
from coordinator.control.encryption import EncryptedSocket
from coordinator.timings import DEFAULT

LENGTH = struct.Struct("!Q")
MAX_NBYTES = 1 << 34  # of one message between ranks that have proved themselves
SMALL = 1 << 16  # sent together with its length
PIECE = 1 << 18  # stays in the cache until it is joined to the others
LARGE = 1 << 14  # worth compressing, if it goes to many
MAX_EXPANDED_NBYTES = 1 << 28  # of a value that was compressed
COMPRESSED = 1  # the msgpack extension: zlib of a packed value


class ConnectionBroken(Exception):
    """The connection has ended."""


class TruncatedMessage(ConnectionBroken):
    """The deadline passed in the middle of a message: the connection can carry no other."""


class NoMessage(Exception):
    """No message began before the deadline; the connection is as good as before."""


def pack(message: Any) -> bytes:
    return bytes(msgpack.packb(message))


def pack_for_many(value: Any) -> bytes:
    """As pack(), for a value that many receive: similar rows take a tenth of the bytes."""
    packed = pack(value)
    if not LARGE < len(packed) <= MAX_EXPANDED_NBYTES:
        return packed
    return pack(msgpack.ExtType(COMPRESSED, zlib.compress(packed, level=1)))


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Raises ValueError or TypeError. Expands nothing: see expand()."""
    return msgpack.unpackb(data, strict_map_key=False, ext_hook=_refuse)


def _refuse(code: int, data: bytes) -> Any:
    raise ValueError(f"msgpack extension {code} of {len(data)} bytes")


def unpack_answer(data: bytes | bytearray | memoryview) -> Any:
    """As unpack(), for what rank 0 packed for many."""
    return msgpack.unpackb(data, strict_map_key=False, ext_hook=_expand)


def _expand(code: int, data: bytes) -> Any:
    if code != COMPRESSED:
        _refuse(code, data)
    decompressor = zlib.decompressobj()
    expanded = decompressor.decompress(data, MAX_EXPANDED_NBYTES)
    if not decompressor.eof:
        raise ValueError(f"{len(data)} bytes expand to more than {MAX_EXPANDED_NBYTES}")
    return unpack(expanded)


def noop() -> None:
    """The idle function of callers that have nothing to do while they wait."""


class Connection:
    """One end of a connection, used by one thread at a time.

    Every method takes a deadline (time.monotonic()) and idle, which is called every idle_s while
    the method waits, and may raise.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.is_between_messages = True  # else it can carry no other
        self._pollers: dict[int, select.poll] = {}  # by event
        self._remote = link_state.remote_host(connection)
        connection.setblocking(False)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Any, deadline: float, idle: Callable[[], None] = noop) -> None:
        """Send one message."""
        self.send_packed(pack(message), deadline, idle)

    def send_packed(self, body: bytes, deadline: float, idle: Callable[[], None] = noop) -> None:
        """Send one message that is packed already."""
        self.is_between_messages = False
        if len(body) <= SMALL:
            self.write(LENGTH.pack(len(body)) + body, deadline, idle)
        else:
            self.write(LENGTH.pack(len(body)), deadline, idle)
            self.write(body, deadline, idle)
        self.is_between_messages = True

    def receive(
        self,
        deadline: float,
        idle: Callable[[], None] = noop,
        unpack: Callable[[bytearray], Any] = unpack,
    ) -> Any:
        """Return the next message. Raises NoMessage if none has begun by the deadline."""
        if not (isinstance(self.socket, EncryptedSocket) and self.socket.pending()):
            self._wait(select.POLLIN, deadline, idle, NoMessage)
        self.is_between_messages = False
        (nbytes,) = LENGTH.unpack(self.read_exactly(LENGTH.size, deadline, idle))
        if nbytes > MAX_NBYTES:
            raise ConnectionBroken(f"a message of {nbytes} bytes")
        body = self.read_exactly(nbytes, deadline, idle)
        try:
            message = unpack(body)
        except (ValueError, TypeError, zlib.error) as error:
            raise ConnectionBroken(f"what is no message: {error!r}") from error
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

    def read_exactly(
        self, nbytes: int, deadline: float, idle: Callable[[], None] = noop
    ) -> bytearray:
        data = bytearray(nbytes)
        unread = memoryview(data)
        while unread:
            try:
                count = self.socket.recv_into(unread)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline, idle, TruncatedMessage)
                continue
            except OSError as error:
                raise self._broken(error) from error
            if count == 0:
                raise ConnectionBroken("the other end has closed the connection")
            unread = unread[count:]
        return data

    def read_bytes(self, nbytes: int, deadline: float, idle: Callable[[], None] = noop) -> bytes:
        """As read_exactly, for large data: in pieces that stay in the cache until joined."""
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
            if poll.poll(max(min(left_s, DEFAULT.idle_s), 0) * 1000):
                return
            if left_s <= 0:
                raise error("the deadline passed")
            idle()

    def close(self) -> None:
        self.socket.close()
