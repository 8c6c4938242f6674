"""The one-shot kernel on one GPU: every logical rank is a row of blocks of one launch.

compute-sanitizer runs this file too, with -k small (see benchmarks/gpu.py).
"""

import ctypes
import itertools
import os

import pytest
import torch

import launcher
from communicator import CommunicatorTimeout
from communicator.backends.nccl import oneshot
from communicator.backends.nccl.oneshot import (
    Algorithm,
    KernelCall,
    Kernels,
    KernelState,
    num_blocks,
)
from communicator.calls.dtypes import dtype_info
from tests.gpu import between_gpus
from tests.gpu.one_gpu import finish, needs_gpu, needs_two_gpus, result_of, run, start

pytestmark = [
    needs_gpu,
    pytest.mark.skipif(
        not os.path.exists(oneshot.LIBRARY),
        reason="needs the kernel: run csrc/scripts/build_cuda.sh on a machine with nvcc",
    ),
]

WORLDS = [2, 4, 6, 8]
SIZES = [16, 1008, 16_384, 65_536 + 16, 262_144, 524_288]
WAYS = list(Algorithm)


class Ranks:
    """Logical ranks in one process: an arena each, one launch for all."""

    def __init__(self, world_size, timeout_s=10.0):
        self.kernels = Kernels()
        self.state = KernelState(self.kernels)
        self.world_size = world_size
        self.call = KernelCall(
            struct_size=ctypes.sizeof(KernelCall), world=world_size, num_here=world_size
        )
        self.call.state, self.call.timeout_ns = self.state.address, int(timeout_s * 1e9)
        for rank in range(world_size):
            arena = ctypes.c_void_p()
            self.kernels.create(ctypes.byref(arena))
            self.call.arena[rank] = arena.value

    def sum(self, tensors, way, blocks=None, outs=None):
        """Enqueue the sum of the tensors into each of outs, or in place."""
        call, outs = self.call, outs or tensors
        call.algorithm, call.dtype, call.nbytes = (
            way,
            dtype_info(tensors[0].dtype).number,
            tensors[0].nbytes,
        )
        call.blocks = blocks or num_blocks(self.world_size, tensors[0].nbytes, way)
        for rank, (tensor, out) in enumerate(zip(tensors, outs, strict=True)):
            call.in_[rank], call.out[rank] = tensor.data_ptr(), out.data_ptr()
        call.stream = torch.cuda.current_stream().cuda_stream
        self.kernels.launch(ctypes.byref(call))
        return outs

    def reset(self, byte):
        for rank in range(self.world_size):
            self.kernels.reset(ctypes.c_void_p(self.call.arena[rank]), byte)

    def close(self):
        torch.cuda.synchronize()
        for rank in range(self.world_size):
            self.kernels.destroy(ctypes.c_void_p(self.call.arena[rank]))
        self.state.close()


@pytest.fixture
def ranks(request):
    made = Ranks(request.param)
    yield made
    made.close()


def values(world_size, nbytes, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (world_size, nbytes // dtype.itemsize)
    return list(torch.randn(shape, generator=generator, device="cuda").to(dtype))


def sort_places(tensors):
    """Rank 0 first, in 32 bits, rounded once."""
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return total.to(tensors[0].dtype)


def bits(tensor):
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("ranks", WORLDS, indirect=True)
@pytest.mark.parametrize("dtype", oneshot.DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_sums_of_every_size_have_the_bits_of_the_sum_in_order_of_rank(ranks, dtype, way):
    for seed, nbytes in enumerate(SIZES):
        tensors = values(ranks.world_size, nbytes, dtype, seed)
        expected = bits(sort_places(tensors))
        for found in ranks.sum(tensors, way):
            assert torch.equal(bits(found), expected), (nbytes, seed)
    ranks.state.check(0)


@pytest.mark.parametrize("ranks", WORLDS, indirect=True)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_small_sums_again_and_again_with_changing_grids(ranks, way):
    """The next call may have another grid, and numbers may wrap in between."""
    ranks.reset(0xFF)
    for turn, blocks in enumerate(itertools.islice(itertools.cycle([1, 3, 24, 2, 7]), 40)):
        tensors = values(ranks.world_size, 4096, torch.float32, turn)
        expected = sort_places(tensors)
        for found in ranks.sum(tensors, way, blocks):
            assert torch.equal(found, expected), turn
    ranks.state.check(0)


@pytest.mark.parametrize("ranks", [2, 8], indirect=True)
def test_a_hundred_thousand_calls_stay_right(ranks):
    tensors = [torch.ones(1024, device="cuda") for _ in range(ranks.world_size)]
    outs = [torch.empty_like(tensor) for tensor in tensors]
    for turn in range(100_000):
        way = WAYS[turn % 2]
        ranks.sum(tensors, way, blocks=1 + turn % 3, outs=outs)
        if turn % 10_000 == 9_999:
            assert all(bool((out == ranks.world_size).all()) for out in outs), turn
    ranks.state.check(0)


@pytest.mark.parametrize("ranks", [4], indirect=True)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_nan_infinities_and_both_zeros_add_up_as_in_torch(ranks, way):
    odd = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e38, -1e38, 1e-45])
    tensors = [odd.roll(rank).repeat(8).cuda() for rank in range(4)]
    expected = sort_places(tensors)
    for found in ranks.sum(tensors, way):
        same = (found == expected) | (found.isnan() & expected.isnan())
        assert bool(same.all())
        assert torch.equal(found.signbit() | found.isnan(), expected.signbit() | expected.isnan())


@pytest.mark.parametrize("ranks", [4], indirect=True)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_captured_sums_replay(ranks, way):
    tensors = [torch.ones(4096, device="cuda") for _ in range(4)]
    ranks.sum([tensor.clone() for tensor in tensors], way)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ranks.sum(tensors, way)
        ranks.sum(tensors, way)
    assert [tensor.mean().item() for tensor in tensors] == [1.0] * 4
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert [tensor.mean().item() for tensor in tensors] == [4.0**4] * 4
    graph.reset()


def test_a_rank_that_never_comes_is_reported_and_the_gpu_goes_on():
    ranks = Ranks(4, timeout_s=0.2)
    tensors = values(4, 4096, torch.float32)
    ranks.call.num_here = 3
    ranks.sum(tensors, Algorithm.ONE_SHOT)
    torch.cuda.synchronize()
    with pytest.raises(CommunicatorTimeout, match="timed out waiting for rank 3"):
        ranks.state.check(0)
    assert torch.ones(3, device="cuda").sum().item() == 3
    ranks.close()


@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_between_processes_have_the_bits_of_the_sum_in_order_of_rank(world_size):
    assert run("oneshot_sums", world_size) == [[]] * world_size


def test_a_process_that_makes_no_sum_is_named_and_the_gpu_goes_on():
    (said, took_s, after), _ = run("oneshot_absent_rank", 2)
    assert "timed out waiting for rank 1" in said
    assert took_s < 10 and after == 3


def test_a_process_that_replays_no_sum_is_named_by_check():
    said, _ = run("oneshot_replay_alone", 2)
    assert "timed out waiting for rank 1" in said


def test_a_process_that_is_killed_during_replays_is_named_by_check():
    ended = finish(start("killed_in_replay", 2, "oneshot"))
    assert ended[0][0] == 0, ended[0][1]
    said, took_s, after = result_of(ended[0][1])
    assert "rank 1" in said and took_s < 20 and after == 3


def test_sums_of_processes_on_two_streams_follow_each_other():
    assert run("oneshot_on_two_streams", 2) == [[2.0] * 20] * 2


def test_no_process_closes_while_a_graph_of_one_holds_a_sum():
    for said in run("oneshot_close_with_a_live_graph", 2):
        assert "are alive (1 on rank 0)" in said


@needs_two_gpus
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_sums_between_gpus_agree_with_nccl(world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs a machine with {world_size} GPUs")
    assert launcher.launch(between_gpus.agree_with_nccl, world_size) == [True] * world_size
