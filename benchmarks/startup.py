"""From the command to all ranks past their first barrier, and from a death to the end of all.

    python -m benchmarks.startup
    python -m benchmarks.startup -n 2 --repeats 3

The peers are measured in turns with us. Every rank imports torch, meets the others in a barrier of
its launcher's own kind (ours: the Coordinator's; torchrun: torch.distributed over gloo; mpiexec:
mpi4py's) and prints the time, on a clock that all processes of a machine share.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time

from benchmarks.table import Table, alternate, spread

MARK = "past the barrier at"
PEERS = {"ours": "ours", "ours, preloaded": "ours", "torchrun": "torchrun", "mpiexec": "mpiexec"}
PRELOADED = ("--preload", "torch", "--preload", "coordinator")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, nargs="+", default=[2, 8], help="ranks")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # given to the ranks
    parser.add_argument("--dies", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return be_rank(arguments.rank, arguments.dies)
    table = measure(arguments.n, arguments.repeats)
    table.show()
    if arguments.save:
        table.save()


def measure(sizes: list[int], repeats: int) -> Table:
    columns = ("what", "ranks", "launcher", "seconds", "torchrun (s)", "all passed", "ratio")
    table = Table("startup", columns, "Median and middle half; ratio of the medians to torchrun's.")
    for size in sizes:
        add(table, "command to barrier", size, repeats, dies=False)
    add(table, "death to the end", sizes[0], repeats, dies=True)
    return table


def add(table: Table, what: str, size: int, repeats: int, dies: bool) -> None:
    passed: dict[str, bool] = dict.fromkeys(peers(), True)

    def one(peer: str) -> float:
        seconds, ranks = once(command(peer, size, dies), dies)
        passed[peer] &= ranks == (1 if dies else size)
        return seconds

    found = alternate({peer: lambda peer=peer: one(peer) for peer in peers()}, repeats)
    torchrun = found.pop("torchrun")
    for peer, seconds in found.items():
        ratio = statistics.median(seconds) / statistics.median(torchrun)
        both = passed[peer] and passed["torchrun"]
        table.add(
            what, size, peer, spread(seconds), spread(torchrun), "yes" if both else "NO", ratio
        )


def peers() -> list[str]:
    return [peer for peer in PEERS if peer != "mpiexec" or shutil.which("mpiexec")]


def command(peer: str, size: int, dies: bool) -> list[str]:
    rank = ["-m", "benchmarks.startup", "--rank", PEERS[peer], *(["--dies"] if dies else [])]
    python, n = sys.executable, str(size)
    if peer == "torchrun":
        run = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n]
        return [*run, *rank]
    if peer == "mpiexec":
        return ["mpiexec", "-n", n, python, *rank]
    preload = PRELOADED if "preloaded" in peer else ()
    return [python, "-m", "launcher", "run", "-n", n, *preload, *rank]


def once(command: list[str], dies: bool) -> tuple[float, int]:
    """(seconds, how many ranks said the time). With dies: seconds from the death to the end."""
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    ended = time.monotonic()
    times = [float(line.split()[-1]) for line in done.stdout.splitlines() if MARK in line]
    assert times, f"no rank passed the barrier of {command}: {done.stderr}"
    return (ended - max(times) if dies else max(times) - began), len(times)


def be_rank(peer: str, dies: bool) -> None:
    import torch  # noqa: F401 - what every rank of the projects this is for pays

    rank, barrier = MEETINGS[peer]()
    barrier()
    if not dies or rank == 1:
        os.write(1, f"{MARK} {time.monotonic()}\n".encode())  # at once: ranks may share the pipe
    if dies and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if dies:
        barrier()


def meet_ours():
    from coordinator import Coordinator

    coor = Coordinator()
    return coor.rank, coor.barrier


def meet_torchrun():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.get_rank(), dist.barrier


def meet_mpiexec():
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.barrier


MEETINGS = {"ours": meet_ours, "torchrun": meet_torchrun, "mpiexec": meet_mpiexec}

if __name__ == "__main__":
    main()
