"""Sends and receives on a device, which start together: a library of a device needs them grouped.

messages = DeferredMessages()
work = messages.add(comm, "send", tensor, 1, tag=0)
work.wait()                                     # starts all that were added
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from communicator.calls.async_work import NO_TIMEOUT, AsyncWork
from communicator.errors import Unsupported
from communicator.p2p.flat_tensors import flattened_all


class Messenger(Protocol):
    """A Communicator, as these messages need it."""

    def group(self) -> AbstractContextManager[None]: ...
    def send(self, tensor: torch.Tensor, dst: int) -> None: ...
    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor: ...
    def rank_name(self, rank: int | None = None) -> str: ...


class DeferredMessages:
    """The sends and receives that have not started; they only enqueue on the caller's stream."""

    def __init__(self) -> None:
        self._deferred: list[_DeferredP2P] = []

    def add(
        self, comm: Messenger, kind: str, tensor: torch.Tensor, peer: int, tag: int
    ) -> AsyncWork:
        """A "send" or "recv", which starts when it is waited for or start() is called."""
        message = _DeferredP2P(self, comm, kind, tensor, peer, tag)
        self._deferred.append(message)
        return message

    def start(self) -> None:
        """Start all together, so that none waits for another."""
        deferred, self._deferred = self._deferred, []
        if deferred:
            _run_deferred(deferred)


class _DeferredP2P(AsyncWork):
    """A send or receive that starts when its end is asked for.

    A tag is sent before the tensor, so that a receiver that expects another raises. Both have to
    give one, or neither: sent always, it would have every receiver wait for the device.
    """

    def __init__(
        self,
        messages: DeferredMessages,
        comm: Messenger,
        kind: str,
        tensor: torch.Tensor,
        peer: int,
        tag: int,
    ) -> None:
        super().__init__([tensor])
        self.comm = comm
        self.kind, self.tensor, self.peer, self.tag = kind, tensor, peer, tag
        self.tag_tensor = torch.tensor([tag], device=tensor.device) if tag else None
        self._messages = messages

    def move(self, tensor: torch.Tensor) -> None:
        """Call for the tag and the tensor, in a group."""
        for part in (self.tag_tensor, tensor):
            if part is not None and self.kind == "send":
                self.comm.send(part, self.peer)
            elif part is not None:
                self.comm.recv(part, self.peer)

    def check_tag(self) -> None:
        if self.tag_tensor is None or self.tag_tensor.item() == self.tag:
            return
        peer = self.comm.rank_name(self.peer)
        raise Unsupported(
            f"{self.comm.rank_name()}: the message from {peer} has "
            f"tag={self.tag_tensor.item()}, and was to be received with tag={self.tag}. Between "
            "two ranks messages arrive in the order of sending. Receive in the order in which "
            f"{peer} sends."
        )

    def wait(self, timeout: Any = NO_TIMEOUT) -> bool:
        self._messages.start()
        return super().wait(timeout)

    def is_completed(self) -> bool:
        self._messages.start()
        return super().is_completed()

    def get_future(self) -> Any:
        self._messages.start()
        return super().get_future()


def _run_deferred(deferred: list[_DeferredP2P]) -> None:
    """Run the messages together, and end each with the result."""
    error: Exception | None = None
    try:
        tensors = [(message.kind, message.tensor) for message in deferred]
        with flattened_all(tensors) as whole, deferred[0].comm.group():
            for message, tensor in zip(deferred, whole, strict=True):
                message.move(tensor)
        for message in deferred:
            message.check_tag()
    except Exception as caught:
        error = caught
    for message in deferred:
        message.end(error)
