"""The GPU of a rank among those that its process sees."""

from __future__ import annotations

import torch

from communicator.errors import Unsupported
from launcher import gpus


def own_ordinal(local_rank: int) -> int:
    """The CUDA ordinal: the local rank, unless each process was given some of the GPUs only.

    Raises Unsupported if the ranks see all GPUs of the node, and there are fewer than ranks. Ranks
    that all were given the same few cannot be told from here: their communicator compares them.
    """
    count = torch.cuda.device_count()
    if local_rank < count or count == 0:
        return local_rank
    if gpus.is_restricted():
        return local_rank % count
    raise Unsupported(
        f"local rank {local_rank} has no GPU of its own among the {count} here. Start at most "
        f"{count} ranks a node, or name its GPU with Communicator(coor, device=...)"
    )


def as_device(device: torch.device | str | int | None) -> torch.device | None:
    """The device that an argument names; a number is that of a GPU. Raises ValueError for none."""
    if isinstance(device, int):
        return torch.device("cuda", device)
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"Communicator(device={device!r}): no device has this name. Pass 'cpu', 'cuda', "
            "'cuda:1', or the number of a GPU."
        ) from error
