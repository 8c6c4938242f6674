"""Tensors of a message that go from GPU to GPU, and never through the memory of the CPU.

link = DeviceLink(comm, peer=1)     # comm: a Communicator of the device, over the ranks of the ring
link.send([hidden])                 # enqueued; the peer knows dtype and shape from the message
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from drumline.timings import TIMINGS

Form = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Of a tensor without gaps: dtype, shape, strides."""


class DeviceLink:
    """The tensors to or from one peer, in order, on torch's current stream.

    comm: a Communicator, or what a group of ranks has in its place.
    waits: receive on a stream of its own, and let the host wait for it. So does the master: what it
        sends may wait for a rank whose result it has to receive first, and its caller reads the
        result as soon as it is back, when an error could not reach it any longer.
    """

    def __init__(self, comm: Any, peer: int, waits: bool = False):
        self.comm, self.peer, self._waits = comm, peer, waits
        self._stream = None
        if waits and comm.device.type == "cuda":
            self._stream = torch.cuda.Stream(comm.device)  # type: ignore[no-untyped-call]

    def takes(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.device == self.comm.device)

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """Enqueue them: later work on the stream may change them."""
        with self.comm.group():
            for tensor in tensors:
                plain = tensor.detach().resolve_conj().resolve_neg()
                self.comm.send(_as_bytes(plain), self.peer)

    def receive(self, forms: Sequence[Form]) -> list[torch.Tensor]:
        """New tensors of these forms, whose values the stream has before any later work."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            with torch.inference_mode(False):  # another thread's, it may be
                tensors = [
                    torch.empty_strided(shape, strides, dtype=dtype, device=self.comm.device)
                    for dtype, shape, strides in forms
                ]
            with self.comm.group():
                for tensor in tensors:
                    self.comm.recv(_as_bytes(tensor), self.peer)
            if self._waits:
                self.comm.synchronize(TIMINGS.next_message_s)
        return tensors


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor without gaps."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
