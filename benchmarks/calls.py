"""What a call costs from Python until it is in C, beside ctypes and the ways of torch.

    python -m benchmarks.calls

The library that is called counts, and does nothing else; gloo with one rank has nothing to do.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from benchmarks.table import Table, alternate, spread
from communicator import Communicator
from coordinator import Coordinator

ROOT = Path(__file__).parents[1]
CALLS, AT_ONCE = 20_000, 100
FLOAT32, SUM = 7, 0  # as NCCL numbers them
SOURCE = """
static long calls;
#define RESULT (calls++, COMM_OK)
#include "abi_plugin.c"
long counted(void) { return calls; }
int plain(void* a, void* b, unsigned long n, int d, int o, void* c, void* s) {
    (void)a, (void)b, (void)n, (void)d, (void)o, (void)c, (void)s;
    return calls++, 0;
}
"""
COLUMNS = ("call", "right", "drumline (ns)", "peer", "(ns)", "ratio")
NOTE = (
    "An allreduce of 1024 float32 on the CPU by one rank; processor time of a call, median and "
    "middle half of rounds in which all take turns. right: every call has reached the library. "
    "drumline: comm.allreduce, as vendors' libraries are called. new tensors: none was ever passed "
    "before; making them is not timed."
)
OURS, CTYPES, NEW = "drumline", "ctypes, as vLLM's pynccl", "allreduce of new tensors"
Call = Callable[[torch.Tensor], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    arguments = parser.parse_args()
    table = Table("calls", COLUMNS, NOTE, keep=arguments.save)
    with ExitStack() as stack:
        measure(stack, table, arguments.repeats)
    table.end()


def measure(stack: ExitStack, table: Table, repeats: int) -> None:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    path = compiled(folder)
    counting, tensor = ctypes.CDLL(str(path)), torch.ones(1024)
    coor = stack.enter_context(Coordinator())
    ours = stack.enter_context(Communicator(coor, backend=str(path))).allreduce
    calls = {OURS: ours, **dict(peers(counting)), **dict(gloo(stack))}
    cases = {("allreduce", name): partial(ns, call, tensor) for name, call in calls.items()}
    new = {(NEW, name): partial(ns_of_new, calls[name], tensor) for name in (OURS, CTYPES)}
    times = alternate({**cases, **new}, repeats)
    for (what, name), theirs in times.items():
        if name == OURS:
            mine = theirs
            continue
        right = arrive(counting, ours, tensor) and arrive(counting, calls[name], tensor)
        says = "" if name.startswith("torch.distributed") else "yes" if right else "NO"
        ratio = statistics.median(mine) / statistics.median(theirs)
        table.add(what, says, spread(mine), name, spread(theirs), ratio)


def compiled(folder: Path) -> Path:
    source, built = folder / "counting.c", folder / "libcounting.so"
    source.write_text(SOURCE)
    where = [f"-I{ROOT / 'csrc' / 'abi'}", f"-I{ROOT / 'tests' / 'communicator' / 'native'}"]
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", *where, source, "-o", built], check=True)
    return built


def peers(counting: ctypes.CDLL) -> Iterator[tuple[str, Call]]:
    """Other ways into the same library."""
    like = PyncclLike(counting.plain, torch.device("cpu"), lambda: 0)
    yield CTYPES, like.all_reduce

    @torch.library.custom_op("benchmarks::allreduce", mutates_args=("tensor",))
    def op(tensor: torch.Tensor) -> None:
        like.all_reduce(tensor)

    yield "torch.library.custom_op around that", op


def gloo(stack: ExitStack) -> Iterator[tuple[str, Call]]:
    """A call of torch.distributed, which has a library of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)
    yield "torch.distributed.all_reduce, gloo", dist.all_reduce


def arrive(counting: ctypes.CDLL, call: Call, tensor: torch.Tensor) -> bool:
    before = counting.counted()
    for _ in range(3):
        call(tensor)
    return bool(counting.counted() == before + 3)


def ns(call: Call, tensor: torch.Tensor) -> float:
    """Of this thread's processor time: nothing here waits, and others may use the machine."""
    start = time.thread_time_ns()
    for _ in range(CALLS):
        call(tensor)
    return (time.thread_time_ns() - start) / CALLS


def ns_of_new(call: Call, tensor: torch.Tensor) -> float:
    """The same where every call has a tensor of its own."""
    took = 0
    for _ in range(0, CALLS, AT_ONCE):
        tensors = [tensor.detach() for _ in range(AT_ONCE)]
        start = time.thread_time_ns()
        for each in tensors:
            call(each)
        took += time.thread_time_ns() - start
    return took / CALLS


class PyncclLike:
    """What vLLM's pynccl does for a call in place, in two layers: look, find the numbers of dtype
    and operation, wrap, call, check."""

    def __init__(self, function: Any, device: torch.device, stream: Callable[[], int]) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        function.argtypes = [pointer, pointer, ctypes.c_size_t, integer, integer, pointer, pointer]
        function.restype = ctypes.c_int
        self.functions, self.device, self.stream = {"ncclAllReduce": function}, device, stream
        self.comm, self.disabled = pointer(0), False

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> None:
        if self.disabled:
            return
        assert tensor.device == self.device, f"{tensor.device} is not {self.device}"
        self.call(
            ctypes.c_void_p(tensor.data_ptr()),
            ctypes.c_void_p(tensor.data_ptr()),
            tensor.numel(),
            self.kind_of(tensor.dtype),
            self.number_of(op),
            self.comm,
            ctypes.c_void_p(self.stream()),
        )

    def call(self, *arguments: Any) -> None:
        self.check(self.functions["ncclAllReduce"](*arguments))

    def check(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"NCCL error {code}")

    @classmethod
    def kind_of(cls, dtype: torch.dtype) -> int:
        if dtype == torch.int8:
            return 0
        if dtype == torch.uint8:
            return 1
        if dtype == torch.int32:
            return 2
        if dtype == torch.int64:
            return 4
        if dtype == torch.float16:
            return 6
        if dtype == torch.float32:
            return FLOAT32
        raise ValueError(f"unsupported dtype {dtype}")

    @classmethod
    def number_of(cls, op: ReduceOp) -> int:
        if op == ReduceOp.SUM:
            return SUM
        raise ValueError(f"unsupported op {op}")


if __name__ == "__main__":
    main()
