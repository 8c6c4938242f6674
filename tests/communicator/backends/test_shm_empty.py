"""Tensors that live in shared memory from the start."""

import gc
import threading
import time
from pathlib import Path

import pytest
import torch

from communicator import Communicator, CommunicatorError
from coordinator import Coordinator

LARGE = 300_007


@pytest.fixture
def with_shm(ranks):
    def run(body, world_size):
        def rank(info):
            with (
                Coordinator(info, timeout_s=30) as coor,
                Communicator(coor, backend="shm") as comm,
            ):
                return body(comm)

        return ranks(rank, world_size)

    return run


def values(rank):
    return torch.randn(LARGE, generator=torch.Generator().manual_seed(rank)) * 1000


def added_in_order(world_size):
    total = values(0)
    for rank in range(1, world_size):
        total = total + values(rank)
    return total


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("sharing", ["all", "some", "slices"])
def test_the_sum_has_the_same_bits_wherever_the_tensors_are(with_shm, world_size, sharing):
    def body(comm):
        tensor = values(comm.rank)
        if sharing != "some" or comm.rank % 2:
            whole = comm.empty((3, LARGE))
            tensor = whole[comm.rank % 3 if sharing == "slices" else 0].copy_(tensor)
        found = comm.allreduce(tensor)
        return found is tensor and torch.equal(found, added_in_order(world_size))

    assert with_shm(body, world_size) == [True] * world_size


def test_a_tensor_in_shared_memory_has_the_asked_shape_and_dtype(with_shm):
    def body(comm):
        tensor = comm.empty((2, 3), torch.bfloat16)
        others = [tuple(comm.empty(shape).shape) for shape in ((0,), (), 3)]
        return tuple(tensor.shape), tensor.dtype, others

    for found in with_shm(body, 1) + with_shm(body, 2):
        assert found == ((2, 3), torch.bfloat16, [(0,), (), (3,)])


WRONG = {
    "a size below 0": (-1,),
    "sizes below 0": ((-1, -2),),
    "a size that is no number": (("a", 2),),
    "a shape that is no number": (2.5,),
    "more than an address can tell": (1 << 62,),
    "a name of a dtype": (4, "float32"),
    "a dtype that needs a scale": (4, torch.quint8),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_tensor_can_be_is_refused_in_words(with_shm, name):
    """Python's and torch's own errors came through, and a quantized dtype ended the process."""

    def body(comm):
        with pytest.raises(ValueError, match=r"rank \d, empty: .* Pass sizes"):
            comm.empty(*WRONG[name])
        return comm.allreduce(torch.ones(1)).item()

    assert with_shm(body, 2) == [2.0, 2.0]


def test_more_memory_than_there_is_is_refused_before_any_is_taken(with_shm):
    """The kernel would promise it, and end processes when it has to keep its word."""

    def body(comm):
        with pytest.raises(CommunicatorError, match=rf"of {2**52} bytes .*: \d+ bytes are"):
            comm.empty(2**50)
        return comm.allreduce(torch.ones(1)).item()

    assert with_shm(body, 2) == [2.0, 2.0]


def test_memory_is_given_back_and_used_again(with_shm):
    """Two hundred tensors, in a table of fewer: each goes when nobody refers to it."""

    def body(comm):
        for number in range(200):
            tensor = comm.empty((LARGE,)).fill_(comm.rank + number)
            comm.allreduce(tensor)
            assert tensor[0] == tensor[-1] == 1 + 2 * number
            del tensor
        return True

    assert with_shm(body, 2) == [True, True]


def shared_nbytes():
    """The resident memory of tensors in all mappings of this process."""
    total, is_tensor = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_tensor = "memfd:drumline-tensor" in line
        elif is_tensor and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_memory_that_was_given_back_is_not_kept_by_peers(with_shm):
    """They held as many freed tensors as the table has places: 63 of any size."""

    def body(comm):
        for _ in range(20):
            tensor = comm.empty((1 << 18,)).fill_(1)
            comm.allreduce(tensor)
            del tensor
        comm.barrier()
        return shared_nbytes()

    assert max(with_shm(body, 2)) < 4 << 20


def test_the_end_of_a_tensor_waits_for_no_call_of_another_thread(with_shm):
    """A garbage collection may free it on any thread, which the call may wait for."""
    is_gone, before = threading.Event(), shared_nbytes()

    def body(comm):
        if comm.rank == 1:
            was_gone = is_gone.wait(10)
            comm.barrier()
            return was_gone
        tensor = comm.empty((1 << 20,)).fill_(1)
        calling = threading.Thread(target=comm.barrier)
        calling.start()
        time.sleep(0.2)
        del tensor
        is_gone.set()
        calling.join()
        comm.empty(1)
        return shared_nbytes() - before < 1 << 20

    assert with_shm(body, 2) == [True, True]


def test_more_tensors_than_the_table_holds_is_an_error(with_shm):
    def body(comm):
        with pytest.raises(CommunicatorError, match="Free tensors made by empty"):
            _ = [comm.empty((1,)) for _ in range(1000)]
        gc.collect()
        return comm.allreduce(torch.ones(1)).item()

    assert with_shm(body, 2) == [2.0, 2.0]


def test_a_tensor_outlives_its_communicator(with_shm):
    def body(comm):
        with Communicator(comm.coor, backend="shm") as other:
            tensor = other.empty((LARGE,)).fill_(1)
            other.allreduce(tensor)
        comm.barrier()
        return tensor.sum().item()

    assert with_shm(body, 2) == [2.0 * LARGE] * 2
