"""Bytes among ranks over a private gloo process group.

One packet of fixed size carries the header and, if they fit, the data: a second message is needed
only for what is larger than INLINE bytes.
"""

from __future__ import annotations

import struct
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BarrierOptions, BroadcastOptions, ProcessGroupGloo, Store

HEADER = struct.Struct("<IQ")  # number of the call, bytes of data
PACKET = 4096
INLINE = PACKET - HEADER.size


class Mismatch(Exception):
    """A packet of another call arrived: the ranks are not in the same call."""


class Group:
    """The ranks `0 .. size-1`, joined by gloo. Collective throughout; raises RuntimeError."""

    def __init__(self, store: Store, rank: int, size: int, address: str, timeout_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._threads = 1
        options._timeout = timedelta(seconds=timeout_s)
        self.rank, self.size = rank, size
        self._gloo: Any = ProcessGroupGloo(store, rank, size, options)

    def barrier(self, timeout_s: float) -> None:
        options = BarrierOptions()
        options.timeout = timedelta(seconds=timeout_s)
        self._gloo.barrier(options).wait(options.timeout)

    def broadcast(self, data: bytes | None, src: int, call: int, timeout_s: float) -> bytes:
        """data of rank src, on every rank. src gives it, the others give None."""
        packet = _packet(data or b"", call) if self.rank == src else _empty(PACKET)
        self._broadcast(packet, src, timeout_s)
        nbytes = _nbytes(packet, call, src)
        if nbytes <= INLINE:
            return _payload(packet, nbytes)
        body = _tensor(data or b"") if self.rank == src else _empty(nbytes)
        self._broadcast(body, src, timeout_s)
        return body.numpy().tobytes()

    def allgather(self, data: bytes, call: int, timeout_s: float) -> list[bytes]:
        """The data of every rank, in order of rank."""
        packets = _empty(PACKET * self.size)
        work = self._gloo._allgather_base(packets, _packet(data, call))
        work.wait(timedelta(seconds=timeout_s))
        found = []
        for src, packet in enumerate(packets.view(self.size, PACKET)):
            nbytes = _nbytes(packet, call, src)
            if nbytes <= INLINE:
                found.append(_payload(packet, nbytes))
            else:
                found.append(self._large(data, src, nbytes, timeout_s))
        return found

    def close(self) -> None:
        self._gloo.shutdown()

    def _large(self, data: bytes, src: int, nbytes: int, timeout_s: float) -> bytes:
        body = _tensor(data) if self.rank == src else _empty(nbytes)
        self._broadcast(body, src, timeout_s)
        return body.numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        options.timeout = timedelta(seconds=timeout_s)
        self._gloo.broadcast([tensor], options).wait(options.timeout)


def _empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _empty(0)


def _packet(data: bytes, call: int) -> torch.Tensor:
    """Header, then the data if it fits, then zeros."""
    inline = data if len(data) <= INLINE else b""
    return _tensor((HEADER.pack(call, len(data)) + inline).ljust(PACKET, b"\0"))


def _nbytes(packet: torch.Tensor, call: int, src: int) -> int:
    number, nbytes = HEADER.unpack(packet[: HEADER.size].numpy().tobytes())
    if number != call:
        raise Mismatch(f"call #{number} of rank {src} arrived in call #{call}")
    return int(nbytes)


def _payload(packet: torch.Tensor, nbytes: int) -> bytes:
    return packet[HEADER.size : HEADER.size + nbytes].numpy().tobytes()
