"""The ranks of an MPI between hosts, for benchmarks.network; imports no torch, which takes long.

    mpiexec -n 4 ... python -m benchmarks.network_mpi allreduce:65536:5 broadcast:8:7

Each cell is an operation, its bytes, and how often it is timed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.mpi_library import ROWS, Call, Library, gives_answer, mpi, result

LEAD_S = 0.003  # until all ranks begin
MARK = "measured: "  # opens the lines that rank 0 prints for the process that started it


class Cell(NamedTuple):
    operation: str
    nbytes: int
    repeats: int

    @classmethod
    def read(cls, text: str) -> Cell:
        operation, nbytes, repeats = text.split(":")
        return cls(operation, int(nbytes), int(repeats))

    def __str__(self) -> str:
        return f"{self.operation}:{self.nbytes}:{self.repeats}"


class World(NamedTuple):
    """How the ranks tell each other numbers: rank 0's to all, and each one's to all."""

    broadcast: Callable[[Any], Any]
    allgather: Callable[[Any], list[Any]]

    def timed(self, call: Call) -> float:
        """Milliseconds from when all ranks begin until the last has its result."""
        begins_at = self.broadcast(time.monotonic() + LEAD_S)  # one clock for all hosts
        while (left_s := begins_at - time.monotonic()) > 0:
            time.sleep(left_s)
        call()
        return (max(self.allgather(time.monotonic())) - begins_at) * 1000

    def sent_nbytes(self, call: Callable[[], bool]) -> tuple[bool, int]:
        """Is call() true on all ranks, and what the busiest host sends meanwhile."""
        before = self.allgather(interface_nbytes())
        are_right = all(self.allgather(call()))
        after = self.allgather(interface_nbytes())
        sent = [end - begin for begin, end in zip(before, after, strict=True)]
        return are_right, max(sent)


def interface_nbytes() -> int:
    """What this host has sent, by the counter of its interface."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise OSError("this host has no eth0")


def measure(world: World, libraries: list[Library], cell: Cell, new: Any) -> dict[str, Any]:
    """new(nbytes) makes the numbers to move; the rest is made of them."""
    size, operation = libraries[0].size, cell.operation
    total = cell.nbytes * size if operation in ROWS else cell.nbytes
    ramp = new(total)
    ramp = ramp.reshape(size, -1) if operation in ROWS else ramp
    right, sent = {}, {}
    for library in libraries:
        right[library.name], sent[library.name] = world.sent_nbytes(
            lambda library=library: gives_answer(library, operation, ramp)  # type: ignore[misc]
        )
    calls = {
        library.name: library.call(operation, ramp, result(operation, ramp, size))
        for library in libraries
    }
    ms: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(cell.repeats):
        for name, call in calls.items():
            ms[name].append(world.timed(call))
    return {"cell": str(cell), "right": right, "sent": sent, "ms": ms}


def main() -> None:
    library = mpi(0, 1)
    comm = library.world
    library.rank, library.size = comm.rank, comm.size
    world = World(comm.bcast, comm.allgather)
    for text in sys.argv[1:]:
        row = measure(
            world, [library], Cell.read(text), lambda nbytes: np.arange(nbytes // 4, dtype="f4") % 7
        )
        if comm.rank == 0:
            print(MARK + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
