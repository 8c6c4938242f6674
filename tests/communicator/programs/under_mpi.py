"""One rank of an mpiexec: prints what it found wrong, and nothing else.

mpiexec -n 3 python under_mpi.py
"""

import sys
from dataclasses import replace

import torch

import launcher
from communicator import Communicator, CommunicatorTimeout, conformance
from coordinator import Coordinator


def check(coor):
    assert Communicator(coor).backend == "shm"  # nobody asked for MPI
    with Communicator(coor, "mpi") as comm:
        report = conformance.check(comm, large=50_021)
        if not report.ok or report.having("unsupported"):
            sys.stdout.write(str(report))
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


def late(comm):
    try:
        comm.allreduce(torch.ones(3))
    except CommunicatorTimeout as error:
        assert "in allreduce (mpi, 3 ranks)" in str(error)
    else:
        raise AssertionError("rank 0 never came")


def two_nodes(info):
    """The same ranks, told that the last is on a node of its own."""
    last = info.rank == 2
    place = {"local_rank": 0, "local_world_size": 1} if last else {"local_world_size": 2}
    return replace(info, launch_id=f"{info.launch_id}-nodes", **{"local_rank": info.rank, **place})


def between_nodes(coor):
    with Communicator(coor, "hybrid", between="mpi") as comm:
        report = conformance.check(comm, large=50_021)
        if not report.ok or report.having("unsupported"):
            sys.stdout.write(str(report))


with Coordinator(timeout_s=60) as coordinator:
    check(coordinator)
    coordinator.barrier()
with Coordinator(two_nodes(launcher.current()), timeout_s=60) as coordinator:
    between_nodes(coordinator)
    coordinator.barrier()
