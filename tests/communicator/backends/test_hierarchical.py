"""Ranks of several nodes: here they are threads that were told so."""

import os
import re
import signal
import socket
import time
from dataclasses import replace

import pytest
import torch

from communicator import (
    Communicator,
    CommunicatorError,
    CommunicatorTimeout,
    PeerLost,
    Unsupported,
    conformance,
    selection,
)
from communicator.backends.hierarchical import first_failure, reader_key
from communicator.backends.shm import Shm
from coordinator import Coordinator
from launcher import LaunchInfo


def test_hierarchical_backend_conforms(ranks):
    """On two nodes: test_hierarchical_over_hosts.py."""

    def body(info):
        with Coordinator(info, timeout_s=60) as coor, Communicator(coor) as comm:
            report = conformance.check(comm)
            assert comm.backend == "hierarchical"
            return report.having(conformance.FAILED), report.having(conformance.UNSUPPORTED)

    assert ranks(body, 4, [1, 2, 1]) == [([], [])] * 4


def test_ranks_of_a_subgroup_may_be_mixed_over_the_nodes(ranks):
    """Group rank 0 is a second rank of its node, and neighbours in rank are on different nodes."""

    def body(info):
        with Coordinator(info, timeout_s=60) as coor:
            group = coor.split([4, 1, 3, 0, 2])
            with group, Communicator(group, "hybrid") as comm:
                assert sorted(map(sorted, group.nodes)) == [[0, 2], [1, 3, 4]]
                report = conformance.check(comm, large=1021)
                return report.having(conformance.FAILED)

    assert ranks(body, 5, [3, 2]) == [[]] * 5


def test_one_node_or_one_rank_per_node_is_unsupported():
    with (
        Coordinator(LaunchInfo("alone")) as coor,
        pytest.raises(Unsupported, match="1 ranks on 1 nodes"),
    ):
        Communicator(coor, "hybrid")


def test_what_cannot_reach_another_node_is_refused_between_nodes(ranks):
    def body(info):
        with Coordinator(info) as coor, pytest.raises(ValueError, match="between='shm'"):
            Communicator(coor, "hybrid", between="shm")

    ranks(body, 3, [2, 1])


def test_one_rank_on_each_node_takes_the_network(ranks):
    def body(info):
        with Coordinator(info) as coor, Communicator(coor) as comm:
            return comm.backend

    assert ranks(body, 2, [1, 1]) == ["tcp"] * 2


class OnDevice(Shm):
    """The best of a node whose ranks have devices, as NCCL is."""

    name, device_type = "on_device", "xpu"

    @classmethod
    def probe(cls, coor):
        return 1000


def test_ranks_of_a_node_that_has_devices_move_tensors_of_the_cpu(ranks, monkeypatch):
    """The best backend was taken, of whatever device, and refused the first tensor."""
    monkeypatch.setitem(selection.BUILTIN, OnDevice.name, f"{__name__}:OnDevice")

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, "hybrid") as comm:
            assert comm._backend._local.backend != OnDevice.name
            return comm.allreduce(torch.ones(1)).item()

    assert ranks(body, 3, [2, 1]) == [3.0] * 3


@pytest.mark.parametrize(("nbytes", "movers"), [(1 << 16, {0, 2}), (1 << 20, {0, 1, 2, 3})])
def test_all_ranks_of_a_node_move_large_tensors_and_one_moves_small_ones(ranks, nbytes, movers):
    """Of 64 KiB one rank's messages are as fast as those of all, and take half the processor."""

    def body(info):
        sizes = []
        with Coordinator(info) as coor, Communicator(coor) as comm:
            run = comm._backend._network.run_program
            comm._backend._network.run_program = lambda program, tensor, *rest: (
                sizes.append(tensor.nbytes),
                run(program, tensor, *rest),
            )
            total = comm.allreduce(torch.full((nbytes // 4,), float(comm.rank)))
            assert total.unique().tolist() == [6.0]
            return max(sizes, default=0) > 1 << 15

    have_moved = ranks(body, 4, [2, 2])
    assert {rank for rank in range(4) if have_moved[rank]} == movers


def test_a_rank_that_leaves_ends_the_call_on_every_node(ranks_or_errors):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor) as comm:
            comm.barrier()
            if comm.rank != 4:  # not a leader
                comm.allreduce(torch.ones(4))

    found = ranks_or_errors(body, 5, [3, 2])
    assert found[4] is None
    assert all(isinstance(error, PeerLost) for error in found[:4]), found
    # The neighbours of rank 4 saw it leave: one of them was the first, of whom the others are told.
    first = [re.search(r"The first failure: rank ([13]) in allgather", str(e)) for e in found[:4]]
    assert len(list(filter(None, first))) == 3, found


def test_its_own_deadline_holds_inside_a_node_and_between(ranks):
    """The parts took the Coordinator's, which is minutes."""

    def body(info):
        with Coordinator(info, timeout_s=60) as coor, Communicator(coor, timeout_s=1) as comm:
            coor.barrier()
            begun = time.monotonic()
            if comm.rank:  # rank 1 waits for its node, rank 2 for the network
                with pytest.raises(CommunicatorTimeout):
                    comm.recv(torch.ones(3), 0)
            coor.barrier()  # nobody leaves before
            return time.monotonic() - begun

    assert max(ranks(body, 3, [2, 1])) < 30


def test_groups_of_near_and_far_do_not_wait_for_each_other(ranks):
    """Rank 0 may not wait for rank 3 on the other node before it answers rank 1 on its own."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor) as comm:
            big, word = torch.ones(300_000), torch.zeros(1)
            if comm.rank == 0:
                with comm.group():
                    comm.send(big, 3)
                    comm.send(big, 1)
            elif comm.rank == 1:
                comm.recv(big, 0)
                comm.send(word, 3)
            elif comm.rank == 3:
                comm.recv(word, 1)
                comm.recv(big, 0)
            return True

    assert ranks(body, 5, [3, 2]) == [True] * 5


@pytest.mark.parametrize("src", [3, 0], ids=["near", "far"])
def test_a_message_that_does_not_fit_is_dropped_and_its_sender_named(ranks, src):
    """It closed the communicator, and rank 3 was called rank 0, its number on its node."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor) as comm:
            if comm.rank == src:
                comm.send(torch.ones(3), 4)
            elif comm.rank == 4:
                with pytest.raises(CommunicatorError, match=rf"rank 4.*rank {src}\b"):
                    comm.recv(torch.ones(2), src)
            return comm.allreduce(torch.ones(1)).item()

    assert ranks(body, 5, [3, 2]) == [5.0] * 5


@pytest.mark.parametrize("call", ["allreduce", "reduce", "reduce_scatter"])
def test_complex_numbers_are_added_up(ranks, call):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, timeout_s=5) as comm:
            return getattr(comm, call)(torch.full((3, 2), 1 + 2j)).flatten()[0].item()

    assert ranks(body, 3, [2, 1])[0] == 3 + 6j


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("numel", [3, 99_999])
def test_dtypes_that_are_moved_alone_or_added_are_moved_within_and_between_nodes(
    ranks, dtype, numel
):
    """It refused them when others of the call were on the network already."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, timeout_s=5) as comm:
            rows = torch.full((3, numel), 1 + comm.rank).to(dtype)
            gathered, swapped = comm.allgather(rows[0]), comm.alltoall(rows)
            comm.broadcast(rows, 2)
            results = [result.to(torch.complex64) for result in (gathered, swapped, rows)]
            return [(int(each[:, -1][0].real), int(each[:, -1][2].real)) for each in results]

    assert ranks(body, 3, [2, 1]) == [[(1, 3), (1, 3), (3, 3)]] * 3


def test_first_failure_is_not_waited_for_where_the_store_has_stopped():
    """A rank 0 that was stopped, or lies behind a cut link, held up all others for good."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, extras = listener.getsockname()[1], {"master_fd": str(listener.fileno())}
        info = LaunchInfo("stopped", 2, 1, 1, master_port=port)
        pid = os.fork()
        if not pid:
            try:
                coor = Coordinator(replace(info, rank=0, extras=extras), timeout_s=20)
                coor.store("failures").wait([reader_key(1)])
                os.kill(os.getpid(), signal.SIGSTOP)
            finally:
                os._exit(1)  # or it would run the tests that follow
    try:
        store = Coordinator(info, timeout_s=20).store("failures", timeout_s=3.0)
        assert first_failure(store, "rank 1 was lost", 1) == "rank 1 was lost"
        os.waitpid(pid, os.WUNTRACED)  # it has stopped now
        begun = time.monotonic()
        assert "does not answer" in first_failure(store, "rank 2 was lost", 2)
        assert time.monotonic() - begun < 10
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
