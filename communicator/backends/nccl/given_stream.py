"""A stream that a communicator was given, beside torch's current one, whose tensors it takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from communicator.errors import CommunicatorError


def is_capturing(stream: torch.cuda.Stream) -> bool:
    """True while the stream is captured in a CUDA graph."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


class GivenStream:
    """Orders calls on the stream after what torch's current stream has to do at that time.

    The current stream does not wait for the calls: that is for whoever uses their results.
    """

    def __init__(self, stream: torch.cuda.Stream, me: str) -> None:
        self.stream, self._me = stream, me

    def follow_current(self, call: str) -> None:
        """Let the stream wait for the current one. Raises if one of them alone is captured."""
        current = torch.cuda.current_stream(self.stream.device)
        if current == self.stream:
            return
        captured = [is_capturing(current), is_capturing(self.stream)]
        if captured[0] != captured[1]:
            names = ["torch's current stream", "the stream that this communicator was given"]
            captured_name, other_name = names if captured[0] else reversed(names)
            raise CommunicatorError(
                f"{self._me}: {call} while {captured_name} is captured in a CUDA graph and "
                f"{other_name} is not, so the graph would not hold the call. Capture with "
                "torch.cuda.graph(graph, stream=...) on the given stream, or make a communicator "
                "without stream=."
            )
        self.stream.wait_stream(current)

    def keep(self, values: Iterable[Any]) -> None:
        """Let the memory of the tensors among the values not be used again before the stream.

        Also of those in the lists and tuples among them, as group() takes its calls.
        """
        for value in values:
            if isinstance(value, torch.Tensor):
                value.record_stream(self.stream)
            elif isinstance(value, list | tuple):
                self.keep(value)
