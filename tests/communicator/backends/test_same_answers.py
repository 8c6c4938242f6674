"""What a reduction gives does not depend on the backend."""

import pytest
import torch

from communicator import Communicator, CommunicatorError
from communicator.calls.dtypes import DTYPES, OPS
from coordinator import Coordinator

MOVED = [info.torch for info in DTYPES if info.number is not None]
REDUCED = [info.torch for info in DTYPES if info.is_reduced]


@pytest.fixture(params=["shm", "tcp", "gloo", "hierarchical"])
def trio(request, ranks):
    def run(body):
        def rank(info):
            with Coordinator(info) as coor, Communicator(coor, request.param) as comm:
                return body(comm)

        return ranks(rank, 3, [2, 1] if request.param == "hierarchical" else None)

    return run


def is_defined(dtype, op):
    if dtype.is_complex:
        return op == "sum"
    if dtype == torch.bool:
        return op in ("prod", "max", "min")
    return dtype in REDUCED and (op != "avg" or dtype.is_floating_point)


def refuses(call):
    try:
        call()
    except ValueError:
        return True
    return False


def test_each_dtype_and_op_is_reduced_over_every_backend_or_over_none(trio):
    """Complex sums were refused over shared memory alone, and sums of uint32 worked there alone."""

    def body(comm):
        wrong = []
        for dtype in MOVED:
            for op in OPS:
                one = torch.ones(5).to(dtype)
                calls = (
                    lambda: comm.allreduce(one.clone(), op),  # noqa: B023
                    lambda: comm.reduce(one.clone(), 1, op),  # noqa: B023
                    lambda: comm.reduce_scatter(one.expand(3, 5).clone(), op),  # noqa: B023
                )
                if [refuses(call) for call in calls] != [not is_defined(dtype, op)] * 3:
                    wrong.append((dtype, op))
        return wrong

    assert trio(body) == [[]] * 3


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_sums_of_complex_numbers_are_those_of_torch(trio, dtype):
    def body(comm):
        own = torch.complex(*torch.arange(22.0).view(2, 11)).to(dtype) * (1 + comm.rank)
        comm.reduce(reduced := own.clone(), 1)
        rows = comm.reduce_scatter(own.expand(3, 11).clone())
        sums = [comm.allreduce(own.clone()), rows, *([reduced] if comm.rank == 1 else [])]
        return all(torch.equal(total, own / (1 + comm.rank) * 6) for total in sums)

    assert trio(body) == [True] * 3


def test_every_dtype_is_moved_over_every_backend(trio):
    """Shared memory refused uint16, complex numbers and four kinds of 8-bit floats."""

    def body(comm):
        wrong = []
        for dtype in MOVED:
            rows = torch.stack([torch.full((4,), rank).to(dtype) for rank in range(3)])
            own = rows[comm.rank]
            comm.broadcast(root := own.clone(), 2)
            crossed = comm.alltoall(torch.stack([own] * 3))
            moved = torch.zeros_like(own)
            with comm.group():
                comm.send(own, (comm.rank + 1) % 3)
                comm.recv(moved, (comm.rank - 1) % 3)
            pairs = ((root, rows[2]), (crossed, rows), (comm.allgather(own), rows))
            pairs += ((moved, rows[comm.rank - 1]),)
            if not all(torch.equal(*map(_bytes, pair)) for pair in pairs):
                wrong.append(dtype)
        return wrong

    assert trio(body) == [[]] * 3


def _bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def test_dtypes_that_differ_in_name_alone_are_told_apart(trio):
    """uint16 travels as any two bytes, and a complex number as two others."""

    def body(comm):
        with pytest.raises(CommunicatorError, match=r"int16"):
            comm.allgather(torch.ones(4).to(torch.uint16 if comm.rank else torch.int16))

    assert trio(body) == [None] * 3


@pytest.mark.parametrize("lazy", ["conj", "neg"])
def test_views_that_change_their_numbers_are_refused_over_every_backend(trio, lazy):
    """Shared memory gathered x.conj() as x."""

    def body(comm):
        numbers = torch.ones(3, 4, dtype=torch.complex64)
        own = numbers.conj() if lazy == "conj" else torch._neg_view(numbers)
        for name in ("allreduce", "broadcast", "reduce", "allgather", "gather", "reduce_scatter"):
            with pytest.raises(ValueError, match=f"resolve_{lazy}"):
                getattr(comm, name)(own)

    assert trio(body) == [None] * 3


def test_a_dtype_that_no_backend_knows_is_refused(trio):
    def body(comm):
        packed = torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        with pytest.raises(ValueError, match=r"not a dtype that communicators know"):
            comm.broadcast(packed)

    assert trio(body) == [None] * 3


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
