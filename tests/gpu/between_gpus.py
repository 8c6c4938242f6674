"""What ranks with a GPU each do in the tests that need several."""

import torch

from communicator import Communicator, conformance
from communicator.backends.nccl import Nccl, oneshot
from coordinator import Coordinator


def agree_with_nccl() -> bool:
    with (
        Coordinator(timeout_s=60) as coor,
        Communicator._of(Nccl, coor, oneshot=True) as small,
        Communicator._of(Nccl, coor) as plain,
    ):
        return all(
            _agrees(small, plain, count, dtype)
            for count in (4, 1024, 65_536, 131_072)
            for dtype in oneshot.DTYPES
        )


def conform() -> int:
    """The number of cases that NCCL passes with a GPU for each rank."""
    with Coordinator(timeout_s=60) as coor, Communicator._of(Nccl, coor) as comm:
        report = conformance.check(comm)
        report.raise_if_failed()
        return len(report.having(conformance.PASSED))


def tokens(folder: str) -> list[int] | None:
    """What stages on a GPU each say, whose hidden states go from GPU to GPU; on the master."""
    from tests.gpu import decode, model_ranks

    with Coordinator(timeout_s=60) as coor:
        places = [(rank, f"cuda:{rank}") for rank in range(coor.world_size)]
        if coor.is_master():
            decode.small_model(torch.device("cuda:0")).save_pretrained(folder)
        coor.barrier()
        split = {"device_map": {"": places[0], "model.layers.1": places[1]}}
        return model_ranks.on_master(coor, folder, model_ranks.greedy, **split)  # type: ignore


def _agrees(small: Nccl, plain: Nccl, count: int, dtype: torch.dtype) -> bool:
    found = torch.full((count,), plain.rank + 1, dtype=dtype, device=plain.device)
    expected = found.clone()
    small.allreduce(found)
    plain.allreduce(expected)
    plain.synchronize()
    return torch.equal(found, expected)
