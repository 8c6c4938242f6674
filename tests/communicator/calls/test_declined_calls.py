"""A mistake in a call with a part for each rank is raised on every rank, whoever made it."""

import pytest
import torch

from communicator import Communicator, CommunicatorError
from coordinator import Coordinator

WRONG_ON_RANK_1 = {
    "scatter of too few rows": lambda comm, is_wrong: comm.scatter(
        torch.zeros(2), torch.ones(3 - is_wrong, 2) if comm.rank == 1 else None, src=1
    ),
    "scatter of no rows": lambda comm, is_wrong: comm.scatter(
        torch.zeros(2), None if is_wrong or comm.rank != 1 else torch.ones(3, 2), src=1
    ),
    "allgather of too few sizes": lambda comm, is_wrong: comm.allgather(
        torch.ones(comm.rank + 1), sizes=[1, 2] if is_wrong else [1, 2, 3]
    ),
    "reduce_scatter of other sizes": lambda comm, is_wrong: comm.reduce_scatter(
        torch.ones(6), sizes=[1, 2, 4] if is_wrong else [1, 2, 3]
    ),
    "reduce_scatter of too few rows": lambda comm, is_wrong: comm.reduce_scatter(
        torch.ones(3 - is_wrong, 2)
    ),
    "alltoall of too few rows": lambda comm, is_wrong: comm.alltoall(torch.ones(3 - is_wrong, 2)),
    "alltoall into another shape": lambda comm, is_wrong: comm.alltoall(
        torch.ones(3, 2), out=torch.zeros(3, 2 + is_wrong)
    ),
    "reduce_scatter into another shape": lambda comm, is_wrong: comm.reduce_scatter(
        torch.ones(3, 2), out=torch.zeros(2 + is_wrong)
    ),
    "reduce_scatter of an average along a dim": lambda comm, is_wrong: comm.reduce_scatter(
        torch.ones(6, dtype=torch.int32), "avg" if is_wrong else "sum", dim=0
    ),
    "reduce_scatter along a dim with out": lambda comm, is_wrong: comm.reduce_scatter(
        torch.ones(6), dim=0, out=torch.zeros(2) if is_wrong else None
    ),
    "allgather along a dim with out": lambda comm, is_wrong: comm.allgather(
        torch.ones(2), dim=0, out=torch.zeros(6) if is_wrong else None
    ),
    "allgather along a dim that is not there": lambda comm, is_wrong: comm.allgather(
        torch.ones(2), dim=5 if is_wrong else 0
    ),
}


@pytest.mark.parametrize("backend", ["shm", "tcp", "gloo"])
def test_the_other_ranks_need_not_wait_for_their_deadline(ranks, backend):
    """What a call within a call declined was declined twice, and the next right call raised."""

    def rank(info):
        with Coordinator(info) as coor:
            is_wrong = coor.rank == 1
            error = ValueError if is_wrong else CommunicatorError
            for name, call in WRONG_ON_RANK_1.items():
                with Communicator(coor, backend, timeout_s=60) as comm:
                    with pytest.raises(error, match="rank 1"):
                        call(comm, is_wrong)
                    assert call(comm, False) is not None, name
                    assert comm.allreduce(torch.ones(1))[0] == 3, name
        return True

    assert ranks(rank, 3) == [True] * 3


WRONG_TENSOR = {
    "allgather(sizes=)": (lambda comm, part: comm.allgather(part, sizes=[1, 2]), (1, 2)),
    "allgather(dim=)": (lambda comm, part: comm.allgather(part, dim=1), (2, 2)),
    "reduce_scatter(sizes=)": (lambda comm, part: comm.reduce_scatter(part, sizes=[1, 2]), (3, 3)),
    "reduce_scatter(dim=)": (lambda comm, part: comm.reduce_scatter(part, dim=1), (2, 2)),
}


@pytest.mark.parametrize("name", WRONG_TENSOR)
def test_a_tensor_that_cannot_be_moved_is_declined_as_wrong_sizes_are(ranks, name):
    """Its check stood before the one that tells the others, who waited for their deadline."""
    call, numels = WRONG_TENSOR[name]

    def rank(info):
        with Coordinator(info) as coor, Communicator(coor, "shm", timeout_s=60) as comm:
            part = torch.ones(numels[comm.rank], 2)
            if comm.rank == 1:
                with pytest.raises(ValueError, match=r"rank 1.*contiguous"):
                    call(comm, torch.ones(numels[1], 4)[:, ::2])
            else:
                with pytest.raises(CommunicatorError, match="rank 1"):
                    call(comm, part)
            return call(comm, part) is not None

    assert ranks(rank, 2) == [True] * 2
