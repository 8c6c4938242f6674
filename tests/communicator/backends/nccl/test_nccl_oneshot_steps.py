"""The steps of csrc/cuda/oneshot.cu, run on threads of the CPU (oneshot_on_cpu.h), without a GPU.

What it cannot show, the order in which a GPU sees memory, is for tests/gpu/test_oneshot.py.
test_nccl_oneshot_races.py runs them under ThreadSanitizer.
"""

import ctypes
import subprocess
import threading
import time

import pytest
import torch

from communicator import CommunicatorError, CommunicatorTimeout
from communicator.backends.nccl import oneshot
from communicator.backends.nccl.oneshot import Algorithm, KernelCall, Kernels, KernelState
from communicator.calls.dtypes import dtype_info
from tests.communicator.backends.nccl import oneshot_build

WAYS = list(Algorithm)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return Kernels(str(oneshot_build.compile_kernels(tmp_path_factory.mktemp("oneshot"))))


def test_what_cannot_be_made_leaves_no_memory(tmp_path):
    prelude = """
        #include <cstdio>
        #include "oneshot_on_cpu.h"
        static int num_freed;
        template <class... T> cudaError_t fail(T...) { return cudaErrorInvalidValue; }
        static cudaError_t note_free(void*) { return ++num_freed, cudaSuccess; }
    """
    main = """
        int main() {
            void* arena;
            oneshot_state* state;
            int codes[] = {oneshot_create(&arena), oneshot_state_create(&state)};
            std::printf("%d %d, %d freed", codes[0], codes[1], num_freed);
        }
    """
    failing = {
        r"\bcuda(Memset|HostGetDevicePointer)\(": "fail(",
        r"\bcudaFree(Host)?\(": "note_free(",
    }
    source = oneshot_build.replace(oneshot_build.source_for_cpu(), failing)
    program = oneshot_build.compile_source(prelude + source + main, tmp_path / "failing")
    assert subprocess.run([program], capture_output=True, text=True).stdout == "1 1, 2 freed"


class Ranks:
    """The arenas of some ranks in one process."""

    def __init__(self, kernels, world_size, timeout_s=30.0):
        self.kernels, self.world_size, self.timeout_s = kernels, world_size, timeout_s
        self.state, self.arenas = KernelState(kernels), []
        for _ in range(world_size):
            arena = ctypes.c_void_p()
            kernels.create(ctypes.byref(arena))
            self.arenas.append(arena.value)

    def launch(self, first, num_here, tensors, outs, way, blocks):
        call = KernelCall(
            struct_size=ctypes.sizeof(KernelCall), algorithm=way, world=self.world_size
        )
        call.first, call.num_here, call.blocks = first, num_here, blocks
        call.dtype, call.nbytes = dtype_info(tensors[0].dtype).number, tensors[0].nbytes
        call.timeout_ns, call.state = int(self.timeout_s * 1e9), self.state.address
        for rank in range(self.world_size):
            call.arena[rank] = self.arenas[rank]
            call.in_[rank], call.out[rank] = tensors[rank].data_ptr(), outs[rank].data_ptr()
        self.kernels.launch(ctypes.byref(call))

    def sum(self, tensors, way, blocks=2):
        self.launch(0, self.world_size, tensors, tensors, way, blocks)
        self.state.check(0)
        return tensors


def values(world_size, count, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator).to(dtype) for _ in range(world_size)]


def in_order(tensors):
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total.to(tensors[0].dtype)


@pytest.mark.parametrize("world_size", [2, 4, 6, 8])
@pytest.mark.parametrize("dtype", oneshot.DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_every_rank_gets_the_bits_of_the_sum_in_order_of_rank(kernels, world_size, dtype, way):
    ranks = Ranks(kernels, world_size)
    for count in (8, 1016):
        tensors = values(world_size, count, dtype, count)
        expected = in_order(tensors).view(torch.uint8)
        for found in ranks.sum(tensors, way):
            assert torch.equal(found.view(torch.uint8), expected)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_grids_may_change_from_call_to_call_while_numbers_wrap(kernels, way):
    ranks = Ranks(kernels, 2)
    for arena in ranks.arenas:
        kernels.reset(ctypes.c_void_p(arena), 0xFF)
    for turn, blocks in enumerate([1, 5, 2, 24, 1, 3]):
        tensors = values(2, 512, torch.float32, turn)
        expected = in_order(tensors)
        assert all(torch.equal(found, expected) for found in ranks.sum(tensors, way, blocks))


def test_ranks_that_run_at_their_own_pace_never_read_what_a_later_call_wrote(kernels):
    """Each rank launches alone, as processes do, one ahead of another where it can."""
    world_size, turns, count = 4, 40, 128
    ranks = Ranks(kernels, world_size)
    inputs = [values(world_size, count, torch.float32, turn) for turn in range(turns)]
    found = [[torch.zeros(count) for _ in range(world_size)] for _ in range(turns)]

    def run(rank):
        for turn in range(turns):
            way, blocks = WAYS[turn % 3 == 0], 1 + turn % 3
            ranks.launch(rank, 1, inputs[turn], found[turn], way, blocks)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranks.state.check(0)
    for turn in range(turns):
        expected = in_order(inputs[turn])
        assert all(torch.equal(out, expected) for out in found[turn]), turn


def test_a_rank_that_never_comes_is_named_and_later_calls_end_at_once(kernels):
    ranks = Ranks(kernels, 4, timeout_s=0.2)
    tensors = values(4, 64, torch.float32)
    before = [tensor.clone() for tensor in tensors]
    ranks.launch(0, 3, tensors, tensors, Algorithm.ONE_SHOT, 1)
    with pytest.raises(CommunicatorTimeout, match=r"of rank [012] timed out waiting for rank 3"):
        ranks.state.check(0)
    ranks.launch(0, 3, tensors, tensors, Algorithm.TWO_SHOT, 1)
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))


def test_a_launch_does_not_tell_what_failed_before_it(kernels):
    """CUDA keeps the last error of a thread, also when it was told."""
    with pytest.raises(CommunicatorError, match="one-shot import_ failed"):
        kernels.import_(bytes(oneshot.HANDLE_BYTES), ctypes.byref(ctypes.c_void_p()))
    tensors = [torch.ones(64), torch.ones(64)]
    assert [t.mean() for t in Ranks(kernels, 2).sum(tensors, Algorithm.ONE_SHOT)] == [2, 2]


def start(target, *arguments):
    thread = threading.Thread(target=target, args=arguments)
    thread.start()
    return thread


def wait_until_it_waits(ranks, rank):
    while not oneshot_build.is_in_kernel(ranks.arenas[rank]):
        time.sleep(0.001)


def test_an_abort_ends_a_kernel_that_waits_and_is_no_problem_of_its_own(kernels):
    """It waited for a dead peer until its own deadline."""
    ranks, tensors = Ranks(kernels, 2, timeout_s=600), values(2, 64, torch.float32)
    before = tensors[0].clone()
    waiting = start(ranks.launch, 0, 1, tensors, tensors, Algorithm.TWO_SHOT, 2)
    wait_until_it_waits(ranks, 0)
    assert waiting.is_alive()
    ranks.state.abort()
    waiting.join(60)
    assert not waiting.is_alive()
    ranks.state.check(0)
    ranks.launch(0, 1, tensors, tensors, Algorithm.ONE_SHOT, 1)  # and later ones return at once
    assert torch.equal(tensors[0], before)


def test_a_launch_that_overlaps_another_of_its_rank_is_noticed(kernels):
    """It took the same generation and buffer: both results were wrong, in silence."""
    ranks, tensors = Ranks(kernels, 2, timeout_s=600), values(2, 64, torch.float32)
    waiting = start(ranks.launch, 0, 1, tensors, tensors, Algorithm.ONE_SHOT, 2)
    wait_until_it_waits(ranks, 0)
    ranks.launch(0, 1, tensors, tensors, Algorithm.ONE_SHOT, 1)
    with pytest.raises(CommunicatorError, match="two one-shot sums of rank 0 ran at the same"):
        ranks.state.check(0)
    ranks.state.abort()
    waiting.join(60)
    assert not waiting.is_alive()


@pytest.mark.parametrize(
    "change",
    [
        {"state": None},
        {"blocks": 25},
        {"blocks": 0},
        {"first": 3},
        {"nbytes": 8},
        {"nbytes": 2**20},
        {"world": 3},
    ],
    ids=str,
)
def test_a_call_that_cannot_be_is_refused(kernels, change):
    call = KernelCall(
        struct_size=ctypes.sizeof(KernelCall), algorithm=1, dtype=7, world=4, num_here=2
    )
    call.blocks, call.nbytes = 1, 64
    call.state = (state := KernelState(kernels)).address
    for name, value in change.items():
        setattr(call, name, value)
    with pytest.raises(CommunicatorError, match="launch failed"):
        kernels.launch(ctypes.byref(call))
    state.close()
