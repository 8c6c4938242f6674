"""NCCL and the one-shot kernel on the GPU of this machine, several ranks sharing it.

    python -m benchmarks.gpu              # writes benchmarks/results/gpu-*.md
    python -m benchmarks.gpu calls lives  # some of the tables

Times of several ranks on one GPU say nothing about NVLink: a step costs a time slice, about 2 ms.
What counts here is what holds anywhere: the cost of a call, memory, and that nothing hangs.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.calls import FLOAT32, SUM, PyncclLike
from benchmarks.table import Table, alternate, spread
from communicator import Communicator
from communicator.backends.nccl import Nccl, nccl_library, oneshot
from communicator.backends.nccl.cupy import Cupy
from communicator.backends.nccl.oneshot import Algorithm
from communicator.errors import DrumlineError
from coordinator import Coordinator
from tests.gpu import cost_ranks, one_gpu
from tests.gpu.one_gpu import GPU
from tests.gpu.test_oneshot import Ranks, sort_places, values

ROOT = Path(__file__).parents[1]
CALLS, ROUNDS = 2000, 15
LIVES, LIVES_S = 1000, 120
CASE_S = int(os.environ.get("STEP_S", 250)) - 10  # for one case of several ranks
SANITIZERS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
SANITIZER_S = 200


def device_note() -> str:
    """The GPU, its driver, and the NCCL in use."""
    if GPU.type == "cpu":
        return "No GPU: a stand-in, whose times say nothing."
    query = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader"
    card = subprocess.getoutput(query).splitlines()[0]  # or why it cannot be asked
    found = nccl_library.find()
    return (
        f"GPU and driver: {torch.cuda.get_device_name(0)} ({card}). CUDA of torch: "
        f"{torch.version.cuda}. NCCL: {found.version_text}."
    )


# What a call costs from Python until it returns.


def ns_per_call(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    took = time.perf_counter_ns() - start
    torch.cuda.synchronize()
    return took / CALLS


def calls() -> Table:
    """One rank, allreduce in place of 1024 float32: NCCL has nothing to move, only the call."""
    table = Table("gpu-calls", ("call", "ns until it returns", "right", "ratio to ours"))
    table.note = device_note() + " One rank, in place, 1024 float32; median (middle half)."
    tensor = torch.ones(1024, device=GPU)
    with ExitStack() as stack:
        peers = dict(_peers(stack, stack.enter_context(Coordinator()), tensor))
        right = {name: _is_right(call, tensor) for name, call in peers.items()}
        found = alternate(
            {name: lambda c=call: ns_per_call(c) for name, call in peers.items()}, ROUNDS
        )
    ours = statistics.median(found["communicator, nccl, blocking"])
    for name, times in found.items():
        table.add(name, spread(times), right[name], statistics.median(times) / ours)
    return table


def _is_right(call: Callable[[], object], tensor: torch.Tensor) -> str:
    tensor.copy_(torch.arange(1024))
    call()
    return "yes" if bool((tensor.cpu() == torch.arange(1024)).all()) else "NO"


def _peers(
    stack: ExitStack, coor: Coordinator, tensor: torch.Tensor
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each way to make the call. What has to be closed lies on the stack."""
    blocking = stack.enter_context(Communicator._of(Nccl, coor, device=0, blocking=True))
    waiting = stack.enter_context(Communicator._of(Nccl, coor, device=0))
    yield "communicator, nccl, blocking", lambda: blocking.allreduce(tensor)
    yield "communicator, nccl", lambda: waiting.allreduce(tensor)
    scaled = blocking.scaled_sum(1.0, torch.float32)
    yield (
        "communicator, nccl, blocking, scaled (a kernel)",
        lambda: blocking.allreduce(tensor, scaled),
    )
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=GPU)
    stack.callback(dist.destroy_process_group)
    yield "torch.distributed.all_reduce", lambda: dist.all_reduce(tensor)
    yield "ctypes, as vLLM's pynccl", _through_ctypes(tensor)
    yield from _optional(stack, coor, tensor)


def _through_ctypes(tensor: torch.Tensor) -> Callable[[], object]:
    """The library through ctypes, every argument wrapped for each call."""
    nccl = ctypes.CDLL(nccl_library.find().path)

    class Id(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_byte * 128)]

    identifier, comm = Id(), ctypes.c_void_p()
    nccl.ncclGetUniqueId(ctypes.byref(identifier))
    assert nccl.ncclCommInitRank(ctypes.byref(comm), 1, identifier, 0) == 0

    like = PyncclLike(nccl.ncclAllReduce, GPU, lambda: torch.cuda.current_stream().cuda_stream)
    like.comm = comm
    return partial(like.all_reduce, tensor)


def _optional(
    stack: ExitStack, coor: Coordinator, tensor: torch.Tensor
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Those of cupy and nccl4py that are installed."""
    stream = torch.cuda.current_stream().cuda_stream
    at, count = tensor.data_ptr(), tensor.numel()
    try:
        through_cupy = stack.enter_context(Communicator._of(Cupy, coor, device=0))._comm
        yield (
            "cupy.cuda.nccl, addresses ready",
            lambda: through_cupy.allReduce(at, at, count, FLOAT32, SUM, stream),
        )
    except DrumlineError as reason:
        print(f"cupy is left out: {reason}", file=sys.stderr)
    try:
        import nccl.core as nccl4py

        theirs = nccl4py.Communicator.init(nranks=1, rank=0, unique_id=nccl4py.get_unique_id())
        yield (
            "nccl4py",
            lambda: theirs.allreduce(tensor, tensor, nccl4py.SUM, stream=stream),
        )
    except (ImportError, AttributeError, TypeError) as reason:
        print(f"nccl4py is left out: {reason}", file=sys.stderr)


# What several ranks show.


def worlds() -> Table:
    """What holds for 1, 2 and 4 ranks; a failure is in the row, not the end of the table."""
    table = Table("gpu-worlds", ("what", "ranks", "found", "must be", "holds"))
    table.note = device_note() + " Short cases first, conformance last."
    add = partial(_add, table)
    for ranks in (1, 2):
        add("MiB a graph of 65 allreduces", ranks, "graph_memory", max, "< 10")
        add("kernels in such a graph, if no copies", ranks, "captured_nodes", _kernels, "== 65")
        add("close() with a live graph refused", ranks, "close_with_a_live_graph", _refused, "== 1")
        add("abort() with a live graph, s", ranks, "abort_with_a_live_graph", max, "< 10")
    add("replayed and eager sums", 2, "capture_and_replay", lambda v: v[0][1], "== 16")
    add("killed peer, s until named", 2, "killed_peer", _seconds_if("rank 1"), "< 20")
    add("absent rank, s until freed", 2, "absent_rank", lambda v: v[0][1], "< 20")
    add("torch.compile, captured", 2, "compiled", lambda v: v[0][1], "== 5")
    for ranks in (2, 4):
        add("one-shot of processes, wrong sums", ranks, "oneshot_sums", _count, "== 0")
    absent = _seconds_if("waited in vain for rank 1")
    add("one-shot, absent rank, s until named", 2, "oneshot_absent_rank", absent, "< 10")
    for ranks in (1, 2, 4):
        add("conformance, cases passed", ranks, "conform", lambda v: v[0]["passed"], "> 50")
    return table


def _kernels(found: list[dict[str, int]]) -> float:
    wrong = [text for nodes in found if (text := one_gpu.wrong_nodes(nodes, 65))]
    return float("nan") if wrong else found[0]["kernel"]


def _refused(found: list[str]) -> int:
    return int(all("CUDA graph" in said for said in found))


def _count(found: list[list[str]]) -> int:
    return sum(map(len, found))


def _seconds_if(wanted: str) -> Callable[[list[Any]], float]:
    """How long rank 0 took, if what it said has this in it."""
    return lambda found: found[0][1] if wanted in found[0][0] else float("inf")


KILLED = {"killed_peer": -9}  # how the last rank of a case has to end


def _add(
    table: Table, what: str, ranks: int, case: str, pick: Callable[[Any], float], bound: str
) -> None:
    ended = one_gpu.finish(one_gpu.start(case, ranks), CASE_S)
    codes = [code for code, _ in ended]
    if codes != [0] * (ranks - 1) + [KILLED.get(case, 0)]:
        print("\n".join(text for _, text in ended), file=sys.stderr)
        table.add(what, ranks, "failed", bound, "NO")
        return
    found = pick([one_gpu.result_of(text) for code, text in ended if code == 0])
    sign, limit = bound.split()
    holds = {"<": found < float(limit), ">": found > float(limit), "==": found == float(limit)}
    table.add(what, ranks, float(found), bound, "yes" if holds[sign] else "NO")


def lives() -> Table:
    """What one life of a communicator of one rank leaves behind, over as many as there is time."""
    table = Table("gpu-lives", ("left behind by one life", "lives", "found", "limit", "is"))
    table.note = device_note() + " Once as it is, once with a leak of each kind planted in a life."
    _add_lives(table, "", LIVES, LIVES_S)
    _add_lives(table, "planted", 10, 60)
    return table


def _add_lives(table: Table, leak: str, times: int, seconds: int) -> None:
    started = one_gpu.start("create_and_destroy", 1, str(times), str(seconds), leak)
    ((code, text),) = one_gpu.finish(started, seconds + 60)
    if code:
        print(text, file=sys.stderr)
    left = one_gpu.result_of(text)
    too_much = one_gpu.leaks(left)
    for name, most in one_gpu.LEFT_BEHIND.items():
        verdict = "too much" if name in too_much else "fine"
        label = f"{name}, {leak}" if leak else name
        table.add(label, int(left["lives"]), float(left[name]), most, verdict)


# What two ranks show of costs: nothing here waits for a time slice but the models.


def _ranks(case: str, ranks: int, *arguments: str) -> list[Any]:
    """What each rank's case returned; its output if it failed."""
    ended = one_gpu.finish(one_gpu.start(case, ranks, *arguments), CASE_S)
    if any(code for code, _ in ended):
        print("\n".join(text for _, text in ended), file=sys.stderr)
        raise RuntimeError(f"{case} ended with {[code for code, _ in ended]}")
    return [one_gpu.result_of(text) for _, text in ended]


COSTS = ("call", "captured (ns)", "eager (ns)", "MiB a graph", "ms to capture it", "right")
COSTS_NOTE = (
    " 2 ranks, in place, 4096 bfloat16, until the call returns; a graph has 65 calls. Medians."
)


def costs() -> Table:
    """What a call of two ranks costs the host, and a graph of such calls the device."""
    table = Table("gpu-costs", (*COSTS, "captured / torch.distributed", "limit", "holds"))
    table.note = device_note() + COSTS_NOTE
    ways = _ranks("cost_ranks.call_costs", 2)[0]
    for way, (captured, eager, mib, ms, right) in ways.items():
        ratio = captured / ways[cost_ranks.THEIRS][0]
        limit = {cost_ranks.OURS: 1.0}.get(way, float("inf"))
        verdict = "yes" if ratio <= limit else "NO"
        table.add(way, captured, eager, mib, ms, "yes" if right else "NO", ratio, limit, verdict)
    return table


def vllm() -> Table:
    """The same of one-shot sums, SGLang's and vLLM's, if `make gpu-parts` was run."""
    table = Table("gpu-vllm", (*COSTS, "captured / vLLM's"), device_note() + COSTS_NOTE)
    table.note += (
        " vLLM's graph lacks the exchange of addresses without which it cannot be replayed."
    )
    ways = _ranks("cost_ranks.vllm_costs", 2)[0]
    *_, theirs = ways.values()
    for way, (*costs, right) in ways.items():
        table.add(way, *costs, "yes" if right else "NO", costs[0] / theirs[0])
    return table


def models() -> Table:
    """A model on one GPU, alone and split over two ranks; loading; hops."""
    from tests.gpu import model_ranks  # which needs transformers

    table = Table("gpu-models", ("what", "unit", "found", "right", "ratio to the first"))
    table.note = device_note() + f" Llama {model_ranks.BIG}, 2 ranks that share the GPU, greedy, "
    table.note += "batch 1. Two ranks on one GPU wait for each other's time slices."
    for case, unit in {"loading": "s", "hops": "us", "decoding": "tokens/s"}.items():
        with tempfile.TemporaryDirectory() as folder:
            found = _ranks(f"model_ranks.{case}", 2, folder)[0]
        first = next(iter(found.values()))[0]
        for what, (value, *extra) in found.items():
            right = {"decoding": "yes" if extra and extra[0] else "NO"}.get(case, "")
            table.add(what, unit, value, right, value / first)
    return table


# The one-shot kernel, all logical ranks in one launch.


def small() -> Table:
    """Microseconds a sum, replayed from a graph of dependent sums. No link between GPUs is used."""
    columns = (
        "ranks",
        "bytes",
        "way",
        "chosen",
        "us",
        "right",
        "torch.stack().sum(0), us",
        "ratio",
    )
    table = Table("gpu-oneshot", columns, device_note() + " All ranks in one launch on one GPU.")
    for world in (2, 4, 6, 8):
        for nbytes in (1 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10):
            for way in Algorithm:
                us, right, stack_us = _small(world, nbytes, way)
                chosen = oneshot.select_algorithm(world, nbytes, torch.bfloat16) == way
                row = world, nbytes, way.name, "yes" if chosen else "", us, right
                table.add(*row, stack_us, us / stack_us)
    return table


def _small(world: int, nbytes: int, way: Algorithm) -> tuple[float, str, float]:
    ranks, tensors = Ranks(world), values(world, nbytes, torch.bfloat16)
    expected = sort_places(tensors)
    outs = ranks.sum(tensors, way, outs=[torch.empty_like(tensor) for tensor in tensors])
    right = all(torch.equal(out, expected) for out in outs)
    us = _replayed_us(lambda: ranks.sum(tensors, way, outs=outs))
    ranks.state.check(0)
    ranks.close()
    return us, "yes" if right else "NO", _replayed_us(lambda: torch.stack(tensors).sum(0))


def _replayed_us(call: Callable[[], object]) -> float:
    """Microseconds of a call in a graph of a hundred."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            call()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    graph.reset()
    return start.elapsed_time(end) * 10


def sanitizer() -> Table:
    """The small tests of the kernel under compute-sanitizer."""
    table = Table("gpu-sanitizer", ("tool", "found"), device_note())
    places = os.pathsep.join([os.environ["PATH"], *SANITIZERS])
    command = shutil.which("compute-sanitizer", path=places)
    for tool in ("memcheck", "racecheck"):
        found = _sanitize(command, tool) if command else "compute-sanitizer is not on this machine"
        table.add(tool, found)
    return table


def _sanitize(command: str, tool: str) -> str:
    options = ["-o", "addopts=--import-mode=importlib", "-o", f"timeout={SANITIZER_S}"]
    options += ["-k", "small and 2"]
    tests = ["-m", "pytest", "-q", "-x", "tests/gpu/test_oneshot.py", *options]
    try:
        done = subprocess.run(
            [command, "--tool", tool, "--error-exitcode", "9", sys.executable, *tests],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=SANITIZER_S,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {SANITIZER_S} s"
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
    told = [line.strip("= ") for line in done.stdout.splitlines() if "SUMMARY" in line]
    passed = [line for line in done.stdout.splitlines() if " passed" in line]
    return "; ".join([f"exit {done.returncode}", *passed[-1:], *(told or ["no summary"])[-1:]])


TABLES = {
    "calls": calls,
    "costs": costs,
    "small": small,
    "models": models,
    "vllm": vllm,
    "sanitizer": sanitizer,
    "worlds": worlds,
    "lives": lives,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="all if none is named")
    failed = 0
    for name in parser.parse_args().tables or TABLES:
        if GPU.type == "cuda" and not torch.cuda.is_available():
            print(f"{name} is left out: {one_gpu.NEEDS_GPU}", file=sys.stderr)
            continue
        try:
            table = TABLES[name]()
            table.show()
            print(f"written to {table.save()}")
            if any("NO" in row for row in table.rows):
                failed = 1
                print(f"{name}: something does not hold", file=sys.stderr)
        except Exception as error:  # the other tables are worth having
            failed = 1
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
