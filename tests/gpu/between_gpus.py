"""What ranks with a GPU each do in the tests that need several."""

import torch

from communicator.backends.nccl import Nccl, oneshot
from coordinator import Coordinator


def agree_with_nccl() -> bool:
    with (
        Coordinator(timeout_s=60) as coor,
        Nccl(coor, oneshot=True) as small,
        Nccl(coor) as plain,
    ):
        return all(
            _agrees(small, plain, count, dtype)
            for count in (4, 1024, 65_536, 131_072)
            for dtype in oneshot.DTYPES
        )


def _agrees(small: Nccl, plain: Nccl, count: int, dtype: torch.dtype) -> bool:
    found = torch.full((count,), plain.rank + 1, dtype=dtype, device=plain.device)
    expected = found.clone()
    small.allreduce(found)
    plain.allreduce(expected)
    plain.synchronize()
    return torch.equal(found, expected)
