"""Collectives over shared memory, beside gloo and every MPI that is named.

    python -m benchmarks.collectives
    python -m benchmarks.collectives -n 4 --sizes 8 65536
    python -m benchmarks.collectives --mpiexec mpiexec --mpiexec /opt/openmpi/bin/mpiexec

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.table import Table, spread
from communicator import Communicator
from coordinator import Coordinator

SIZES = (8, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20)
OPERATIONS = ("allreduce", "broadcast", "allgather", "there and back", "barrier")
MARK = "measured: "  # opens the lines that rank 0 prints for the process that started it
Call = Callable[[], object]


class Library:
    """The calls of one library on one tensor, ready to be timed."""

    def __init__(self, name: str, world: Any, rank: int, size: int) -> None:
        self.name, self.world, self.rank, self.size = name, world, rank, size

    def call(self, operation: str, tensor: torch.Tensor) -> Call:
        out = torch.empty(0)
        if operation == "allgather":
            out = torch.zeros((self.size, *tensor.shape), dtype=tensor.dtype)
        if operation != "there and back":
            return self.collective(operation, tensor, out)
        if self.rank > 1:
            return lambda: None
        send, recv = self.point(tensor, 1 - self.rank)
        first, then = (send, recv) if self.rank == 0 else (recv, send)
        return lambda: (first(), then())

    def collective(self, operation: str, tensor: torch.Tensor, out: torch.Tensor) -> Call:
        raise NotImplementedError

    def point(self, tensor: torch.Tensor, peer: int) -> tuple[Call, Call]:
        raise NotImplementedError


class Ours(Library):
    def collective(self, operation: str, tensor: torch.Tensor, out: torch.Tensor) -> Call:
        world = self.world
        calls: dict[str, Call] = {
            "allreduce": lambda: world.allreduce(tensor),
            "broadcast": lambda: world.broadcast(tensor),
            "allgather": lambda: world.allgather(tensor, out=out),
            "barrier": lambda: world.barrier(),
        }
        return calls[operation]

    def point(self, tensor: torch.Tensor, peer: int) -> tuple[Call, Call]:
        return lambda: self.world.send(tensor, peer), lambda: self.world.recv(tensor, peer)


class Gloo(Library):
    def collective(self, operation: str, tensor: torch.Tensor, out: torch.Tensor) -> Call:
        rows = list(out)
        calls: dict[str, Call] = {
            "allreduce": lambda: dist.all_reduce(tensor),
            "broadcast": lambda: dist.broadcast(tensor, 0),
            "allgather": lambda: dist.all_gather(rows, tensor),
            "barrier": lambda: dist.barrier(),
        }
        return calls[operation]

    def point(self, tensor: torch.Tensor, peer: int) -> tuple[Call, Call]:
        return lambda: dist.send(tensor, peer), lambda: dist.recv(tensor, peer)


class Mpi(Library):
    def collective(self, operation: str, tensor: torch.Tensor, out: torch.Tensor) -> Call:
        from mpi4py import MPI

        world, array, rows = self.world, tensor.numpy(), out.numpy()
        calls: dict[str, Call] = {
            "allreduce": lambda: world.Allreduce(MPI.IN_PLACE, array),
            "broadcast": lambda: world.Bcast(array, 0),
            "allgather": lambda: world.Allgather(array, rows),
            "barrier": lambda: world.Barrier(),
        }
        return calls[operation]

    def point(self, tensor: torch.Tensor, peer: int) -> tuple[Call, Call]:
        array = tensor.numpy()
        return lambda: self.world.Send(array, peer), lambda: self.world.Recv(array, peer)


def mpi(rank: int, size: int) -> Library:
    from mpi4py import MPI

    name = "Open MPI" if "Open MPI" in MPI.Get_library_version() else "MPICH"
    return Mpi(name, MPI.COMM_WORLD, rank, size)


def gloo(coor: Coordinator) -> Library:
    store = coor.store("benchmark")
    dist.init_process_group("gloo", store=store, rank=coor.rank, world_size=coor.world_size)
    return Gloo("gloo", None, coor.rank, coor.world_size)


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


def is_right(library: Library, operation: str, nbytes: int, dtype: torch.dtype) -> bool:
    """Does the call give the plain answer? On inputs that differ by rank and by element."""
    ramp = (torch.arange(nbytes // dtype.itemsize) % 7).to(dtype)
    tensor = ramp + library.rank
    if operation == "allreduce":
        library.call(operation, tensor)()
        return torch.equal(tensor, library.size * ramp + sum(range(library.size)))
    if operation == "broadcast":
        library.call(operation, tensor)()
        return torch.equal(tensor, ramp)
    return True  # the others are held to their word by the conformance check


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
    calls = {  # on tensors of their own: one that a peer has just read is slower to write
        library.name: library.call(operation, torch.zeros(nbytes // dtype.itemsize, dtype=dtype))
        for library in libraries
    }
    wrong = [
        library.name for library in libraries if not is_right(library, operation, nbytes, dtype)
    ]
    times = measure(comm, calls, repeats(nbytes, comm.world_size))
    floor = floor_us(nbytes, comm) if nbytes >= 64 << 10 else None
    dtype_name = str(dtype).removeprefix("torch.")
    row = {"operation": operation, "dtype": dtype_name, "nbytes": nbytes}
    report(comm, **row, times=times, wrong=wrong, floor=floor)


def start(command: list[str], arguments: argparse.Namespace, peer: str) -> list[dict[str, Any]]:
    """Run the ranks under a launcher, and collect what rank 0 measured."""
    sizes = [str(nbytes) for nbytes in arguments.sizes]
    rank = ["-m", "benchmarks.collectives", "--peer", peer, "--sizes", *sizes]
    rank += ["--operations", *arguments.operations, "--dtypes", *arguments.dtypes]
    process = subprocess.Popen([*command, *rank], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    rows = []
    for line in process.stdout:
        _, mark, facts = line.partition(MARK)
        if mark:
            rows.append(json.loads(facts))
            print(".", end="", file=sys.stderr, flush=True)
    if process.wait() != 0:
        sys.exit(f"the ranks beside {peer} failed with code {process.returncode}")
    return rows


def commands(arguments: argparse.Namespace) -> list[tuple[list[str], str]]:
    """Who starts the ranks, and whom they are compared with."""
    count = ["-n", str(arguments.n)]
    found = [([sys.executable, "-m", "launcher", "run", *count], "gloo")]
    for mpiexec in arguments.mpiexec:
        found.append(([mpiexec, *mpi_options(mpiexec), *count, sys.executable], "mpi"))
    return found


def mpi_options(mpiexec: str) -> list[str]:
    """Open MPI needs leave for root and for few cores; mpi4py is told whose library to open."""
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in version:
        return []
    library = next(Path(mpiexec).absolute().parents[1].glob("lib/libmpi.so.[0-9]*"), "")
    choice = ["-x", f"MPI4PY_LIBMPI={library}"]
    return ["--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", *choice]


COLUMNS = (
    "operation",
    "dtype",
    "bytes",
    "right",
    "floor (us)",
    "ours (us)",
    "peer",
    "(us)",
    "ratio",
)


def show(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> Table:
    table = Table(
        f"collectives-{arguments.n}-ranks",
        COLUMNS,
        "Median and middle half of one call on rank 0, after barriers, each peer in turns with us "
        "in the same processes. floor: one pass of every rank over its own tensor, reading and "
        "writing. ratio: ours divided by the peer's.",
    )
    for row in rows:
        (_, ours), (peer, theirs) = row["times"].items()
        floor = "" if row["floor"] is None else row["floor"]
        right = "yes" if not row["wrong"] else f"wrong: {', '.join(row['wrong'])}"
        head = (row["operation"], row["dtype"], row["nbytes"], right, floor)
        ratio = statistics.median(ours) / statistics.median(theirs)
        table.add(*head, spread(ours), peer, spread(theirs), ratio)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the tensor")
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--mpiexec", action="append", default=[], help="an MPI to compare with")
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--peer", help=argparse.SUPPRESS)  # given to the ranks
    arguments = parser.parse_args()
    if arguments.peer:
        return be_rank(arguments)
    rows = [row for command, peer in commands(arguments) for row in start(command, arguments, peer)]
    rows.sort(
        key=lambda row: (
            OPERATIONS.index(row["operation"]),
            row["dtype"] != "float32",
            row["nbytes"],
        )
    )
    table = show(rows, arguments)
    table.show()
    if arguments.save:
        table.save()


if __name__ == "__main__":
    main()
