"""Do all ranks make the same call? Asked before each of the first calls of a communicator, where
most mistakes show, because a backend that is told different things waits, dies, or mixes them up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from communicator.errors import CommunicatorError, DrumlineError

if TYPE_CHECKING:
    from communicator.base import Communicator

FIRST_CALLS = 32
NBYTES = 192  # of a description, as the ranks tell each other


def describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def pack(text: str) -> torch.Tensor:
    """The text as a tensor of NBYTES bytes; what does not fit is not compared."""
    return torch.frombuffer(bytearray(text.encode()[:NBYTES].ljust(NBYTES)), dtype=torch.uint8)


def unpack(row: torch.Tensor) -> str:
    return row.cpu().numpy().tobytes().decode(errors="replace").rstrip()


def compare(comm: Communicator, number: int, mine: str) -> None:
    """Raise CommunicatorError on every rank unless all say the same. Collective."""
    rows = torch.empty((comm.world_size, NBYTES), dtype=torch.uint8, device=comm._device())
    try:
        comm._allgather(rows, pack(mine).to(rows.device))
    except DrumlineError as error:
        raise type(error)(
            f"{error} (It was comparing call {number}, {mine}, with theirs.)"
        ) from error
    judge(comm, number, [unpack(row) for row in rows])


def judge(comm: Communicator, number: int, said: list[str]) -> None:
    """Raise CommunicatorError unless every rank said the same."""
    if len(set(said)) > 1:
        asked = "; ".join(f"rank {rank} asked for {text}" for rank, text in enumerate(said))
        raise CommunicatorError(
            f"rank {comm.rank}: the ranks disagree in call {number}: {asked}. Nothing was "
            "exchanged. Let every rank make the same calls in the same order, with the same "
            "shape, dtype and op."
        )
