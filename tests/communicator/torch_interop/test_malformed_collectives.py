"""Wherever gloo refuses the arguments of a collective, drumline does: on every rank, at once.

The cases are in programs/malformed_collectives.py, which forks its ranks.
"""

from pathlib import Path

import pytest
import torch
from torch.distributed import ReduceOp

from communicator import Communicator, CommunicatorError
from communicator.torch_interop import list_collectives
from coordinator import Coordinator

PROGRAM = Path(__file__).parents[1] / "programs" / "malformed_collectives.py"
BACKENDS = ("shm", "tcp", "gloo")


def test_malformed_collectives_raise_on_every_rank_as_on_gloo(warm, tmp_path):
    """Parts of another shape were broadcast into their places; short lists shifted later calls."""
    done = warm.run(PROGRAM, tmp_path, timeout=110)
    errors = [path.read_text() for path in tmp_path.glob("*.error")]
    assert done.returncode == 0, (errors, done.stderr)
    for rank in range(3):
        count, *problems = (tmp_path / str(rank)).read_text().splitlines()
        assert problems == []
        assert int(count.split()[0]) > 900


@pytest.fixture(params=BACKENDS)
def trio(request, ranks):
    def run(body):
        def rank(info):
            with Coordinator(info) as coor, Communicator(coor, request.param) as comm:
                return body(comm)

        return ranks(rank, 3)

    return run


def test_a_call_that_one_rank_declines_raises_on_the_others_with_why(trio):
    def body(comm):
        if comm.rank == 1:
            comm.decline("its list is short")
        else:
            with pytest.raises(CommunicatorError, match=r"rank 1.* wrong: its list is short"):
                comm.allreduce(torch.ones(3))
        return comm.allreduce(torch.ones(3))[0].item()

    assert trio(body) == [3.0] * 3


def test_a_call_that_every_rank_declines_raises_nowhere(trio):
    def body(comm):
        comm.decline(f"of rank {comm.rank}")
        return comm.allreduce(torch.ones(3))[0].item()

    assert trio(body) == [3.0] * 3


def test_ranks_that_expect_another_part_than_comes_all_say_so(trio):
    """The ranks between which all was right had gone on."""

    def body(comm):
        tensors = [torch.ones(2) for _ in range(3)]
        outs = [torch.zeros(2) for _ in range(3)]
        if comm.rank == 2:
            outs[0] = torch.zeros(1)
        with pytest.raises(
            CommunicatorError, match=r"rank 0 sends 2 elements to rank 2, which .* 1"
        ):
            list_collectives.alltoall(comm, outs, tensors)
        assert not any(out.any() for out in outs)
        return True

    assert trio(body) == [True] * 3


def test_senders_hear_that_ranks_gather_different_tensors(trio):
    def body(comm):
        tensor = torch.ones(2 + (comm.rank == 2))
        outs = [torch.zeros(2) for _ in range(3)] if comm.rank == 0 else []
        with pytest.raises(CommunicatorError, match="rank 2"):
            list_collectives.gather(comm, outs, tensor, 0)
        outs = [torch.zeros(2) for _ in range(3)] if comm.rank == 0 else []
        list_collectives.gather(comm, outs, torch.full((2,), 1.0 + comm.rank), 0)
        return [out[0].item() for out in outs]

    assert trio(body) == [[1.0, 2.0, 3.0], [], []]


def test_lists_that_differ_raise_before_the_first_tensor_is_reduced(trio):
    def body(comm):
        tensors = [torch.ones(2), torch.ones(2 + (comm.rank == 2))]
        with pytest.raises(
            CommunicatorError, match=r"rank 2 asked for 2 tensors .* 3 torch.float32"
        ):
            list_collectives.allreduce_coalesced(comm, tensors, ReduceOp.SUM)
        if comm.rank == 0:
            tensors.append(torch.ones(2))
        with pytest.raises(CommunicatorError, match="rank 0 asked for 3 tensors"):
            list_collectives.allreduce_coalesced(comm, tensors, ReduceOp.SUM)
        return tensors[0].tolist()

    assert trio(body) == [[1.0, 1.0]] * 3


def test_uneven_lists_are_gathered_and_scattered_over_every_backend(trio):
    def body(comm):
        outs = [torch.zeros(rank, 2) for rank in range(3)]
        list_collectives.allgather(comm, outs, torch.full((comm.rank, 2), comm.rank + 0.5))
        rows = [torch.full((rank + 1,), 1.0 + comm.rank) for rank in range(3)]
        total = torch.zeros(comm.rank + 1)
        list_collectives.reduce_scatter(comm, total, rows, ReduceOp.SUM)
        bits = torch.zeros(comm.rank + 1, dtype=torch.int64)
        rows = [torch.full((rank + 1,), 1 << comm.rank) for rank in range(3)]
        list_collectives.reduce_scatter(comm, bits, rows, ReduceOp.BOR)
        return [out.flatten().tolist() for out in outs], total.tolist(), bits.tolist()

    gathered = [[], [1.5] * 2, [2.5] * 4]
    assert trio(body) == [(gathered, [6.0] * (n + 1), [7] * (n + 1)) for n in range(3)]
