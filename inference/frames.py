"""One message between neighbours of the ring is one frame of bytes, header and tensors together.

A frame's length has to be known before it arrives. Both ends derive the length of the next frame
from the last message on the same link, so the tokens of a generation, which are all alike, take one
frame each; a message that is larger sends its header ahead to say how large it is.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, field
from typing import Any

import torch

HEADER = struct.Struct("<QBBHHIII")
ALIGNMENT = 16
SMALLEST_FRAME, LARGEST_FRAME, FRAME_STEP = 1024, 1 << 20, 256

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class Kind(enum.IntEnum):
    CALL = 0
    ERROR = 1
    LEAVE = 2


@dataclass
class Message:
    """What travels: the number of a program known to both ends, its integers and its tensors.

    `text` is the program itself, the first time; `note` what a stage has to say about it.
    """

    kind: Kind
    program: int = 0
    ints: list[int] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    text: str = ""
    note: str = ""


class Link:
    """Messages to or from one peer of a communicator, in order."""

    def __init__(self, comm: Any, peer: int):
        self.comm, self.peer = comm, peer
        self.frame_nbytes = SMALLEST_FRAME
        self.num_messages = self.num_frames = self.num_bytes = 0

    def send(self, message: Message) -> None:
        frame, nbytes = _pack(message, self.frame_nbytes)
        self.comm.send(frame[: self.frame_nbytes], self.peer)
        if nbytes > self.frame_nbytes:
            self.comm.send(frame[self.frame_nbytes :], self.peer)
        self._count(nbytes)
        self.frame_nbytes = _next_frame(nbytes)

    def _count(self, nbytes: int) -> None:
        self.num_messages += 1
        self.num_frames += 1 + (nbytes > self.frame_nbytes)
        self.num_bytes += max(nbytes, self.frame_nbytes)

    def receive(self) -> Message:
        frame = torch.empty(self.frame_nbytes, dtype=torch.uint8)
        self.comm.recv(frame, self.peer)
        nbytes = int(HEADER.unpack_from(_memory(frame))[0])
        if nbytes > self.frame_nbytes:
            rest = torch.empty(nbytes, dtype=torch.uint8)
            rest[: self.frame_nbytes] = frame
            self.comm.recv(rest[self.frame_nbytes :], self.peer)
            frame = rest
        self.frame_nbytes = _next_frame(nbytes)
        return _unpack(frame)


def _next_frame(nbytes: int) -> int:
    """A little more than the last message, since a padded batch's mask grows with each token."""
    wanted = nbytes + nbytes // 8
    wanted += -wanted % FRAME_STEP
    return min(max(wanted, SMALLEST_FRAME), LARGEST_FRAME)


def _pack(message: Message, smallest: int) -> tuple[torch.Tensor, int]:
    head = bytearray(HEADER.size)
    for tensor in message.tensors:
        head += struct.pack(
            f"<BB{tensor.dim()}I", DTYPE_CODES[tensor.dtype], tensor.dim(), *tensor.shape
        )
    wide = any(not -(1 << 31) <= value < 1 << 31 for value in message.ints)
    head += struct.pack(f"<{len(message.ints)}{'q' if wide else 'i'}", *message.ints)
    text, note = message.text.encode(), message.note.encode()
    head += text + note
    offsets, nbytes = _offsets(len(head), message.tensors)
    counts = (len(message.tensors), len(message.ints), len(text), len(note), message.program)
    HEADER.pack_into(head, 0, nbytes, message.kind, wide, *counts)
    frame = torch.empty(max(nbytes, smallest), dtype=torch.uint8)
    frame.numpy()[: len(head)] = head
    for offset, tensor in zip(offsets, message.tensors, strict=True):
        if tensor.numel():
            _view(frame, offset, tensor.dtype, tensor.shape).copy_(tensor)
    return frame, nbytes


def _offsets(start: int, tensors: list[torch.Tensor]) -> tuple[list[int], int]:
    offsets = []
    for tensor in tensors:
        start += -start % ALIGNMENT
        offsets.append(start)
        start += tensor.numel() * tensor.element_size()
    return offsets, start


def _view(frame: torch.Tensor, offset: int, dtype: torch.dtype, shape: Any) -> torch.Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return frame[offset : offset + nbytes].view(dtype).view(shape)


def _unpack(frame: torch.Tensor) -> Message:
    data = _memory(frame)
    header = HEADER.unpack_from(data)
    _, kind, wide, num_tensors, num_ints, num_text, num_note, program = header
    position = HEADER.size
    described = []
    for _ in range(num_tensors):
        code, dim = data[position], data[position + 1]
        described.append((DTYPES[code], struct.unpack_from(f"<{dim}I", data, position + 2)))
        position += 2 + 4 * dim
    ints = list(struct.unpack_from(f"<{num_ints}{'q' if wide else 'i'}", data, position))
    position += num_ints * (8 if wide else 4)
    text = bytes(data[position : position + num_text]).decode()
    position += num_text
    note = bytes(data[position : position + num_note]).decode()
    position += num_note
    tensors = []
    for dtype, shape in described:
        position += -position % ALIGNMENT
        tensors.append(_view(frame, position, dtype, shape))
        position += tensors[-1].numel() * dtype.itemsize
    return Message(Kind(kind), program, ints, tensors, text, note)


def _memory(frame: torch.Tensor) -> memoryview:
    return memoryview(frame.numpy())  # type: ignore[arg-type]
