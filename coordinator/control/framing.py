"""Messages of msgpack on a connection."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import msgpack

from launcher import FramedConnection, noop

LARGE = 1 << 14  # worth compressing, if it goes to many
MAX_EXPANDED_NBYTES = 1 << 28  # of a value that was compressed
COMPRESSED = 1  # the msgpack extension: zlib of a packed value


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
    try:
        expanded = decompressor.decompress(data, MAX_EXPANDED_NBYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not decompressor.eof:
        raise ValueError(f"{len(data)} bytes expand to more than {MAX_EXPANDED_NBYTES}")
    return unpack(expanded)


class Connection(FramedConnection):
    """A connection that carries values as msgpack."""

    def send(self, message: Any, deadline: float, idle: Callable[[], None] = noop) -> None:
        """Send one message."""
        self.send_packed(pack(message), deadline, idle)

    def receive(
        self,
        deadline: float,
        idle: Callable[[], None] = noop,
        unpack: Callable[[bytes], Any] = unpack,
    ) -> Any:
        """Return the next message. Raises NoMessage if none has begun by the deadline."""
        return super().receive(deadline, idle, unpack)
