"""One message between neighbours of the ring is one frame of bytes, header and tensors together.

A frame's length has to be known before it arrives. Both ends derive the length of the next frame
from the shorter of the last two messages on the same channel, so the tokens of a generation, which
all have one form, take one frame each, the first one after a long prompt too; a larger message
sends its header ahead, which has the length.
Tensors on a GPU follow the frame from device to device, where there is a DeviceLink.
"""

from __future__ import annotations

import ctypes
import enum
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from communicator import DTYPES
from drumline.stages.device_link import DeviceLink

HEADER = struct.Struct("<QBIIIII")
ALIGNMENT = 16
MIN_FRAME_NBYTES, MAX_FRAME_NBYTES, FRAME_STEP_NBYTES = 1024, 1 << 16, 256
MAX_KEPT_NBYTES = 1 << 20  # of memory to pack a message in, and for one that is predicted
MAX_CACHED_LAYOUTS = 512
ORDERED = 0x80  # beside the number of axes: their order in memory follows
ON_DEVICE = 0x40  # beside it too: the values are not in the frame

DTYPE_CODES = {info.torch: code for code, info in enumerate(DTYPES)}


class MessageKind(enum.IntEnum):
    CALL = 0
    ERROR = 1
    LEAVE = 2
    MARK = 3  # passed on unchanged; when it has come round, so has all that was sent before it
    CHANGED = 4  # an ERROR: a layer returned another form than it is known for


@dataclass
class Message:
    """The number of a program known to both ends, its integers and its tensors.

    `text` is the program itself, the first time; `note` is for a stage's error or description.
    """

    kind: MessageKind
    program: int = 0
    ints: list[int] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    text: str = ""
    note: str = ""


Spec = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], bool]
"""Of a tensor: its dtype, shape, the order of its axes in memory if that is another one, and
whether it goes from device to device.

That order is kept, as kernels round by it: those of convolutions have one for channels last.
"""


class TensorLayout:
    """Offsets of tensors of given dtypes and shapes, counted from the end of the header.

    Computed once for all messages of one form: such work is most of the cost of a token.
    """

    def __init__(self, specs: tuple[Spec, ...]):
        self.spec_bytes = b"".join(
            struct.pack(
                f"<BB{len(shape)}I{len(order)}B",
                DTYPE_CODES[dtype],
                len(shape) | ORDERED * bool(order) | ON_DEVICE * on_device,
                *(*shape, *order),
            )
            for dtype, shape, order, on_device in specs
        )
        self.on_device = [on_device for *_, on_device in specs]
        self.device_forms = [
            (dtype, shape, _strides(shape, order))
            for dtype, shape, order, on_device in specs
            if on_device
        ]
        self.parts: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int, int]] = []
        self.nbytes = 0
        for dtype, shape, order, on_device in specs:
            if on_device:
                continue
            size = math.prod(shape) * dtype.itemsize
            self.parts.append((dtype, shape, _strides(shape, order), self.nbytes, size))
            self.nbytes += size + -size % ALIGNMENT

    @classmethod
    def read(cls, spec_bytes: bytes) -> TensorLayout:
        specs = []
        position = 0
        while position < len(spec_bytes):
            code, flags = spec_bytes[position], spec_bytes[position + 1]
            dim, on_device = flags & ~(ORDERED | ON_DEVICE), bool(flags & ON_DEVICE)
            form = f"<{dim}I{dim if flags & ORDERED else 0}B"
            numbers = struct.unpack_from(form, spec_bytes, position + 2)
            specs.append((DTYPES[code].torch, numbers[:dim], numbers[dim:], on_device))
            position += 2 + struct.calcsize(form)
        return cls(tuple(specs))

    def split(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Separate tensors in the frame from those that go from device to device."""
        pairs = [*zip(tensors, self.on_device, strict=True)]
        return [t for t, away in pairs if not away], [t for t, away in pairs if away]

    def join(
        self, in_frame: list[torch.Tensor], on_device: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """All tensors in their order."""
        parts = {False: iter(in_frame), True: iter(on_device)}
        return [next(parts[away]) for away in self.on_device]

    def write(self, frame: torch.Tensor, start: int, tensors: list[torch.Tensor]) -> None:
        address = frame.data_ptr() + start
        for tensor, (dtype, shape, strides, offset, size) in zip(tensors, self.parts, strict=True):
            is_lazy = tensor.is_conj() or tensor.is_neg()  # in memory are other values
            if tensor.is_cpu and tensor.is_contiguous() and not is_lazy:
                ctypes.memmove(address + offset, tensor.data_ptr(), size)
            else:
                at = (start + offset) // dtype.itemsize
                frame.view(dtype).as_strided(shape, strides, at).copy_(tensor.detach())

    def views(self, frame: torch.Tensor, start: int) -> list[torch.Tensor]:
        """Tensors of this memory, of which each counts its own writes, as views would not."""
        memory, first = frame.untyped_storage(), frame.storage_offset() + start
        with torch.inference_mode(False):  # as in _memory()
            return [
                torch.empty(0, dtype=dtype).set_(
                    memory, (first + offset) // dtype.itemsize, shape, strides
                )
                for dtype, shape, strides, offset, _ in self.parts
            ]


def _strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps, its dims in memory in this order."""
    axes = order or tuple(range(len(shape)))
    by_axis = {axis: math.prod(shape[a] for a in axes[at + 1 :]) for at, axis in enumerate(axes)}
    return tuple(by_axis[axis] for axis in range(len(shape)))


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's dims from the outermost in memory on; () if it is contiguous or has gaps."""
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: -strides[axis]))
    return order if tensor.permute(order).is_contiguous() else ()


def _memory(nbytes: int) -> torch.Tensor:
    """Bytes for a frame, which may be kept, or received for another thread, so that they are not
    to be tensors of inference mode: what is made in it cannot be changed outside of it."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8)


@dataclass
class HeaderCache:
    """The bytes of a message without its tensors' values: likely those of the next one."""

    head: bytes
    layout: TensorLayout
    start: int  # of the tensors

    @property
    def nbytes(self) -> int:
        return self.start + self.layout.nbytes

    @classmethod
    def of(cls, message: Message, layout: TensorLayout) -> HeaderCache:
        text, note = message.text.encode(), message.note.encode()
        ints = struct.pack(f"<{len(message.ints)}q", *message.ints)
        rest = layout.spec_bytes + ints + text + note
        start = HEADER.size + len(rest)
        start += -start % ALIGNMENT
        numbers = (len(layout.spec_bytes), len(message.ints), len(text), len(note), message.program)
        head = HEADER.pack(start + layout.nbytes, message.kind, *numbers)
        return cls(head + rest, layout, start)


OnPredicted = Callable[[Message], None]
"""Called while waiting, with the message that is likely to come; its tensors have no values yet."""


class MessageChannel:
    """Messages to or from one peer of a communicator, in order. link: for tensors on its device."""

    def __init__(self, comm: Any, peer: int, link: DeviceLink | None = None):
        self.comm, self.peer, self.link = comm, peer, link
        self.frame_nbytes, self._last_nbytes = MIN_FRAME_NBYTES, MAX_FRAME_NBYTES
        self.num_messages = self.num_frames = self.num_bytes = 0
        self._layouts: dict[Any, TensorLayout] = {}
        self._frame = torch.empty(0, dtype=torch.uint8)
        self._sent: tuple[Any, ...] = ()
        self._header: HeaderCache | None = None
        self._expected_next: tuple[HeaderCache, Message] | None = None

    # Both ends keep frame_nbytes: the length of the next frame follows from the last two. So a
    # receiver knows how many bytes to ask for, and a longer message needs one more frame.
    def send(self, message: Message) -> None:
        """Returns once the message has been copied, so that its tensors may change.

        Over a link, once the current stream will have sent them before any later work.
        """
        header = self._header_for(message)
        in_frame, on_device = message.tensors, None
        if header.layout.device_forms:
            in_frame, on_device = header.layout.split(message.tensors)
            # Before the frame, after which the peer waits for them.
            on_device = [t if _order(t) else t.contiguous() for t in on_device]
        sent_nbytes = max(header.nbytes, self.frame_nbytes)
        frame = self._send_buffer(sent_nbytes)
        ctypes.memmove(frame.data_ptr(), header.head, len(header.head))
        header.layout.write(frame, header.start, in_frame)
        first = frame if frame.numel() == self.frame_nbytes else frame[: self.frame_nbytes]
        self.comm.send(first, self.peer)
        if sent_nbytes > self.frame_nbytes:
            self.comm.send(frame[self.frame_nbytes : sent_nbytes], self.peer)
        if self.link is not None and on_device:  # after the frame, by which the peer knows of them
            self.link.send(on_device)
        self.num_messages += 1
        self.num_frames += 1 + (sent_nbytes > self.frame_nbytes)
        self.num_bytes += sent_nbytes
        self._expect_next(header.nbytes)

    def _expect_next(self, nbytes: int) -> None:
        """A little more than these messages, since a padded batch's mask grows with each token."""
        shorter = min(nbytes, self._last_nbytes)
        self._last_nbytes = nbytes
        padded = shorter + shorter // 8
        padded += -padded % FRAME_STEP_NBYTES
        self.frame_nbytes = min(max(padded, MIN_FRAME_NBYTES), MAX_FRAME_NBYTES)

    def _header_for(self, message: Message) -> HeaderCache:
        link = self.link
        specs = tuple(
            [
                (t.dtype, t.shape, _order(t), link is not None and link.takes(t))
                for t in message.tensors
            ]
        )
        sent = (specs, message.kind, message.program, message.ints, message.text, message.note)
        if self._header is None or self._sent != sent:
            self._sent = sent
            self._header = HeaderCache.of(message, self._layout(specs, TensorLayout))
        return self._header

    def _send_buffer(self, nbytes: int) -> torch.Tensor:
        """Memory to pack a message in: the last one's again if it will do."""
        if nbytes > MAX_KEPT_NBYTES:
            return _memory(nbytes)
        if nbytes > self._frame.numel():
            self._frame = _memory(nbytes)
        return self._frame

    def _layout(self, key: Any, make: Callable[[Any], TensorLayout]) -> TensorLayout:
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= MAX_CACHED_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = make(key)
        return layout

    def receive(self, on_predicted: OnPredicted | None = None) -> Message:
        """The next message; blocks until it is here.

        If its header is the predicted one, the very object given to on_predicted is returned: its
        tensors are views of the frame that has been received into.
        """
        expected = 0 if self._expected_next is None else self._expected_next[0].nbytes
        room = max(self.frame_nbytes, min(expected, MAX_KEPT_NBYTES))
        frame = _memory(room)
        data = memoryview(frame.numpy())  # type: ignore[arg-type]
        # The prediction is made before the wait, while there is time.
        head, predicted = self._predicted_message(frame)
        if predicted is not None and on_predicted is not None:
            on_predicted(predicted)
        num_received = self.frame_nbytes
        first = frame if room == num_received else frame[:num_received]
        self.comm.recv(first, self.peer)
        nbytes = int.from_bytes(data[:8], "little")
        self._expect_next(nbytes)
        if nbytes > room:
            frame = _memory(nbytes)
            frame[:num_received] = first
        if nbytes > num_received:
            self.comm.recv(frame[num_received:nbytes], self.peer)
        if predicted is not None and data[: len(head)] == head:
            return predicted
        return self._unpack(frame)

    def _predicted_message(self, frame: torch.Tensor) -> tuple[bytes, Message | None]:
        """The message that will be in this memory if it has the same head as the last one."""
        if self._expected_next is None or self._expected_next[0].nbytes > frame.numel():
            return b"", None
        header, last = self._expected_next
        if header.layout.device_forms:  # not in this memory
            return b"", None
        return header.head, replace(last, tensors=header.layout.views(frame, header.start))

    def _unpack(self, frame: torch.Tensor) -> Message:
        data = memoryview(frame.numpy())  # type: ignore[arg-type]
        nbytes, kind, spec_bytes, num_ints, num_text, num_note, program = HEADER.unpack_from(data)
        ints_at = HEADER.size + spec_bytes
        text_at = ints_at + 8 * num_ints
        note_at = text_at + num_text
        end = note_at + num_note
        layout = self._layout(bytes(data[HEADER.size : ints_at]), TensorLayout.read)
        ints = list(struct.unpack_from(f"<{num_ints}q", data, ints_at))
        text, note = bytes(data[text_at:note_at]).decode(), bytes(data[note_at:end]).decode()
        message = Message(MessageKind(kind), program, ints, [], text, note)
        header = HeaderCache(bytes(data[:end]), layout, nbytes - layout.nbytes)
        self._expected_next = header, message
        tensors = layout.views(frame, header.start)
        if layout.device_forms:
            assert self.link is not None, "the sender has one, so this rank has too"
            tensors = layout.join(tensors, self.link.receive(layout.device_forms))
        return replace(message, tensors=tensors)
