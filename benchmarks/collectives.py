"""Collectives over shared memory, beside gloo and every MPI that is installed.

    python -m benchmarks.collectives
    python -m benchmarks.collectives -n 4 --sizes 8 65536

A peer is measured in the same processes as we are, in turns: what disturbs one disturbs the other.
Times are of one call from Python on rank 0, straight after barriers. Everything is warm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.libraries import ROWS, Call, Library, Ours, gloo, is_right, mpi, result
from benchmarks.mpi import engines
from benchmarks.table import Table, spread
from communicator import Communicator
from coordinator import Coordinator

SIZES = (8, 4 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20)
OPERATIONS = (
    "allreduce",
    "broadcast",
    "reduce",
    "allgather",
    "reduce_scatter",
    "alltoall",
    "there and back",
    "barrier",
)
MARK = "measured: "  # opens the lines that rank 0 prints for the process that started it


def repeats(nbytes: int, size: int) -> int:
    """Enough for a median, few enough that the slowest peer ends within seconds."""
    usual = 400 if nbytes <= 64 << 10 else 60 if nbytes <= 1 << 20 else 9
    return usual if size == 2 else max(usual // 4, 7)


def measure(comm: Communicator, calls: dict[str, Call], times: int) -> dict[str, list[float]]:
    """Microseconds of each call on this rank, in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(times + 2):
        for name, call in calls.items():
            comm.barrier()
            comm.barrier()  # the first may have woken a sleeper, who is late for what follows
            start = time.perf_counter_ns()
            call()
            took = time.perf_counter_ns() - start
            if number > 1:  # the first two make connections and touch memory
                found[name].append(took / 1000)
    return found


def floor_us(nbytes: int, comm: Communicator) -> float:
    """What the memory allows: all ranks at once read and write their own tensor once."""
    tensor = torch.zeros(max(nbytes // 4, 1))
    passes = measure(comm, {"pass": lambda: tensor.add_(1)}, 9)
    return statistics.median(passes["pass"])


def report(comm: Communicator, **facts: Any) -> None:
    if comm.rank == 0:
        print(MARK + json.dumps(facts), flush=True)


def be_rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with Coordinator() as coor, Communicator(coor, backend="shm") as comm:
        us = Ours("ours", comm, comm.rank, comm.world_size)
        peer = mpi(comm.rank, comm.world_size) if arguments.peer == "mpi" else gloo(coor)
        for operation in arguments.operations:
            for dtype_name in arguments.dtypes if operation == "allreduce" else ["float32"]:
                dtype = getattr(torch, dtype_name)
                if peer.name != "gloo" and dtype == torch.bfloat16:
                    continue  # numpy has no bfloat16
                for nbytes in arguments.sizes if operation != "barrier" else [8]:
                    compare(comm, [us, peer], operation, nbytes, dtype)
        if arguments.peer == "gloo":
            dist.destroy_process_group()


def compare(
    comm: Communicator, libraries: list[Library], operation: str, nbytes: int, dtype: torch.dtype
) -> None:
    size = comm.world_size
    nbytes = max(nbytes, size * dtype.itemsize) if operation in ROWS else nbytes
    calls = {}
    for library in libraries:  # on tensors of their own: what a peer has just read writes slower
        tensor = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
        tensor = tensor.view(size, -1) if operation in ROWS else tensor
        calls[library.name] = library.call(operation, tensor, result(operation, tensor, size))
    wrong = [
        library.name
        for library in libraries
        if not comm.coor.vote(is_right(library, operation, nbytes, dtype))
    ]
    times = measure(comm, calls, repeats(nbytes, comm.world_size))
    floor = floor_us(nbytes, comm) if nbytes >= 64 << 10 else None
    dtype_name = str(dtype).removeprefix("torch.")
    row = {"operation": operation, "dtype": dtype_name, "nbytes": nbytes}
    report(comm, **row, times=times, wrong=wrong, floor=floor)


def start(command: list[str], arguments: argparse.Namespace, peer: str) -> Iterator[dict[str, Any]]:
    """Run the ranks under a launcher, and give what rank 0 measures, as it does."""
    sizes = [str(nbytes) for nbytes in arguments.sizes]
    rank = ["-m", "benchmarks.collectives", "--peer", peer, "--sizes", *sizes]
    rank += ["--operations", *arguments.operations, "--dtypes", *arguments.dtypes]
    process = subprocess.Popen([*command, *rank], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        _, mark, facts = line.partition(MARK)
        if mark:
            yield json.loads(facts)
    if process.wait() != 0:
        sys.exit(f"the ranks beside {peer} failed with code {process.returncode}")


def commands(arguments: argparse.Namespace) -> list[tuple[list[str], str]]:
    """Who starts the ranks, and whom they are compared with."""
    count = ["-n", str(arguments.n)]
    found = [([sys.executable, "-m", "launcher", "run", *count], "gloo")]
    found += [([*engine, *count, sys.executable], "mpi") for engine in engines().values()]
    return found


COLUMNS = (
    "operation",
    "dtype",
    "bytes",
    "right",
    "floor (us)",
    "ours (us)",
    "ours / floor",
    "peer",
    "(us)",
    "ratio",
)


NOTE = (
    "Median and middle half of one call on rank 0, after barriers, each peer in turns with us in "
    "the same processes. floor: one pass of every rank over its own tensor, reading and writing. "
    "ratio: ours divided by the peer's."
)


def cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """What rank 0 measured, as a row of the table."""
    (_, ours), (peer, theirs) = row["times"].items()
    floor = "" if row["floor"] is None else row["floor"]
    right = f"wrong: {', '.join(row['wrong'])}" if row["wrong"] else "yes"
    right = "" if row["operation"] == "barrier" else right  # which has no result
    median = statistics.median(ours)
    distance = "" if row["floor"] is None else median / row["floor"]
    head = (row["operation"], row["dtype"], row["nbytes"], right, floor, spread(ours), distance)
    return *head, peer, spread(theirs), median / statistics.median(theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the tensor")
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--peer", help=argparse.SUPPRESS)  # given to the ranks
    arguments = parser.parse_args()
    if arguments.peer:
        return be_rank(arguments)
    table = Table(f"collectives-{arguments.n}-ranks", COLUMNS, NOTE, keep=arguments.save)
    for command, peer in commands(arguments):
        for row in start(command, arguments, peer):
            table.add(*cells(row))
    table.rows.sort(key=place)
    table.end()


def place(cells: tuple[Any, ...]) -> tuple[int, bool, int]:
    """Where a row stands: the peers of one call beside each other."""
    operation, dtype, nbytes, *_ = cells
    return OPERATIONS.index(operation), dtype != "float32", nbytes


if __name__ == "__main__":
    main()
