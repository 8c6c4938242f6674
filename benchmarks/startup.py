"""From the command to all ranks past their first barrier, and from a death to the end of all.

    python -m benchmarks.startup
    python -m benchmarks.startup -n 2 --repeats 3

The peers are measured in turns with us. Every rank imports torch, meets the others in a barrier of
its launcher's own kind (ours: the Coordinator's; mpiexec: mpi4py's; the others: torch.distributed
over gloo) and prints the time, on a clock that all processes of a machine share.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.mpi import engines
from benchmarks.startup_ranks.barriers import DIES, MARK, pass_barriers
from benchmarks.table import Table, alternate, spread

COLUMNS = (
    "what",
    "ranks",
    "right",
    "drumline (s)",
    "drumline, not preloaded (s)",
    "peer",
    "(s)",
    "ratio",
)
NOTE = (
    "Median and middle half; of a single launch its time. `command to barrier`: from the command "
    "until the last rank is past its first barrier, what all read being in memory already. `death "
    "to the end`: from the SIGKILL of rank 1, while the others wait in a barrier, until the "
    "command has ended. right: every rank passed (one, where the others die). ours: no option; "
    "not preloaded: with `--preload ''`. ratio: ours, with no option, divided by the peer's."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, nargs="+", default=[2, 4, 8, 16], help="ranks")
    parser.add_argument("--dying", type=int, nargs="+", default=[2, 4], help="ranks, one to die")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--spawn", type=int, help=argparse.SUPPRESS)  # be the parent of spawn
    parser.add_argument(DIES, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.spawn:
        return spawn(arguments.spawn, arguments.dies)
    table = Table("startup", COLUMNS, NOTE, keep=arguments.save)
    for command in commands(2, dies=False).values():
        once(command, dies=False)  # so that what they read is in memory
    for size in arguments.n:
        add(table, "command to barrier", size, arguments.repeats, dies=False)
    for size in arguments.dying:
        add(table, "death to the end", size, arguments.repeats, dies=True)
    table.end()


def add(table: Table, what: str, size: int, most: int, dies: bool) -> None:
    """A row for each peer, of fewer launches the more ranks they have."""
    repeats = max(1, min(most, most * 3 // size))
    starts = commands(size, dies)
    passed = dict.fromkeys(starts, True)

    def one(peer: str) -> float:
        seconds, ranks = once(starts[peer], dies)
        print(f"{what}, {size} ranks, {peer}: {seconds:.2f} s", file=sys.stderr)
        passed[peer] &= ranks == (1 if dies else size)
        return seconds

    found = alternate({peer: lambda peer=peer: one(peer) for peer in starts}, repeats)
    ours, separate = found.pop("drumline"), found.pop("drumline, not preloaded")
    for peer, theirs in found.items():
        right = passed["drumline"] and passed["drumline, not preloaded"] and passed[peer]
        ratio = statistics.median(ours) / statistics.median(theirs)
        cells = spread(ours), spread(separate), peer, spread(theirs), ratio
        table.add(what, size, "yes" if right else "NO", *cells)


def commands(size: int, dies: bool) -> dict[str, list[str]]:
    """What is typed to start so many ranks, by who starts them."""
    python, n, death = sys.executable, str(size), [DIES] if dies else []
    ours = [python, "-m", "launcher", "run", "-n", n]
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", n]
    found = {
        "drumline": [*ours, *rank_module("coordinator"), *death],
        "drumline, not preloaded": [*ours, "--preload", "", *rank_module("coordinator"), *death],
        "torchrun": [*torchrun, *rank_module("gloo"), *death],
        "torch.multiprocessing.spawn": [python, "-m", "benchmarks.startup", *death, "--spawn", n],
    }
    for name, engine in engines().items():
        found[f"mpiexec, {name}"] = [*engine, "-n", n, python, *rank_module("mpi"), *death]
    return found


def rank_module(kind: str) -> list[str]:
    return ["-m", f"benchmarks.startup_ranks.{kind}_rank"]


def once(command: list[str], dies: bool) -> tuple[float, int]:
    """(seconds, how many ranks said the time). With dies: seconds from the death to the end."""
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    ended = time.monotonic()
    times = [float(line.split()[-1]) for line in done.stdout.splitlines() if MARK in line]
    assert times, f"no rank passed the barrier of {command}: {done.stderr}"
    return (ended - max(times) if dies else max(times) - began), len(times)


def spawn(size: int, dies: bool) -> None:
    """torch.multiprocessing.spawn, as its documents show it."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(spawned, args=(size, folder, dies), nprocs=size)


def spawned(rank: int, size: int, folder: str, dies: bool) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=size)
    pass_barriers(rank, dist.barrier, dies)


if __name__ == "__main__":
    main()
