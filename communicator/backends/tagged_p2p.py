"""Messages between two ranks, over a library that matches them by tag: gloo, MPI.

Such a library may write past the end of a tensor, end the process, or say nothing, if what comes is
not what was expected. So the tag has the shape and dtype in it: messages that differ do not meet,
and the deadline ends the waiting. The first messages between two ranks are each followed by a
letter that says what they are, so that a mistake there is named at once.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from communicator import call_check
from communicator.base import Communicator
from communicator.errors import CommunicatorError

LETTER = "letter"  # in place of a shape and dtype


class Message:
    """A send or receive under way, the number-th of its direction between two ranks."""

    work: Any
    letter: torch.Tensor | None = None
    letter_work: Any = None

    def __init__(self, kind: str, tensor: torch.Tensor, peer: int, number: int) -> None:
        self.kind, self.tensor, self.peer, self.number = kind, tensor, peer, number


class Network(Communicator):
    """What such a backend provides: _launch and _await."""

    _takes_empty = True
    _largest_tag = 2**31 - 1
    _counts: dict[tuple[str, int], int]  # of messages, by direction and peer

    def _open(self) -> None:
        self._counts = {}

    def _launch(self, kind: str, data: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to "send" or "recv" bytes; what it returns keeps data alive and goes to _await."""
        raise NotImplementedError

    def _await(self, call: str, work: Any) -> None:
        """Return when what was launched has ended."""
        raise NotImplementedError

    def _send(self, tensor: torch.Tensor, dst: int) -> None:
        self._finish(self._begin([("send", tensor, dst)]), f"send to rank {dst}")

    def _recv(self, tensor: torch.Tensor, src: int) -> None:
        self._finish(self._begin([("recv", tensor, src)]), f"recv from rank {src}")

    def _exchange(self, calls: list[tuple[str, torch.Tensor, int]]) -> None:
        self._finish(self._begin(calls))

    def _begin(self, calls: list[tuple[str, torch.Tensor, int]]) -> list[Message]:
        """Start sends and receives, which go on by themselves until _finish waits for them."""
        return [self._start(*call) for call in calls]

    def _finish(self, begun: list[Message], call: str = "group") -> None:
        problems = [self._read_letter(call, message) for message in begun]
        for message in begun:
            self._await(call, message.work)
        for problem in filter(None, problems):
            raise CommunicatorError(problem)

    def _start(self, kind: str, tensor: torch.Tensor, peer: int) -> Message:
        number = self._counts.get((kind, peer), 0) + 1
        self._counts[kind, peer] = number
        message = Message(kind, tensor, peer, number)
        what = call_check.describe(tensor)
        message.work = self._start_bytes(message, as_bytes(tensor), what)
        if number <= self._checked_calls:
            message.letter = call_check.pack(f"{tensor.nbytes} {what}")
            message.letter_work = self._start_bytes(message, message.letter, LETTER)
        return message

    def _start_bytes(self, message: Message, data: torch.Tensor, what: str) -> Any:
        tag = zlib.crc32(f"{message.number} {what}".encode()) % (self._largest_tag + 1)
        return self._launch(message.kind, data, message.peer, tag)

    def _read_letter(self, call: str, message: Message) -> str:
        """What is wrong with a message, in words, or "". One that does not fit is taken off the
        line all the same, so that its sender and the next one need not wait.
        """
        if message.letter is None:
            return ""
        self._await(call, message.letter_work)
        nbytes, _, theirs = call_check.unpack(message.letter).partition(" ")
        mine = call_check.describe(message.tensor)
        if message.kind == "send" or theirs == mine:
            return ""
        dropped = torch.empty(int(nbytes), dtype=torch.uint8)
        message.work = self._start_bytes(message, dropped, theirs)
        return (
            f"rank {self.rank}: message {message.number} from rank {message.peer} is {theirs}, but "
            f"was to be received as {mine}. It was dropped, and the tensor left as it was. "
            "Receive into a tensor of the shape and dtype that is sent."
        )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of tensor as bytes, so that every dtype can be moved."""
    return tensor.detach().reshape(-1).view(torch.uint8)
