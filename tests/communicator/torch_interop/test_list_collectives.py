"""Lists for torch.distributed: what the ranks bring may differ in all but its numbers."""

import pytest
import torch
from torch.distributed import ReduceOp

from communicator import Communicator, CommunicatorError, Unsupported
from communicator.torch_interop import list_collectives
from coordinator import Coordinator


@pytest.fixture
def pair(ranks):
    def run(body):
        def rank(info):
            with Coordinator(info) as coor, Communicator(coor, "shm") as comm:
                return body(comm)

        return ranks(rank, 2)

    return run


def test_lazy_signs_are_done_before_they_are_added_and_kept_in_the_tensor(pair):
    def body(comm):
        lazy = torch.complex(torch.full((2,), 1.0 + comm.rank), torch.full((2,), 2.0)).conj()
        negative = torch._neg_view(torch.full((3,), 1.0 + comm.rank))
        list_collectives.allreduce(comm, lazy, ReduceOp.SUM)
        list_collectives.allreduce(comm, negative, ReduceOp.SUM)
        return lazy.tolist(), negative.tolist(), lazy.is_conj() and negative.is_neg()

    assert pair(body) == [([3 - 4j] * 2, [-3.0] * 3, True)] * 2


def test_an_expanded_tensor_that_cannot_hold_what_came_is_an_error(pair):
    """All numbers but one were lost without a word."""

    def body(comm):
        whole, nan = torch.arange(3.0), torch.tensor([float("nan")])
        list_collectives.allreduce(comm, nan.expand(3), ReduceOp.SUM)
        try:
            list_collectives.broadcast(comm, whole[:1].clone().expand(3) if comm.rank else whole, 0)
        except CommunicatorError as error:
            return "clone()" in str(error), nan.isnan().item()
        return whole.tolist()

    assert pair(body) == [[0, 1, 2], (True, True)]


def test_ranks_may_hold_the_same_numbers_in_other_shapes(pair):
    def body(comm):
        shape = (2, 3) if comm.rank else (6,)
        mine = torch.arange(6.0).view(shape)
        list_collectives.allreduce(comm, mine, ReduceOp.SUM)
        list_collectives.broadcast(comm, mine, 1)
        outs = [torch.zeros(3, 2) for _ in range(2)]
        list_collectives.allgather(comm, outs, mine)
        theirs = torch.zeros(6, 1)
        list_collectives.exchange(comm, [mine, mine], [theirs, theirs])
        return tuple(mine.shape) == shape and outs[0].flatten().tolist(), theirs.flatten().tolist()

    expected = [2.0 * number for number in range(6)]
    assert pair(body) == [(expected, expected)] * 2


def test_parts_of_tensors_are_written_where_they_lie(pair):
    def body(comm):
        whole = torch.zeros(4, 2)
        list_collectives.reduce_scatter(
            comm, whole[:, 1], [torch.ones(4), torch.ones(4)], ReduceOp.SUM
        )
        list_collectives.scatter(
            comm, whole[:, 0], [torch.ones(4, 1).t()[0]] * 2 if comm.rank else [], 1
        )
        return whole.tolist()

    assert pair(body) == [[[1.0, 2.0]] * 4] * 2


def test_complex_numbers_are_added_and_neither_multiplied_nor_compared(pair):
    """Their parts were, each by itself, where torch does not look: in reduce and reduce_scatter."""

    def body(comm):
        mine = torch.full((2,), 1.0 + 2.0j)
        list_collectives.reduce(comm, mine, comm.world_size - 1, ReduceOp.SUM)
        for op in (ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.BAND):
            with pytest.raises(Unsupported, match="Use one of SUM, AVG"):
                list_collectives.reduce(comm, mine, 0, op)
            with pytest.raises(Unsupported, match="Use one of SUM, AVG"):
                list_collectives.reduce_scatter(comm, mine[:1].clone(), [mine[:1], mine[1:]], op)
        return mine[0].item()

    assert pair(body) == [1 + 2j, 2 + 4j]


class OnDevice:
    """A communicator of one rank and another device, where no more than counts of entries is."""

    rank, world_size, device = 0, 1, torch.device("meta")

    def __init__(self):
        self.gathered = []

    def rank_name(self, rank=0):
        return f"rank {rank}"

    def allgather(self, tensor):
        self.gathered.append(tensor.device.type)
        return torch.tensor([[2, 1, 3]]) if tensor.is_meta else tensor[None]


def test_entries_of_sparse_tensors_are_counted_where_the_communicator_moves_tensors():
    """On the CPU, which a communicator of GPUs refuses."""
    comm, own = OnDevice(), torch.tensor([1.0, 0.0, 2.0]).to_sparse()
    list_collectives.allreduce_sparse(comm, own, ReduceOp.SUM)
    assert own.to_dense().tolist() == [1, 0, 2]
    assert comm.gathered == ["meta", "cpu", "cpu"]


def test_bits_are_reduced_to_one_rank_too(pair):
    def body(comm):
        mine, flag = torch.tensor([6 - comm.rank]), torch.tensor([True, comm.rank == 0])
        list_collectives.reduce(comm, mine, 1, ReduceOp.BXOR)
        list_collectives.allreduce(comm, flag, ReduceOp.BXOR)
        return mine.item(), flag.tolist()

    assert pair(body) == [(6, [False, True]), (6 ^ 5, [False, True])]


def test_what_is_only_sent_is_not_written(pair):
    """A tensor with gaps was, with its own numbers, which autograd took for a change."""

    def body(comm):
        mine, came = torch.ones(3, 2).t(), torch.zeros(3, 2).t()
        list_collectives.exchange(comm, [mine, mine], [came, came])
        list_collectives.broadcast(comm, came if comm.rank else mine, 0)
        list_collectives.reduce(comm, came if comm.rank else mine, 1, ReduceOp.SUM)
        return mine._version, came.flatten().tolist()

    assert pair(body) == [(0, [1.0] * 6), (0, [2.0] * 6)]


def test_a_part_may_go_from_where_another_comes_to(pair):
    """What was still to be sent was overwritten."""

    def body(comm):
        rows = torch.arange(4.0) + 10 * comm.rank
        list_collectives.alltoall(comm, [rows[2:], rows[:2]], [rows[:2], rows[2:]])
        return rows.tolist()

    assert pair(body) == [[10, 11, 0, 1], [12, 13, 2, 3]]


def test_complex_numbers_of_half_precision_go_from_each_to_each(pair):
    def body(comm):
        parts = list(torch.full((2, 3), comm.rank + 1j).to(torch.complex32))
        list_collectives.alltoall(comm, outs := [torch.zeros_like(part) for part in parts], parts)
        return [complex(out[0].to(torch.complex64)) for out in outs]

    assert pair(body) == [[1j, 1 + 1j]] * 2


def test_a_part_that_lies_beside_the_outputs_is_not_copied(pair, monkeypatch):
    """One workspace for what goes and what comes took its size once more in each call."""
    monkeypatch.setattr(torch.Tensor, "clone", None)

    def body(comm):
        rows = torch.arange(8.0) + 10 * comm.rank
        list_collectives.alltoall(comm, rows[4:].split(2), rows[:4].split(2))
        return rows[4:].tolist()

    assert pair(body) == [[0, 1, 10, 11], [2, 3, 12, 13]]
