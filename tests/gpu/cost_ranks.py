"""What a call costs the host, and a graph the device, beside torch.distributed: several ranks."""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from communicator import Communicator, Unsupported
from communicator.backends.nccl.oneshot import HANDLE_BYTES, Kernels
from coordinator import Coordinator
from tests.gpu.one_gpu import GPU, ROOT
from tests.gpu.ranks import CALLS_PER_GRAPH, MIB, free_nbytes

ROUNDS, EAGER_CALLS, NUM_GRAPHS = 9, 20, 10
# With a limit: a captured call of ours takes no longer than one of theirs.
OURS, THEIRS = "communicator, blocking", "torch.distributed"
Call = Callable[[], object]
VLLM_LIBRARY = ROOT / ".gpu" / "libvllm_allreduce.so"  # by `make gpu-parts`
SGLANG_LIBRARY = ROOT / ".gpu" / "libsglang_allreduce.so"
MIDDLE = 1 << 20  # of an arena
ADDRESSES_NBYTES = 8 << 20


def call_costs(coor: Coordinator, nccl: Any) -> dict[str, list[float]]:
    """By way: ns a captured call, ns an eager one, MiB a graph of 65, ms to capture it; whether
    sums were right. Until the call returns, all ways in turns."""
    tensor = torch.ones(4096, dtype=torch.bfloat16, device=GPU)
    with ExitStack() as stack:
        return _costs(coor, tensor, _ways(stack, coor, nccl, tensor))


def vllm_costs(coor: Coordinator, nccl: Any) -> dict[str, list[float]]:
    """The same of one-shot sums, SGLang's, and vLLM's custom allreduce, which is not replayed: for
    that the ranks exchange, after the capture, the addresses that the graph uses."""
    tensor = torch.ones(4096, dtype=torch.bfloat16, device=GPU)
    with Communicator._of(nccl, coor, device=0, oneshot=True) as comm:
        ways = {"communicator, one-shot": lambda: comm.allreduce(tensor)}
        if SGLANG_LIBRARY.exists():
            ways["SGLang's one-shot push"] = _sglang_sum(coor, tensor)
        ways["vLLM's custom allreduce"] = _vllm_sum(coor, tensor)
        return _costs(coor, tensor, ways)


def _vllm_sum(coor: Coordinator, tensor: torch.Tensor) -> Call:
    """It has an arena of ours for its flags, and from the middle on for its buffer."""
    library = ctypes.CDLL(str(VLLM_LIBRARY))
    library.vllm_create.restype = ctypes.c_void_p
    arenas = _map_arenas(coor, Kernels())
    buffers = type(arenas)(*(at + MIDDLE for at in arenas))
    addresses = torch.empty(ADDRESSES_NBYTES, dtype=torch.uint8, device=GPU)
    place = ctypes.c_void_p(addresses.data_ptr()), ctypes.c_size_t(addresses.nbytes)
    peer = ctypes.c_void_p(library.vllm_create(arenas, *place, coor.rank, coor.world_size))
    library.vllm_register(peer, buffers)
    own, data = ctypes.c_void_p(buffers[coor.rank]), ctypes.c_void_p(tensor.data_ptr())

    def call(lives_as_long: torch.Tensor = addresses) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        library.vllm_sum(peer, own, data, tensor.numel(), stream)

    return call


def _sglang_sum(coor: Coordinator, tensor: torch.Tensor) -> Call:
    """It has an arena of ours for its counters, and from the middle on for its buffers."""
    library = ctypes.CDLL(str(SGLANG_LIBRARY))
    arenas = _map_arenas(coor, Kernels())
    buffers = type(arenas)(*(at + MIDDLE for at in arenas))
    own, data = ctypes.c_void_p(buffers[coor.rank]), ctypes.c_void_p(tensor.data_ptr())
    assert library.sglang_clear(own, ctypes.c_size_t(MIDDLE)) == 0
    coor.barrier()
    counters = ctypes.c_void_p(arenas[coor.rank])

    def call() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = library.sglang_sum(buffers, counters, data, data, tensor.numel(), coor.rank, stream)
        assert code == 0, code

    return call


def _map_arenas(coor: Coordinator, kernels: Any) -> ctypes.Array[ctypes.c_void_p]:
    """An arena of each rank, as addresses of this process."""
    arenas = (ctypes.c_void_p * coor.world_size)()
    own, handle = ctypes.c_void_p(), ctypes.create_string_buffer(HANDLE_BYTES)
    kernels.create(ctypes.byref(own))
    kernels.export(own, handle)
    for rank, other in enumerate(coor.allgather(handle.raw)):
        mapped = own if rank == coor.rank else ctypes.c_void_p()
        if rank != coor.rank:
            kernels.import_(other, ctypes.byref(mapped))
        arenas[rank] = mapped.value
    return arenas


def _costs(
    coor: Coordinator, tensor: torch.Tensor, ways: dict[str, Call]
) -> dict[str, list[float]]:
    right = {way: _is_right(call, tensor, coor) for way, call in ways.items()}
    times: dict[str, list[list[float]]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, call in ways.items():
            coor.barrier()
            times[way].append([_captured_ns(call), _eager_ns(call)])
    sizes = {way: _graph_size(coor, call) for way, call in ways.items()}
    medians = {
        way: [statistics.median(column) for column in zip(*rounds, strict=True)]
        for way, rounds in times.items()
    }
    return {way: [*medians[way], *sizes[way], right[way]] for way in ways}


def _ways(stack: ExitStack, coor: Coordinator, nccl: Any, tensor: torch.Tensor) -> dict[str, Call]:
    blocking = stack.enter_context(Communicator._of(nccl, coor, device=0, blocking=True))
    waiting = stack.enter_context(Communicator._of(nccl, coor, device=0))
    summing = {}
    try:
        small = stack.enter_context(Communicator._of(nccl, coor, device=0, oneshot=True))
        summing["communicator, one-shot"] = lambda: small.allreduce(tensor)
    except Unsupported as reason:  # on every rank
        print(f"one-shot sums are left out: {reason}")
    path = coor.broadcast_object(tempfile.mktemp() if coor.is_master() else None)
    store = dist.FileStore(path, coor.world_size)
    dist.init_process_group(
        "nccl", store=store, rank=coor.rank, world_size=coor.world_size, device_id=GPU
    )
    stack.callback(dist.destroy_process_group)
    return {
        OURS: lambda: blocking.allreduce(tensor),
        "communicator": lambda: waiting.allreduce(tensor),
        **summing,
        **_symmetric_memory(coor, tensor),
        THEIRS: lambda: dist.all_reduce(tensor),
    }


def _symmetric_memory(coor: Coordinator, tensor: torch.Tensor) -> dict[str, Call]:
    """torch's one-shot sum, which copies into memory that the ranks have mapped, in one kernel."""
    group, problem = dist.group.WORLD, ""
    try:
        buffer = symm_mem.empty(tensor.numel(), dtype=tensor.dtype, device=GPU)
        symm_mem.rendezvous(buffer, group)
    except (RuntimeError, AttributeError) as error:
        problem = str(error)
    if problems := [text for text in coor.allgather_object(problem) if text]:
        print(f"torch's symmetric memory is left out: {problems[0]}")
        return {}
    add, name = torch.ops.symm_mem.one_shot_all_reduce_copy_out, group.group_name
    return {"torch symm_mem, one-shot": lambda: add(buffer, tensor, "sum", name, tensor)}


def _is_right(call: Call, tensor: torch.Tensor, coor: Coordinator) -> float:
    """1.0 if a sum is right; its connections are made, too."""
    tensor.fill_(1)
    call()
    right = tensor.mean().item() == coor.world_size
    tensor.fill_(0)  # sums of it stay what they are
    return float(right)


def _capture(call: Call) -> tuple[torch.cuda.CUDAGraph, float]:
    """A graph of many calls, and the seconds of the calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        start = time.perf_counter()
        for _ in range(CALLS_PER_GRAPH):
            call()
        took_s = time.perf_counter() - start
    return graph, took_s


def _captured_ns(call: Call) -> float:
    graph, took_s = _capture(call)
    graph.reset()
    return took_s / CALLS_PER_GRAPH * 1e9


def _eager_ns(call: Call) -> float:
    start = time.perf_counter()
    for _ in range(EAGER_CALLS):
        call()
    took_s = time.perf_counter() - start
    torch.cuda.synchronize()
    return took_s / EAGER_CALLS * 1e9


def _graph_size(coor: Coordinator, call: Call) -> list[float]:
    """MiB of the device that a graph costs each rank, and ms that its capture takes in all."""
    first, _ = _capture(call)
    before, start = free_nbytes(coor), time.perf_counter()
    graphs = [_capture(call)[0] for _ in range(NUM_GRAPHS)]
    took_s = time.perf_counter() - start
    used = before - free_nbytes(coor)
    for graph in [first, *graphs]:
        graph.reset()
    return [used / MIB / NUM_GRAPHS / coor.world_size, took_s / NUM_GRAPHS * 1e3]
