"""One rank of an mpiexec: prints what it found wrong, and nothing else.

mpiexec -n 3 python under_mpi.py
"""

import gc
import sys
import weakref

import torch

from communicator import Communicator, CommunicatorTimeout, conformance
from coordinator import Coordinator, DrumlineError


def check(coor):
    assert Communicator(coor).backend == "shm"  # nobody asked for MPI
    with Communicator(coor, "mpi") as comm:
        report = conformance.check(comm, large=50_021)
        if not report.ok or report.having("unsupported"):
            sys.stdout.write(str(report))
        same_answers(comm)
    for count in (3, 3000):
        with Communicator(coor, "mpi") as comm:
            wrong_size(comm, count)
            comm.barrier()
    subgroup(coor)
    with Communicator(coor, "mpi", timeout_s=1.0) as comm:
        if coor.rank == 1:
            never_sent(comm)
        coor.barrier()
    with Communicator(coor, "mpi", timeout_s=1.0) as comm:
        if coor.rank:
            late(comm)
        coor.barrier()


def same_answers(comm):
    """As over the other backends, see test_same_answers.py."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        own = torch.ones(4, dtype=dtype)
        own[comm.rank] = torch.nan
        for op in ("max", "min"):
            rows = comm.reduce_scatter(own.expand(3, 4).contiguous(), op)
            comm.reduce(reduced := own.clone(), 0, op)
            for found in (comm.allreduce(own.clone(), op), rows, *[reduced][: comm.rank == 0]):
                assert found.isnan().tolist() == [True] * 3 + [False], (dtype, op, found)
    for dtype in (torch.complex64, torch.complex128):
        own = torch.tensor([1 + 2j, 3j], dtype=dtype)
        assert torch.equal(comm.allreduce(own.clone()), 3 * own)
        assert torch.equal(comm.reduce_scatter(own.expand(3, 2).clone()), 3 * own)
    small = torch.full((2,), comm.rank).to(torch.uint16)
    assert comm.allgather(small).tolist() == [[0, 0], [1, 1], [2, 2]]
    try:
        comm.allreduce(small)
    except ValueError as error:
        assert "moved but not reduced" in str(error)
    else:
        raise AssertionError("uint16 was reduced")


def subgroup(coor):
    pair = coor.split([2, 0])
    if pair is not None:
        with pair, Communicator(pair, "mpi") as comm:
            found = comm.allgather(torch.tensor([coor.rank])).tolist()
            assert found == [[2], [0]], found
            comm.barrier()


def wrong_size(comm, count):
    """Too few and too many: Open MPI by itself writes past the end of the tensor."""
    if comm.rank == 0:
        comm.send(torch.ones(count), 1)
        comm.send(torch.ones(2), 1)
    elif comm.rank == 1:
        try:
            comm.recv(torch.zeros(100), 0)
        except DrumlineError as error:
            assert f"({count},) float32" in str(error)
        else:
            raise AssertionError("nobody noticed")
        assert comm.recv(torch.zeros(2), 0).sum() == 2


class Memory(bytearray):
    """The memory of a tensor, to which a weak reference may be had."""


def never_sent(comm):
    """The memory of the tensor was freed, although MPI might still have written to it."""
    memory = Memory(400)
    kept = weakref.ref(memory)
    try:
        comm.recv(torch.frombuffer(memory, dtype=torch.float32), 0)
    except CommunicatorTimeout as error:
        assert "recv from rank 0" in str(error)
    else:
        raise AssertionError("rank 0 never sent")
    del memory
    gc.collect()
    assert kept() is not None


def late(comm):
    try:
        comm.allreduce(torch.ones(3))
    except CommunicatorTimeout as error:
        assert "(mpi, 3 ranks)" in str(error) and "allreduce of (3,) float32 sum" in str(error)
    else:
        raise AssertionError("rank 0 never came")


def between_nodes(coor):
    coor.nodes = [[0, 1], [2]]
    with Communicator(coor, "hybrid", between="mpi") as comm:
        report = conformance.check(comm, large=50_021)
        if not report.ok or report.having("unsupported"):
            sys.stdout.write(str(report))


with Coordinator(timeout_s=60) as coordinator:
    check(coordinator)
    between_nodes(coordinator)
    coordinator.barrier()
