"""What a reduction gives does not depend on the backend."""

import pytest
import torch

from communicator import Communicator
from coordinator import Coordinator


@pytest.fixture(params=["shm", "tcp", "gloo"])
def trio(request, ranks):
    def run(body):
        def rank(info):
            with Coordinator(info) as coor, Communicator(coor, request.param) as comm:
                return body(comm)

        return ranks(rank, 3)

    return run


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_max_and_min_keep_the_nan_of_every_rank(trio, op, dtype):
    """gloo kept that of one rank and lost those of others."""

    def body(comm):
        mine = torch.ones(5, dtype=dtype)
        mine[comm.rank] = torch.nan
        comm.reduce(reduced := mine.clone(), 1, op)
        rows = comm.reduce_scatter(mine.expand(3, 5).contiguous(), op)
        found = [comm.allreduce(mine.clone(), op), rows, *([reduced] if comm.rank == 1 else [])]
        return all(one.isnan().tolist() == [True] * 3 + [False] * 2 for one in found)

    assert trio(body) == [True] * 3
