"""The gloo backend, with ranks as threads."""

import time

import pytest
import torch

from communicator import (
    Communicator,
    CommunicatorError,
    CommunicatorTimeout,
    PeerLost,
    Unsupported,
    conformance,
)
from coordinator import Coordinator, torch_private
from launcher import LaunchInfo
from tests.cases import soak


@pytest.mark.parametrize("world_size", [1, soak(3)])  # two: test_cli.py
def test_gloo_conforms(ranks, world_size):
    def body(info):
        with Coordinator(info, timeout_s=60) as coor, Communicator(coor, backend="gloo") as comm:
            report = conformance.check(comm)
            return report.having(conformance.FAILED), report.having(conformance.UNSUPPORTED)

    assert ranks(body, world_size) == [([], [])] * world_size


def test_the_sample_of_the_rfc_runs(ranks):
    def body(info):
        coor = Coordinator(info)
        comm = Communicator(coor)
        data = torch.ones((1024, 1024)).to(device="cpu")
        comm.allreduce(data)
        coor.close()
        return data.mean().item()

    assert ranks(body, 4) == [4.0] * 4


def test_a_communicator_lives_on_a_subgroup(ranks):
    def body(info):
        with Coordinator(info) as coor:
            group = coor.split([2, 0])
            if group is None:
                return None
            with group, Communicator(group) as comm:
                return comm.allgather(torch.tensor([coor.rank])).tolist()

    assert ranks(body, 3) == [[[2], [0]], None, [[2], [0]]]


def test_an_unknown_backend_lists_the_known_ones():
    with (
        Coordinator(LaunchInfo("alone")) as coor,
        pytest.raises(Unsupported, match=r"'rocket'.*gloo"),
    ):
        Communicator(coor, backend="rocket")


def test_a_backend_that_one_rank_lacks_is_refused_on_all(ranks_or_errors):
    def body(info):
        with Coordinator(info) as coor:
            Communicator(coor, backend="gloo" if coor.rank else "rocket")

    for error in ranks_or_errors(body, 3):
        assert isinstance(error, Unsupported) and "rocket" in str(error)


BAD_CALLS = {
    "not contiguous": lambda comm: comm.allreduce(torch.ones(4, 4).t()[1:]),
    "autograd": lambda comm: comm.allreduce(torch.ones(4, requires_grad=True)),
    "op='mean'": lambda comm: comm.allreduce(torch.ones(4), "mean"),
    "divide": lambda comm: comm.allreduce(torch.ones(4, dtype=torch.int32), "avg"),
    "moved but not reduced": lambda comm: comm.allreduce(torch.ones(4, dtype=torch.uint16)),
    "src=5": lambda comm: comm.broadcast(torch.ones(4), 5),
    "dst=-1": lambda comm: comm.send(torch.ones(4), -1),
    "itself": lambda comm: comm.send(torch.ones(4), comm.rank),
    "out is": lambda comm: comm.allgather(torch.ones(4), out=torch.ones(4)),
    "one row for each": lambda comm: comm.reduce_scatter(torch.ones(5)),
    "out shares memory": lambda comm: _swap_within(torch.ones(2, 4), comm),
    "allgather: out shares": lambda comm: _gather_within(torch.ones(2, 4), comm),
    "meta": lambda comm: comm.allreduce(torch.ones(4, device="meta")),
}


def _swap_within(rows, comm):
    comm.alltoall(rows, out=rows)


def _gather_within(rows, comm):
    comm.allgather(rows[comm.rank], out=rows)  # in place
    comm.allgather(rows[1 - comm.rank], out=rows)


@pytest.mark.parametrize("words", BAD_CALLS)
def test_bad_arguments_raise_before_anything_moves(ranks, words):
    def body(info):
        with Coordinator(info) as coor, Communicator(coor, backend="gloo") as comm:
            with pytest.raises(ValueError, match=words):
                BAD_CALLS[words](comm)
            return comm.allreduce(torch.ones(1)).item()

    assert ranks(body, 2) == [2.0, 2.0]


def test_a_fake_tensor_is_refused():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with (
        Coordinator(LaunchInfo("alone")) as coor,
        Communicator(coor) as comm,
        FakeTensorMode(),
        pytest.raises(TypeError, match="FakeTensor"),
    ):
        comm.allreduce(torch.ones(4))


def test_a_closed_communicator_says_so():
    with Coordinator(LaunchInfo("alone")) as coor:
        comm = Communicator(coor)
        comm.close()
        comm.close()
        with pytest.raises(CommunicatorError, match="closed"):
            comm.barrier()


def test_a_peer_that_leaves_is_an_error(ranks_or_errors):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, backend="gloo") as comm:
            comm.barrier()
            if comm.rank != 1:
                comm.allreduce(torch.ones(4))

    found = ranks_or_errors(body, 3)
    assert found[1] is None
    assert isinstance(found[0], PeerLost) and isinstance(found[2], PeerLost)


def test_a_deadline_says_where_the_ranks_are(ranks):
    """One rank waits: the first of two to give up ends the other's connection."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            comm = Communicator(coor, "gloo", timeout_s=0.5, checked_calls=0)
            coor.barrier()
            if comm.rank == 0:
                with pytest.raises(
                    CommunicatorTimeout, match=r"(?s)ranks are:.*rank 1 \(host.*seen"
                ):
                    comm.allreduce(torch.ones(1))
            coor.barrier()

    ranks(body, 2)


@pytest.mark.parametrize("call", ["barrier", "broadcast", "allreduce", "allgather"])
def test_a_longer_deadline_holds_for_every_collective(ranks, call):
    """broadcast and allgather kept the one of the start."""

    def body(info):
        tensor, rows = torch.ones(1), torch.zeros(2, 1)
        arguments = {"broadcast": (tensor, 1), "allreduce": (tensor, tensor, "sum")}
        arguments |= {"barrier": (), "allgather": (rows, tensor)}
        with (
            Coordinator(info, timeout_s=20) as coor,
            Communicator(coor, "gloo", timeout_s=1) as comm,
        ):
            comm.set_timeout(20)
            coor.barrier()
            if comm.rank == 1:
                time.sleep(1.5)
            getattr(comm._backend, call)(*arguments[call])
            coor.barrier()

    ranks(body, 2)


def test_a_group_whose_body_raises_sends_nothing(ranks):
    def body(info):
        with Coordinator(info) as coor, Communicator(coor, backend="gloo") as comm:
            with pytest.raises(KeyError), comm.group():
                comm.send(torch.ones(1), 1 - comm.rank)
                raise KeyError
            return comm.allreduce(torch.ones(1)).item()

    assert ranks(body, 2) == [2.0, 2.0]


@pytest.mark.parametrize(
    "sent, expected",
    [
        (torch.ones(3), torch.zeros(3, dtype=torch.int32)),
        (torch.ones(0), torch.zeros(3)),
        (torch.ones(3), torch.zeros(0)),
    ],
    ids=["another dtype of the same size", "nothing was sent", "nothing was expected"],
)
def test_a_message_that_was_not_expected_is_named_and_dropped(ranks, sent, expected):
    """Of the same size it was taken for the tensor's, and its receiver waited for the deadline."""

    def body(info):
        with Coordinator(info, timeout_s=5) as coor, Communicator(coor, backend="gloo") as comm:
            if comm.rank == 0:
                comm.send(sent, 1)
            else:
                into = expected.clone()
                with pytest.raises(CommunicatorError, match="was to be received as"):
                    comm.recv(into, 0)
                assert into.equal(expected)
            return comm.allreduce(torch.ones(1)).item()

    assert ranks(body, 2) == [2.0, 2.0]


FORKED = """
import gc, os, signal, torch
from communicator import Communicator
from coordinator import Coordinator, torch_private
from tests.conftest import run_threads

def body(info):
    with Coordinator(info) as coor:
        comm = Communicator(coor, backend="gloo")
        comm.allreduce(torch.ones(4))
        return [comm]  # ranks are threads: it outlives its Coordinator

communicators = [comm for result in run_threads(body, 2) for comm in result]
child = os.fork()
if child == 0:
    signal.alarm(60)
    communicators.pop().close()
    communicators.clear()
    gc.collect()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


def test_a_forked_child_leaves_the_communicators_of_its_parent_alone(warm):
    """gloo's threads are not there: to wait for them hangs, or ends the child (SIGABRT)."""
    done = warm.run("-c", FORKED)
    assert done.stdout == "7\n", done.stderr


def test_no_rank_leaves_the_opening_before_all_have_connected(ranks, monkeypatch):
    """One that closed at once ended two that still connected: "Connection closed by peer"."""
    connect, connected = torch_private.gloo_group, []

    def connect_slowly(store, rank, *rest):
        group = connect(store, rank, *rest)
        time.sleep(0.2 * rank)
        connected.append(rank)
        return group

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, "gloo"):
            return sorted(connected)

    monkeypatch.setattr(torch_private, "gloo_group", connect_slowly)
    assert ranks(body, 3) == [[0, 1, 2]] * 3
