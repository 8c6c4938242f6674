"""Messages between two ranks, over a library that matches them by tag: gloo, MPI.

Such a library may write past the end of a tensor, end the process, or say nothing, if what arrives
is not what was expected. So the tag contains a digest of shape and dtype: messages that differ do
not match, and the deadline ends the wait. Each of the first messages between two ranks is followed
by a description of it, so that a mistake there is named at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from communicator.backend import Backend, Capabilities
from communicator.backends.scheduled_collectives import (
    COPY,
    RECV,
    REDUCE,
    SEND,
    STEP,
    StepProgram,
)
from communicator.calls import call_check
from communicator.calls.async_work import AsyncWork
from communicator.calls.default_collectives import P2PCall
from communicator.calls.failures import describe_late, describe_lost
from communicator.errors import CommunicatorError, CommunicatorTimeout, DrumlineError, PeerLost
from coordinator import RankFailure

DESCRIPTION = "description"  # in the tag, in place of a shape and dtype


class PendingMessage:
    """A send or receive in progress, the number-th of its direction between two ranks."""

    work: Any
    description: torch.Tensor | None = None
    description_work: Any = None

    def __init__(self, kind: str, tensor: torch.Tensor, peer: int, number: int) -> None:
        self.kind, self.tensor, self.peer, self.number = kind, tensor, peer, number


class TaggedP2PBackend(Backend):
    """A backend over such a library, which provides start_bytes and wait_for."""

    capabilities = Capabilities(empty_messages=True)
    ended_by = None
    collective = ""  # which no message of these libraries names
    _largest_tag = 2**31 - 1
    _counts: dict[tuple[str, int], int]  # of messages, by direction and peer

    def open(self) -> None:
        self._counts = {}

    def start_bytes(self, kind: str, data: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to "send" or "recv" bytes; what is returned keeps data alive, for wait_for."""
        raise NotImplementedError

    def wait_for(self, call: str, work: Any) -> None:
        """Return when the work has ended. Raises within timeout_s."""
        raise NotImplementedError

    def wait_error(
        self,
        call: str,
        waited_s: float,
        is_late: bool,
        lost: tuple[RankFailure, ...],
        details: str = "",
    ) -> DrumlineError:
        """The error of a wait: of its deadline if it is late, otherwise of lost peers."""
        text = (
            f"{self._me} {'timed out' if is_late else 'failed'} after {waited_s:.1f} s in {call} "
            f"({self.name}, {self.world_size} ranks).{describe_lost(lost)} Are all ranks in the "
            f"same call, with tensors of the same size, and alive?{details}"
        )
        if is_late:
            return CommunicatorTimeout(text + describe_late(self.coor))
        return PeerLost(text, lost)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        pending = self.start_group([("send", tensor, dst)])
        self.finish_group(pending, f"send to {self.rank_name(dst)}")

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        pending = self.start_group([("recv", tensor, src)])
        self.finish_group(pending, f"recv from {self.rank_name(src)}")

    def group(self, calls: list[P2PCall]) -> None:
        self.finish_group(self.start_group(calls))

    def submit(self, call: Callable[[], object]) -> AsyncWork:
        """Make a call; here it only returns when it has ended."""
        return AsyncWork([]).run(call)

    def run_program(
        self, program: StepProgram, tensor: torch.Tensor, out: torch.Tensor, op: str = ""
    ) -> None:
        """Take the steps as csrc/tcp/engine.cpp does, one round of messages after the other."""
        packed, scratch_nbytes = program
        scratch = tensor.new_empty(scratch_nbytes // tensor.itemsize)
        buffers = tensor.view(-1), out.view(-1), scratch  # by Buffer
        calls: list[P2PCall] = []
        for kind, peer, source, target, *places in STEP.iter_unpack(packed):
            begin, to, numel = (nbytes // tensor.itemsize for nbytes in places)
            if kind in (SEND, RECV):
                buffer, at = (source, begin) if kind == SEND else (target, to)
                piece = buffers[buffer][at : at + numel]
                calls.append(("send" if kind == SEND else "recv", piece, peer))
                continue
            self.group(calls)
            calls = []
            if kind == COPY:
                buffers[target][to : to + numel] = buffers[source][begin : begin + numel].clone()
            elif kind == REDUCE:
                rows = scratch[begin : begin + source * numel].view(source, numel)
                total = self.reduce_parts(rows.roll(-peer, 0), op)
                buffers[target][to : to + numel] = total
        self.group(calls)

    def start_group(self, calls: list[P2PCall]) -> list[PendingMessage]:
        """Start sends and receives, which progress by themselves until finish_group."""
        return [self._start(*call) for call in calls]

    def finish_group(self, pending: list[PendingMessage], call: str = "group") -> None:
        """Return when all have ended. Raises CommunicatorError if a message did not fit."""
        problems = [self._check_description(call, message) for message in pending]
        for message in pending:
            self.wait_for(call, message.work)
        for problem in filter(None, problems):
            raise CommunicatorError(problem)

    def _start(self, kind: str, tensor: torch.Tensor, peer: int) -> PendingMessage:
        number = self._counts.get((kind, peer), 0) + 1
        self._counts[kind, peer] = number
        message = PendingMessage(kind, tensor, peer, number)
        description = call_check.describe_tensor(tensor)
        message.work = self._start_tagged(message, as_bytes(tensor), description)
        if number <= self.capabilities.checked_calls:
            message.description = call_check.text_to_tensor(f"{tensor.nbytes} {description}")
            message.description_work = self._start_tagged(message, message.description, DESCRIPTION)
        return message

    def _start_tagged(self, message: PendingMessage, data: torch.Tensor, content: str) -> Any:
        tag = zlib.crc32(f"{message.number} {content}".encode()) % (self._largest_tag + 1)
        return self.start_bytes(message.kind, data, message.peer, tag)

    def _check_description(self, call: str, message: PendingMessage) -> str:
        """The problem of a message, or "".

        One that does not fit is received all the same, elsewhere: its sender and the next message
        need not wait.
        """
        if message.description is None:
            return ""
        self.wait_for(call, message.description_work)
        nbytes, _, sent = call_check.tensor_to_text(message.description).partition(" ")
        expected = call_check.describe_tensor(message.tensor)
        if message.kind == "send" or sent == expected:
            return ""
        dropped = torch.empty(int(nbytes), dtype=torch.uint8)
        message.work = self._start_tagged(message, dropped, sent)
        return (
            f"{self._me}: message {message.number} from {self.rank_name(message.peer)} is {sent}, "
            f"but was to be received as {expected}. It was dropped, and the tensor left as it was. "
            "Receive into a tensor of the shape and dtype that is sent."
        )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of tensor as bytes, so that every dtype can be moved."""
    return tensor.detach().reshape(-1).view(torch.uint8)
