"""The binding, through the shared-memory library: arguments, threads, groups and endings."""

import gc
import threading
import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from communicator import Communicator, CommunicatorError, PeerLost
from coordinator import Coordinator


@pytest.fixture
def pair(ranks_or_errors):
    """pair(body): body(comm) on two ranks over shared memory; results or exceptions."""

    def run(body, world_size=2):
        def rank(info):
            with (
                Coordinator(info, timeout_s=20) as coor,
                Communicator(coor, backend="shm") as comm,
            ):
                return body(comm)

        return ranks_or_errors(rank, world_size)

    return run


def in_c(comm):
    return comm._backend._comm


def buffer():
    return torch.zeros(8)


BAD_CALLS = {
    "not contiguous": lambda comm: comm.allreduce(torch.ones(4, 4).t()),
    "needs a torch.Tensor, not list": lambda comm: comm.allreduce([1.0]),
    "autograd does not see": lambda comm: comm.allreduce(torch.ones(4, requires_grad=True)),
    "op='mean' is none of": lambda comm: comm.allreduce(torch.ones(4), "mean"),
    "op=None is none of": lambda comm: comm.allreduce(torch.ones(4), None),
    "src=True is not a rank": lambda comm: comm.broadcast(torch.ones(4), True),
    "resolve_neg": lambda comm: comm.allreduce(torch.ones(1, dtype=torch.cfloat).conj().imag),
    "on meta has a shape": lambda comm: comm.allreduce(torch.ones(4, device="meta")),
    "layout torch.sparse_coo": lambda comm: comm.allreduce(torch.ones(4).to_sparse()),
    "op=7 is none of": lambda comm: comm.allreduce(torch.ones(4), 7),
    "divide": lambda comm: comm.allreduce(torch.ones(4, dtype=torch.int32), "avg"),
    "of bool": lambda comm: comm.allreduce(torch.ones(4, dtype=torch.bool)),
    "'avg' of bool": lambda comm: comm.allreduce(torch.ones(4, dtype=torch.bool), "avg"),
    "of complex numbers": lambda comm: comm.allreduce(torch.ones(4, dtype=torch.cfloat), "max"),
    "moved but not reduced": lambda comm: comm.allreduce(torch.ones(4, dtype=torch.uint16)),
    "float4_e2m1fn_x2 .* To reduce, convert": lambda comm: comm.allreduce(
        torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    ),
    "src=5": lambda comm: comm.broadcast(torch.ones(4), 5),
    "dst=-1": lambda comm: comm.send(torch.ones(4), -1),
    "src='0'": lambda comm: comm.recv(torch.ones(4), "0"),
    "itself": lambda comm: comm.send(torch.ones(4), comm.rank),
    r"is \(4,\) in a group of 2": lambda comm: comm.allgather(torch.ones(4), out=torch.ones(4)),
    "that of the tensor": lambda comm: comm.allreduce(torch.ones(4), out=torch.ones(2, 2)),
    "dtype of out": lambda comm: comm.allreduce(torch.ones(4), out=torch.ones(4).half()),
    "one row for each": lambda comm: comm.alltoall(torch.ones(3)),
    "out shares memory": lambda comm: _overlapping(comm),
    "takes 3 arguments but 4": lambda comm: comm._backend._comm.allreduce(
        torch.ones(1), "sum", None, 1
    ),
    "unexpected or repeated argument 'into'": lambda comm: comm._backend._comm.allreduce(
        buffer(), into=1
    ),
    "needs 'tensor'": lambda comm: in_c(comm).allreduce(),
}


def _overlapping(comm):
    tensor = buffer()
    comm.allreduce(tensor[:6], out=tensor[2:])


@pytest.mark.parametrize("words", BAD_CALLS)
def test_bad_arguments_raise_before_anything_moves(pair, words):
    def body(comm):
        with pytest.raises((ValueError, TypeError), match=words):
            BAD_CALLS[words](comm)
        return comm.allreduce(torch.ones(1)).item()

    assert pair(body) == [2.0, 2.0]


def test_wrappers_around_tensors_are_refused(pair):
    """Made here: CUDA builds of torch 2.11 crash where the ranks' threads made the first."""
    with FakeTensorMode():
        fake = torch.ones(4)

    def body(comm):
        with pytest.raises(TypeError, match="FakeTensor is a wrapper"):
            comm.allreduce(fake)
        return comm.allreduce(torch.nn.Parameter(torch.ones(1)).detach()).item()

    assert pair(body) == [2.0, 2.0]


def test_lazy_negatives_are_seen_whatever_was_passed_before(pair):
    """Tensors found plain are remembered; a new one in the place of an old one must not pass."""

    def body(comm):
        for _ in range(20):
            comm.allreduce(torch.ones(4))
            with pytest.raises(ValueError, match="resolve_neg"):
                comm.allreduce(torch._neg_view(torch.ones(4)).detach())
        return comm.allreduce(torch._neg_view(torch.ones(1)).resolve_neg()).item()

    assert pair(body) == [-2.0, -2.0]


def test_a_tensor_that_comes_to_need_a_gradient_is_seen_although_it_passed_before(pair):
    def body(comm):
        tensor = torch.ones(4)
        comm.allreduce(tensor)
        tensor.requires_grad_()
        with pytest.raises(ValueError, match="autograd"):
            comm.allreduce(tensor)
        with torch.no_grad():
            return comm.allreduce(tensor)[0].item()

    assert pair(body) == [4.0, 4.0]


def test_parameters_may_be_written_where_autograd_does_not_look(pair):
    def body(comm):
        parameter = torch.nn.Parameter(torch.full((3,), comm.rank + 1.0))
        with torch.no_grad():
            comm.allreduce(parameter)
        return parameter.tolist()

    assert pair(body) == [[3.0] * 3] * 2


def test_views_with_an_offset_are_written_where_they_lie(pair):
    def body(comm):
        whole = torch.arange(12.0).reshape(3, 4)
        comm.allreduce(whole[1])
        return whole.tolist()

    assert pair(body) == [[[0, 1, 2, 3], [8, 10, 12, 14], [8, 9, 10, 11]]] * 2


def test_empty_tensors_of_any_shape_pass(pair):
    def body(comm):
        found = [
            comm.allreduce(torch.ones(0, 3)),
            comm.allgather(torch.ones(0)),
            comm.reduce_scatter(torch.ones(2, 0, 5)),
            comm.alltoall(torch.ones(2, 0)),
            comm.broadcast(torch.ones(0)),
        ]
        return [tuple(tensor.shape) for tensor in found]

    assert pair(body) == [[(0, 3), (2, 0), (0, 5), (2, 0), (0,)]] * 2


def test_allgather_and_reduce_scatter_may_use_their_own_row(pair):
    def body(comm):
        rows = torch.zeros(2, 3)
        rows[comm.rank] = comm.rank + 1
        comm.allgather(rows[comm.rank], out=rows)
        gathered = rows.tolist()
        comm.reduce_scatter(rows, out=rows[comm.rank])
        return gathered, rows[comm.rank].tolist()

    everyone = [[1.0] * 3, [2.0] * 3]
    assert pair(body) == [(everyone, [2.0] * 3), (everyone, [4.0] * 3)]


def test_a_message_of_another_shape_is_dropped_and_named(pair):
    def body(comm):
        if comm.rank == 0:
            comm.send(torch.ones(100_000), 1)
            comm.send(torch.ones(3), 1)
            return None
        untouched = torch.zeros(5, dtype=torch.int64)
        with pytest.raises(CommunicatorError, match="rank 0 sent 100000 float32") as caught:
            comm.recv(untouched, 0)
        assert "recv from rank 0 of 5 int64 (message 1)" in str(caught.value)
        return untouched.tolist(), comm.recv(torch.zeros(3), 0).tolist()

    assert pair(body) == [None, ([0] * 5, [1.0] * 3)]


def test_a_message_of_nothing_is_a_message(pair):
    """It used to be left out, and the next message taken for it."""

    def body(comm):
        if comm.rank == 0:
            for count in (0, 0, 3):
                comm.send(torch.ones(count), 1)
            with comm.group():
                comm.send(torch.ones(0), 1)
            return None
        comm.recv(torch.ones(0, 7)[:, 0], 0)
        with pytest.raises(CommunicatorError, match="rank 0 sent 0 float32"):
            comm.recv(torch.ones(3), 0)
        with pytest.raises(CommunicatorError, match=r"of \(3, 1\) .* rank 0 sent 3 float32"):
            comm.recv(torch.ones(3, 1), 0)
        with comm.group():
            comm.recv(torch.ones(0), 0)
        return "told"

    assert pair(body) == [None, "told"]


def test_a_group_larger_than_every_buffer_does_not_deadlock(pair):
    def body(comm):
        peers = [rank for rank in range(comm.world_size) if rank != comm.rank]
        found = {peer: torch.zeros(400_000) for peer in peers}
        with comm.group():
            for peer in peers:
                comm.send(torch.full((400_000,), float(comm.rank)), peer)
            for peer in reversed(peers):
                comm.recv(found[peer], peer)
        return all(bool((found[peer] == peer).all()) for peer in peers)

    assert pair(body, 4) == [True] * 4


def test_waiting_for_a_peer_lets_other_threads_run(pair):
    def body(comm):
        if comm.rank == 1:
            time.sleep(0.3)
        counted = []
        stop = threading.Event()
        thread = threading.Thread(
            target=lambda: [counted.append(0) for _ in iter(stop.is_set, True)]
        )
        thread.start()
        comm.barrier()
        stop.set()
        thread.join()
        return len(counted) > 0 or comm.rank == 1  # which need not wait

    assert pair(body) == [True, True]


def test_two_threads_may_share_a_communicator(pair):
    """Their calls take turns; each rank makes the same calls, so any order of turns fits."""

    def body(comm):
        found = []

        def work():
            for _ in range(200):
                found.append(comm.allreduce(torch.ones(1)).item())

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return set(found)

    assert pair(body) == [{2.0}, {2.0}]


def test_abort_ends_a_call_that_waits_and_tells_the_peer(pair):
    def body(comm):
        if comm.rank == 1:
            threading.Timer(0.2, comm.abort).start()
        start = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            comm.recv(torch.zeros(1), 1 - comm.rank)
        assert time.monotonic() - start < 15
        with pytest.raises((PeerLost, CommunicatorError)):
            comm.barrier()
        return "abort" in str(caught.value)

    assert pair(body) == [True, True]


def test_ctrl_c_while_an_error_is_described_is_raised_in_its_place(pair):
    """It was lost, so that a program that takes a timeout for a reason to go on could not end."""

    def body(comm):
        def interrupted():
            raise KeyboardInterrupt

        if comm.rank == 0:
            comm.set_timeout(0.1)
            comm.coor.describe_late = interrupted
            with pytest.raises(KeyboardInterrupt):
                comm.recv(torch.zeros(1), 1)
        comm.coor.barrier()

    assert pair(body) == [None, None]


def test_a_peer_that_closes_is_noticed_at_once(pair):
    def body(comm):
        comm.barrier()
        if comm.rank == 1:
            return None
        with pytest.raises(PeerLost, match=r"rank 1 .* has closed its communicator") as caught:
            comm.allreduce(torch.ones(4))
        with pytest.raises(CommunicatorError, match="failed before"):
            comm.barrier()
        return "call 2 (allreduce of 4 float32, sum)" in str(caught.value)

    assert pair(body) == [True, None]


def test_a_deleted_communicator_closes_itself(pair):
    def body(comm):
        other = Communicator(comm.coor, backend="shm")
        other.barrier()
        if comm.rank == 1:
            del other
            gc.collect()
            return None
        with pytest.raises(PeerLost, match="closed"):
            other.barrier()
        return "told"

    assert pair(body) == ["told", None]


def test_a_hundred_communicators_leak_nothing(pair):
    def count():
        with open("/proc/self/maps") as maps:
            return sum("drumline" in line for line in maps)

    def body(comm):
        comm.barrier()
        before = count()
        comm.barrier()
        for _ in range(100):
            with Communicator(comm.coor, backend="shm") as other:
                other.barrier()
        comm.barrier()
        return count() - before

    assert max(pair(body)) <= 0
