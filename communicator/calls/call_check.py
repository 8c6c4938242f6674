"""Checks that all ranks make the same call, before anything moves.

Most mistakes show in the first calls of a communicator, and a backend whose ranks make different
calls waits, dies, or mixes up their data. Backends in Python gather a description of each of the
first calls (`compare`). Before a library that does not compare calls itself stands a CallChecker.
"""

from __future__ import annotations

from typing import Protocol

import torch

from communicator.calls.arguments import Ranks
from communicator.calls.dtypes import dtype_name
from communicator.errors import CommunicatorError, DrumlineError, with_text


class Comparing(Ranks, Protocol):
    """A backend, as compare() needs it."""

    @property
    def device(self) -> torch.device: ...

    def allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None: ...


FIRST_CALLS = 32
DECLINED = "nothing, as its arguments are wrong:"  # in place of a call; why it was declined follows
NBYTES = 192  # of a description, as the ranks exchange it


def describe_tensor(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)}"


def describe_call(call: str, tensor: torch.Tensor | None, details: str) -> str:
    """A call in words, such as "allreduce of (3,) float32 sum"."""
    operand = "" if tensor is None else f"of {describe_tensor(tensor)}"
    return " ".join(filter(None, (call, operand, details)))


def text_to_tensor(text: str) -> torch.Tensor:
    """The text in a tensor of NBYTES bytes; what does not fit is cut off, and not compared."""
    return torch.frombuffer(bytearray(text.encode()[:NBYTES].ljust(NBYTES)), dtype=torch.uint8)


def tensor_to_text(tensor: torch.Tensor) -> str:
    return tensor.cpu().numpy().tobytes().decode(errors="replace").rstrip()


def compare(comm: Comparing, number: int, call: str) -> None:
    """Raise CommunicatorError on every rank unless all describe the same call. Collective."""
    rows = torch.empty((comm.world_size, NBYTES), dtype=torch.uint8, device=comm.device)
    try:
        comm.allgather(rows, text_to_tensor(call).to(rows.device))
    except DrumlineError as error:
        text = f"{error} (This was the comparison of call {number}, {call}, among the ranks.)"
        raise with_text(error, text) from error
    check_identical(comm, f"call {number}", [tensor_to_text(row) for row in rows])


def check_identical(comm: Ranks, where: str, calls: list[str]) -> None:
    """Raise CommunicatorError unless every rank makes the same call there. calls: by rank."""
    if len(set(calls)) > 1:
        requests = "; ".join(
            f"{comm.rank_name(rank)} asked for {call}" for rank, call in enumerate(calls)
        )
        raise CommunicatorError(
            f"{comm.rank_name()}: the ranks disagree in {where}: {requests}. Nothing was "
            "exchanged. Let every rank make the same calls in the same order, with the same "
            "shape, dtype and op."
        )
