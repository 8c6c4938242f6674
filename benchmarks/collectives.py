"""Collectives over shared memory, beside gloo and every MPI that is installed.

    python -m benchmarks.collectives
    python -m benchmarks.collectives -n 4 --sizes 8 65536

A peer is measured in the same processes as we are, in turns of a few calls: what disturbs one
disturbs the other, and neither is timed while the threads of the other still run. Times are of one
call from Python on rank 0, straight after barriers. Everything is warm.

Only on a machine that does nothing else: where ranks outnumber cores, they give their core away to
whoever wants it. 8 bytes of 4 ranks on 2 cores, beside gloo, took 9 us, and 100 us with a process
that kept one of the cores busy.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.floor import EXCHANGE, SHARED, Floor, compiled
from benchmarks.libraries import Ours, gloo, is_right
from benchmarks.mpi import engines
from benchmarks.mpi_library import ROWS, Call, Library, mpi, result
from benchmarks.oneccl import SETTINGS, oneccl, shim
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
WARM, TURN = 2, 10
# What allreduce of two ranks may take, in parts of a peer's time, up to so many bytes.
AT_MOST = {
    "gloo": {16 << 10: 1 / 100, 64 << 10: 1 / 25, 1 << 20: 1 / 6, 64 << 20: 1 / 3.5},
    "an MPI": {64 << 10: 0.7, 1 << 20: 0.8, 64 << 20: 0.4},
}
MARK = "measured: "  # opens the lines that rank 0 prints for the process that started it


def repeats(nbytes: int, size: int) -> int:
    """Enough for a median, few enough that the slowest peer ends within seconds."""
    usual = 200 if nbytes <= 64 << 10 else 60 if nbytes <= 1 << 20 else 6
    return usual if size == 2 else max(usual // 4, 6)


def measure(comm: Communicator, calls: dict[str, Call], times: int) -> dict[str, list[float]]:
    """Microseconds of each call on this rank, in turns: TURN that count after WARM that do not."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    turn = min(TURN, -(-times // 3))
    for _ in range(-(-times // turn)):
        for name, call in calls.items():
            took = [timed(comm, call) for _ in range(WARM + turn)]
            found[name] += took[WARM:]
    return found


def timed(comm: Communicator, call: Call) -> float:
    comm.barrier()
    comm.barrier()  # the first may have woken a sleeper, who is late for what follows
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1000


def report(comm: Communicator, **facts: Any) -> None:
    if comm.rank == 0:
        print(MARK + json.dumps(facts), flush=True)


def be_rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with Coordinator() as coor, Communicator(coor, backend="shm") as comm:
        floor = Floor(comm, arguments.exchange)
        us = Ours("drumline", comm, comm.rank, comm.world_size)
        peer = opened(arguments, comm)
        for operation in [
            one for one in arguments.operations if one in (peer.operations or OPERATIONS)
        ]:
            dtypes = arguments.dtypes if operation == "allreduce" else ["float32"]
            for dtype in [one for one in dtypes if one in (peer.dtypes or dtypes)]:
                for nbytes in arguments.sizes if operation != "barrier" else [8]:
                    compare(comm, floor, [us, peer], operation, nbytes, getattr(torch, dtype))
        if arguments.peer == "gloo":
            dist.destroy_process_group()


def opened(arguments: argparse.Namespace, comm: Communicator) -> Library:
    if arguments.peer == "oneccl":
        return oneccl(comm, arguments.shim)
    return mpi(comm.rank, comm.world_size) if arguments.peer == "mpi" else gloo(comm.coor)


def compare(
    comm: Communicator,
    floor: Floor,
    libraries: list[Library],
    operation: str,
    nbytes: int,
    dtype: torch.dtype,
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
        if not comm.coor.all_true(is_right(library, operation, nbytes, dtype))
    ]
    times = measure(comm, calls, repeats(nbytes, comm.world_size))
    least = floor.us(operation, nbytes)
    dtype_name = str(dtype).removeprefix("torch.")
    row = {"operation": operation, "dtype": dtype_name, "nbytes": nbytes}
    report(comm, **row, times=times, wrong=wrong, floor=least)


def start(
    command: list[str], arguments: argparse.Namespace, given: list[str]
) -> Iterator[dict[str, Any]]:
    """Run the ranks under a launcher, and give what rank 0 measures, as it does."""
    sizes = [str(nbytes) for nbytes in arguments.sizes]
    rank = ["-m", "benchmarks.collectives", *given, "--sizes", *sizes]
    rank += ["--operations", *arguments.operations, "--dtypes", *arguments.dtypes]
    yield from from_rank_0([*command, *rank])


def from_rank_0(command: list[str], environ: dict[str, str] | None = None) -> Iterator[Any]:
    """What rank 0 of a command measures, as it does."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            _, mark, facts = line.partition(MARK)
            if mark:
                yield json.loads(facts)
    if process.returncode != 0:
        sys.exit(f"{shlex.join(command)} failed with code {process.returncode}")


def commands(arguments: argparse.Namespace, folder: str) -> list[tuple[list[str], list[str]]]:
    """Who starts the ranks, and with what they are given: whom they are compared with."""
    count, intel = ["-n", str(arguments.n)], engines().get("Intel MPI")
    found = [([sys.executable, "-m", "launcher", "run", *count], ["--peer", "gloo"])]
    found += [([*one, *count, sys.executable], ["--peer", "mpi"]) for one in engines().values()]
    if intel and (path := shim(folder)):
        command = ["env", *SETTINGS, *intel, *count, sys.executable]
        found.append((command, ["--peer", "oneccl", "--shim", str(path)]))
    exchange = compiled(EXCHANGE, folder, *SHARED)
    return [(command, [*given, "--exchange", str(exchange)]) for command, given in found]


COLUMNS = (
    "operation",
    "dtype",
    "bytes",
    "right",
    "floor (us)",
    "drumline (us)",
    "distance",
    "peer",
    "(us)",
    "at most",
    "held",
    "ratio",
)


NOTE = (
    "Median and middle half of one call on rank 0, after barriers. Each peer is in the same "
    f"processes as we are and takes turns with us: {TURN} calls that count, fewer where a call "
    f"takes long, after {WARM} that do not. floor: the time in which every rank tells the next "
    "that its bytes are there and reads, out of the caches, as many bytes as the operation makes a "
    "rank take in; above 1 MiB at least one pass of every rank over its own tensor, reading and "
    "writing. distance: ours divided by the floor. ratio: ours divided by the peer's; at most: "
    "what was asked of it; floor alone: the floor divided by the peer's."
)


def cells(row: dict[str, Any], ranks: int) -> tuple[Any, ...]:
    """What rank 0 measured, as a row of the table."""
    (_, ours), (peer, theirs) = row["times"].items()
    right = f"wrong: {', '.join(row['wrong'])}" if row["wrong"] else "yes"
    right = "" if row["operation"] == "barrier" else right  # which has no result
    median, their_median = statistics.median(ours), statistics.median(theirs)
    ratio, limit = median / their_median, at_most(row, ranks, peer)
    verdict = "" if limit is None else held(ratio, row["floor"] / their_median, limit)
    head = (row["operation"], row["dtype"], row["nbytes"], right, row["floor"], spread(ours))
    beside = (peer, spread(theirs), "" if limit is None else limit, verdict, ratio)
    return *head, median / row["floor"], *beside


def at_most(row: dict[str, Any], ranks: int, peer: str) -> float | None:
    if (row["operation"], row["dtype"], ranks) != ("allreduce", "float32", 2):
        return None
    limits = AT_MOST["gloo" if peer == "gloo" else "an MPI"]
    return next((limit for nbytes, limit in limits.items() if row["nbytes"] <= nbytes), None)


def held(ratio: float, floor_ratio: float, limit: float) -> str:
    """Whether the limit is held, or what the floor alone would come to where that is beyond it."""
    if ratio <= limit:
        return "yes"
    return f"no, floor alone {floor_ratio:.3g}" if floor_ratio > limit else "no"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the tensor")
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--peer", help=argparse.SUPPRESS)  # given to the ranks
    parser.add_argument("--exchange", help=argparse.SUPPRESS)
    parser.add_argument("--shim", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        return be_rank(arguments)
    table = Table(f"collectives-{arguments.n}-ranks", COLUMNS, NOTE, keep=arguments.save)
    with tempfile.TemporaryDirectory() as folder:
        for command, given in commands(arguments, folder):
            for row in start(command, arguments, given):
                table.add(*cells(row, arguments.n))
    table.rows.sort(key=place)
    table.end()


def place(cells: tuple[Any, ...]) -> tuple[int, bool, int]:
    """Where a row stands: the peers of one call beside each other."""
    operation, dtype, nbytes, *_ = cells
    return OPERATIONS.index(operation), dtype != "float32", nbytes


if __name__ == "__main__":
    main()
