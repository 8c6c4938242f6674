"""One rank of an mpiexec: prints what it found wrong, and nothing else.

mpiexec -n 3 python under_mpi.py
"""

import sys

import torch

from communicator import Communicator, CommunicatorTimeout, conformance
from coordinator import Coordinator, DrumlineError


def check(coor):
    assert Communicator(coor).backend == "shm"  # nobody asked for MPI
    with Communicator(coor, "mpi") as comm:
        report = conformance.check(comm, large=50_021)
        if not report.ok or report.having("unsupported"):
            sys.stdout.write(str(report))
    for count in (3, 3000):
        with Communicator(coor, "mpi") as comm:
            wrong_size(comm, count)
            comm.barrier()
    subgroup(coor)
    with Communicator(coor, "mpi", timeout_s=1.0) as comm:
        if coor.rank:
            late(comm)
        coor.barrier()


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
