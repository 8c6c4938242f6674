"""Ranks that ask for different things are told so by the backends written in Python."""

import time

import pytest
import torch

from communicator import Backend, Communicator, CommunicatorError, CommunicatorTimeout
from communicator.backends.gloo import Gloo
from communicator.calls.call_check import FIRST_CALLS
from coordinator import Coordinator, DrumlineError, PeerLost

DISAGREEMENTS = {
    r"allreduce of \(7,\) float32 sum.*allreduce of \(8,\) float32 sum": (
        lambda comm: comm.allreduce(torch.ones(7)),
        lambda comm: comm.allreduce(torch.ones(8)),
    ),
    r"\(2, 2\) float32 sum.*\(4,\) float32 sum": (
        lambda comm: comm.allreduce(torch.ones(2, 2)),
        lambda comm: comm.allreduce(torch.ones(4)),
    ),
    r"\(4,\) float32 sum.*\(4,\) int64 sum": (
        lambda comm: comm.allreduce(torch.ones(4)),
        lambda comm: comm.allreduce(torch.ones(4, dtype=torch.int64)),
    ),
    "sum.*max": (
        lambda comm: comm.allreduce(torch.ones(4)),
        lambda comm: comm.allreduce(torch.ones(4), "max"),
    ),
    r"barrier.*broadcast of \(4,\) float32 from rank 2": (
        lambda comm: comm.barrier(),
        lambda comm: comm.broadcast(torch.ones(4), 2),
    ),
    "to rank 0.*to rank 1": (
        lambda comm: comm.reduce(torch.ones(4), 0),
        lambda comm: comm.reduce(torch.ones(4), 1),
    ),
    r"\(0,\) float32.*\(3,\) float32": (
        lambda comm: comm.allgather(torch.ones(0)),
        lambda comm: comm.allgather(torch.ones(3)),
    ),
}


@pytest.mark.parametrize("words", DISAGREEMENTS)
@pytest.mark.parametrize("nodes", [[3], [2, 1]], ids=["gloo", "hybrid"])
def test_mismatched_calls_raise_on_all_ranks_with_each_ranks_call(ranks, nodes, words):
    def body(info):
        backend = "gloo" if len(nodes) == 1 else "hybrid"
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, backend) as comm:
            comm.barrier()
            with pytest.raises(CommunicatorError, match=rf"disagree in call 2: rank 0.*{words}"):
                DISAGREEMENTS[words][comm.rank == 1](comm)
            return comm.allreduce(torch.ones(1)).item()  # and the group goes on

    assert ranks(body, 3, nodes) == [3.0] * 3


ALONG_A_DIM = {
    "allgather": lambda comm, dim: comm.allgather(torch.ones(3, 3), dim=dim),
    "allgather of sizes": lambda comm, dim: comm.allgather(
        torch.ones(3, 3).narrow(dim, 0, comm.rank + 1).contiguous(), dim=dim, sizes=[1, 2, 3]
    ),
    "reduce_scatter": lambda comm, dim: comm.reduce_scatter(torch.ones(3, 3), dim=dim),
    "reduce_scatter of sizes": lambda comm, dim: comm.reduce_scatter(
        torch.ones(3, 3), dim=dim, sizes=[0, 1, 2]
    ),
}


@pytest.mark.parametrize("name", ALONG_A_DIM)
@pytest.mark.parametrize("backend", ["shm", "tcp", "gloo", "hybrid"])
def test_a_dim_unlike_that_of_another_rank_raises_on_all_ranks(ranks, backend, name):
    """Each rank joined what came along its own dim, and none heard of it."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, backend) as comm:
            with pytest.raises(CommunicatorError, match=r"disagree|mismatch"):
                ALONG_A_DIM[name](comm, int(comm.rank == 1))
            return ALONG_A_DIM[name](comm, 1) is not None

    assert ranks(body, 3, [2, 1] if backend == "hybrid" else None) == [True] * 3


class LooksNoFurther(Gloo):
    compare_call = Backend.compare_call


def test_only_the_first_calls_are_compared_and_how_many_can_be_said(ranks):
    def body(info):
        with (
            Coordinator(info, timeout_s=20) as coor,
            Communicator(coor, LooksNoFurther, checked_calls=2) as comm,
        ):
            for _ in range(2):
                comm.barrier()
            moved = []
            comm._backend.allgather = lambda out, tensor: moved.append(tensor)
            comm.barrier()
            return moved

    assert ranks(body, 2) == [[], []]


def test_gloo_compares_every_call_for_a_wrong_size_would_end_the_process(ranks):
    """After the first 32 it did not, and both ranks were gone without a word."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, "gloo") as comm:
            for _ in range(FIRST_CALLS + 1):
                comm.barrier()
            words = r"disagree in call 34: rank 0 asked for allreduce of \(3,\).*of \(5000,\)"
            with pytest.raises(CommunicatorError, match=words):
                comm.allreduce(torch.ones(5000 if comm.rank else 3))
            return comm.allreduce(torch.ones(1)).item()

    assert ranks(body, 2) == [2.0, 2.0]


@pytest.mark.parametrize("counts", [(10, 5), (5, 10), (100_000, 5), (5, 100_000)])
@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "in a group"])
def test_a_message_that_does_not_fit_is_dropped_and_named(ranks, counts, grouped):
    """gloo by itself ends the process if it is too long, and says nothing if it is too short."""

    def receive(comm, tensor):
        if not grouped:
            return comm.recv(tensor, 0)
        with comm.group():
            comm.recv(tensor, 0)
        return tensor

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, "gloo") as comm:
            if comm.rank == 0:
                comm.send(torch.ones(counts[0]), 1)
                comm.send(torch.ones(3), 1)
                return "sent"
            tensor = torch.zeros(counts[1])
            with pytest.raises(
                CommunicatorError, match=rf"\({counts[0]},\) float32.*\({counts[1]},\)"
            ):
                receive(comm, tensor)
            return tensor.sum().item(), receive(comm, torch.zeros(3)).tolist()

    assert ranks(body, 2) == ["sent", (0.0, [1.0] * 3)]


def test_a_message_of_another_size_past_the_first_ones_is_waited_for_until_the_deadline(ranks):
    def body(info):
        with (
            Coordinator(info, timeout_s=20) as coor,
            Communicator(coor, "gloo", checked_calls=0) as comm,
        ):
            comm.barrier()
            comm.set_timeout(1)
            begun = time.monotonic()
            # The first to time out closes gloo's connection, which the other may see before.
            with pytest.raises(DrumlineError, match="tensors of the same size") as raised:
                comm.send(torch.ones(9), 1) if comm.rank == 0 else comm.recv(torch.ones(8), 0)
            coor.barrier()
            assert time.monotonic() - begun < 15
            return raised.type

    errors = ranks(body, 2)
    assert CommunicatorTimeout in errors
    assert set(errors) <= {CommunicatorTimeout, PeerLost}
