"""What shared memory must reach on two cores, in numbers of its own; beside peers: collectives.py.

    python -m benchmarks.shm_limits

Calls from Python are timed on rank 0, straight after barriers; everything is warm. A busy machine
shows in the middle halves: only an idle one can be held to the limits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from typing import Any

import torch

from benchmarks.collectives import MARK, measure, report
from benchmarks.floor import ROOT, compiled
from benchmarks.table import Table, spread
from communicator import Communicator, _native
from communicator.backends.shm import Shm
from coordinator import Coordinator

ALLREDUCE_US = {2: 1.2, 4: 40.0, 8: 100.0}  # of 8 bytes, from Python, by ranks
BARRIER_US = 1.2
THERE_AND_BACK_US = 15.0  # of 8 KiB
BACK_TO_BACK_US = 10.0  # of 4 ranks, from C
BURNT_MS = 10.0  # of CPU time, in a second of waiting
CALL_NS = 250.0
ELEMENTS = (8 << 10, 16 << 10, 256 << 10, 4 << 20)
LARGE = 64 << 20
COLUMNS = ("what", "ranks", "unit", "found", "at most", "found / at most")


def be_rank() -> None:
    torch.set_num_threads(1)
    with Coordinator() as coor, Communicator(coor, backend="shm") as comm:
        size = comm.world_size
        word = torch.zeros(2)
        found = measure(comm, {"allreduce": lambda: comm.allreduce(word)}, 400)["allreduce"]
        say(comm, "allreduce of 8 bytes, from Python", "us", found, ALLREDUCE_US[size])
        burnt = waiting_ms(comm)
        if size == 2:
            say_pair(comm)
        say(comm, "CPU time of all that wait a second", "ms", burnt, BURNT_MS * (size - 1))


def say(comm: Communicator, what: str, unit: str, found: list[float], limit: float | None) -> None:
    report(comm, what=what, ranks=comm.world_size, unit=unit, found=found, limit=limit)


def say_pair(comm: Communicator) -> None:
    say(comm, "barrier, from Python", "us", measure(comm, {"": comm.barrier}, 400)[""], BARRIER_US)
    letter = torch.zeros(2 << 10)
    found = measure(comm, {"": lambda: there_and_back(comm, letter)}, 400)[""]
    say(comm, "8 KiB there and back, from Python", "us", found, THERE_AND_BACK_US)
    for count in ELEMENTS:
        narrow, wide = torch.zeros(count, dtype=torch.bfloat16), torch.zeros(count)
        calls = {
            "narrow": lambda t=narrow: comm.allreduce(t),
            "wide": lambda t=wide: comm.allreduce(t),
        }
        times = measure(comm, calls, 200 if count < 1 << 20 else 15)
        ratios = [a / b for a, b in zip(times["narrow"], times["wide"], strict=True)]
        say(comm, f"bfloat16 / float32, allreduce of {count} elements", "", ratios, 1.0)
    large = torch.zeros(LARGE // 4)
    calls = {"drumline": lambda: comm.allreduce(large), "floor": lambda: large.add_(1)}
    times = measure(comm, calls, 15)
    ratios = [a / b for a, b in zip(times["drumline"], times["floor"], strict=True)]
    say(comm, "allreduce of 64 MiB / one pass of each rank over its own", "", ratios, None)


def there_and_back(comm: Communicator, letter: torch.Tensor) -> None:
    if comm.rank == 0:
        comm.send(letter, 1)
        comm.recv(letter, 1)
    else:
        comm.recv(letter, 0)
        comm.send(letter, 0)


def waiting_ms(comm: Communicator) -> list[float]:
    """Milliseconds of CPU that the ranks spend while they wait a second for the last, together."""
    comm.barrier()
    if comm.rank == comm.world_size - 1:
        time.sleep(1)
        start = time.process_time()
    else:
        start = time.process_time()
        comm.barrier()
    used = torch.tensor([1000 * (time.process_time() - start)])
    if comm.rank == comm.world_size - 1:
        comm.barrier()
    return [float(comm.allreduce(used))]


def from_ranks(size: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "launcher", "run", "-n", str(size)]
    command += ["-m", "benchmarks.shm_limits", "--rank"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
    return [json.loads(line) for line in lines]


def back_to_back(folder: str, size: int) -> list[float]:
    program = compiled(ROOT / "benchmarks" / "back_to_back.c", folder)
    command = [program, Shm.path, str(size), "8", "20000"]
    runs = [subprocess.run(command, stdout=subprocess.PIPE, check=True) for _ in range(5)]
    return [float(run.stdout) for run in runs]


class Pair:
    """The Coordinator of two ranks, as far as a library that does nothing can tell."""

    def allgather(self, data: bytes) -> list[bytes]:
        return [data, data]

    def barrier(self) -> None:
        pass


def call_ns(folder: str) -> list[float]:
    """Nanoseconds of comm.allreduce(tensor), of which the library takes none."""
    source = ROOT / "tests" / "communicator" / "native" / "abi_plugin.c"
    path = compiled(source, folder, "-std=c11", "-shared", "-fPIC")
    call = _native.open(str(path)).init(0, 2, Pair()).allreduce
    times = timeit.Timer("call(tensor)", globals={"call": call, "tensor": torch.ones(2)})
    return [1e9 * took / 10_000 for took in times.repeat(30, 10_000)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return be_rank()
    table = Table(
        "shm-limits",
        COLUMNS,
        "Median and middle half, and the limit it is held to on two idle cores.",
        keep=arguments.save,
    )
    for size in ALLREDUCE_US:
        for row in from_ranks(size):
            add(table, row["what"], size, row["unit"], row["found"], row["limit"])
    with tempfile.TemporaryDirectory() as folder:
        what = "allreduce of 8 bytes, back to back in C"
        add(table, what, 4, "us", back_to_back(folder, 4), BACK_TO_BACK_US)
        add(table, "a call of a library that does nothing", 1, "ns", call_ns(folder), CALL_NS)
    table.end()


def add(
    table: Table, what: str, size: int, unit: str, found: list[float], limit: float | None
) -> None:
    ratio = "" if limit is None else statistics.median(found) / limit
    table.add(what, size, unit, spread(found), "" if limit is None else limit, ratio)


if __name__ == "__main__":
    main()
