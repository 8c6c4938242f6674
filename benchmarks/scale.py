"""How starting up and agreeing grow with the number of ranks, and what that says of thousands.

    python -m benchmarks.scale
    python -m benchmarks.scale --ranks 8 16 --repeats 3

The ranks are forked from one process and share the cores of one machine, so times of theirs add up.
What carries over to a cluster is the work of one rank: the processor time that rank 0, to which all
come, and an ordinary rank spend. It is fitted to a + b log n + c n + d n^2, and extrapolated on
paper.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np

import launcher
from benchmarks.scale_page import write
from benchmarks.table import Table, spread
from coordinator import Coordinator

RANKS = (8, 16, 32, 64)
PAPER = (1000, 10_000)
LAYOUTS = {"one node": None, "a node each": 1}
COLUMNS = ("what", "layout", "ranks", "right", "all ranks (ms)", "rank 0 (ms)", "other rank (ms)")
NOTE = (
    "all ranks: wall time until the last is done. rank 0, other rank: processor time of one rank, "
    "the median of the others; of a call that of the thread which makes it, for rank 0 goes on "
    "hearing from all ranks meanwhile. `a node each` lets every rank speak to rank 0 and to its "
    "neighbours in the tree over TCP on loopback, as the first ranks of nodes do in a cluster."
)
NEAR = 0.04  # so much more relative error is worth a term less
GROWTHS = {
    "constant": lambda n: n**0.0,
    "logarithmic": np.log2,
    "linear": lambda n: n,
    "quadratic": lambda n: n**2,
}
Sample = tuple[
    float, float, bool
]  # when done (s), processor time (s), whether the result was right
Samples = dict[str, list[Sample]]
Measured = dict[tuple[str, str, int], tuple[float, float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--repeats", type=int, default=5, help="launches of each size")
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    arguments = parser.parse_args()
    table = Table("scale", COLUMNS, NOTE, keep=arguments.save)
    found: Measured = {}
    for layout in LAYOUTS:
        for ranks in arguments.ranks:
            found |= add(table, layout, ranks, arguments.repeats)
    growth = fits(found, arguments.save)
    table.end()
    growth.end()
    if arguments.save:
        print(f"written to {write(table, growth)}")


def add(table: Table, layout: str, ranks: int, repeats: int) -> Measured:
    """A row for each call, over several launches of this size; milliseconds, for the fit."""
    launches = [launched(ranks, LAYOUTS[layout]) for _ in range(repeats)]
    found: Measured = {}
    for what in launches[0][0]:
        samples = [[rank[what] for rank in each] for each in launches]
        right = all(ok for each in samples for one in each for _, _, ok in one)
        walls, first, others = zip(*(summary(each) for each in samples), strict=True)
        cells = spread(walls), spread(first), spread(others)
        table.add(what, layout, ranks, "yes" if right else "NO", *cells)
        found[what, layout, ranks] = (cells[0].median, cells[1].median, cells[2].median)
    return found


def summary(samples: list[list[Sample]]) -> tuple[float, float, float]:
    """Of the ranks' samples of one call: wall time, rank 0's and the median other's, in ms."""
    per_call = list(zip(*samples, strict=True))
    wall = statistics.median(max(took for took, _, _ in call) for call in per_call)
    work = [statistics.median(spent for _, spent, _ in rank) for rank in samples]
    return wall * 1000, work[0] * 1000, statistics.median(work[1:]) * 1000


def launched(ranks: int, local: int | None) -> list[Samples]:
    """What each rank of a launch measured."""
    began = time.monotonic()
    found: list[Samples] = launcher.launch(rank, ranks, args=(local, began), timeout_s=300)
    return found


def rank(local: int | None, began: float) -> Samples:
    info = launcher.current()
    if local is not None:
        info = replace(info, local_world_size=local, local_rank=0)
    spent = time.process_time()
    with Coordinator(info, timeout_s=120) as coor:
        met = time.monotonic() - began, time.process_time() - spent, coor.world_size
        data = bytes(1024)
        calls: dict[str, Callable[[], bool]] = {
            "barrier": lambda: coor.barrier() is None,
            "broadcast 1 KiB": lambda: coor.broadcast(data if coor.rank == 0 else None) == data,
            "allgather 16 B": lambda: len(coor.allgather(bytes(16))) == coor.world_size,
        }
        found: Samples = {"launch to all met": [(met[0], met[1], met[2] == info.world_size)]}
        for name, call in calls.items():
            found[name] = [timed(coor, call) for _ in range(20)][5:]
    return found


def timed(coor: Coordinator, call: Callable[[], bool]) -> Sample:
    """One call, straight after a barrier."""
    coor.barrier()
    start, spent = time.monotonic(), time.thread_time()
    right = call()
    return time.monotonic() - start, time.thread_time() - spent, right


def fits(found: Measured, keep: bool) -> Table:
    """For each call and layout: the growth of one rank's work, and what it comes to for many."""
    heads = [f"{count:,} ranks (ms)" for count in PAPER]
    columns = ("what", "layout", "of", "fit (ms)", "grows", *heads, "error of the fit")
    note = (
        "Processor time of one rank. Least squares of the relative error, with as few terms as fit "
        "nearly as well as all. What it comes to for more ranks than were measured is arithmetic, "
        "and not a measurement."
    )
    table = Table("scale-fits", columns, note, keep)
    for what, layout in dict.fromkeys((what, layout) for what, layout, _ in found):
        sizes = [size for name, place, size in found if (name, place) == (what, layout)]
        for column, who in enumerate(("rank 0", "other rank"), 1):
            values = [found[what, layout, size][column] for size in sizes]
            factors, error = fit(sizes, values)
            at = [float(fitted(factors, count)) for count in PAPER]
            shape = [name for name, factor in zip(GROWTHS, factors, strict=True) if factor][-1]
            table.add(what, layout, who, formula(factors), shape, *at, f"{error:.0%}")
    return table


def fit(sizes: list[int], values: list[float]) -> tuple[list[float], float]:
    """Factors of each growth, none negative, and the relative error that they leave.

    Of the choices of terms, the one with the fewest that comes near the best; of those the slowest.
    """
    terms = range(len(GROWTHS))
    choices = [chosen for count in (1, 2, 3) for chosen in combinations(terms, count)]
    tried = [least_squares(sizes, values, chosen) for chosen in choices]
    allowed = [(factors, error) for factors, error in tried if min(factors) >= 0]
    best = min(error for _, error in allowed)
    return next((f, error) for f, error in allowed if error <= max(1.5 * best, best + NEAR))


def least_squares(
    sizes: list[int], values: list[float], terms: tuple[int, ...]
) -> tuple[list[float], float]:
    n, measured = np.array(sizes, dtype=float), np.maximum(np.array(values), 1e-9)
    growths = list(GROWTHS.values())
    matrix = np.stack([growths[term](n) for term in terms], axis=1) / measured[:, None]
    solved, *_ = np.linalg.lstsq(matrix, np.ones(len(n)), rcond=None)
    factors = [0.0] * len(growths)
    for term, factor in zip(terms, solved, strict=True):
        factors[term] = float(factor)
    return factors, float(np.sqrt(np.mean((matrix @ solved - 1) ** 2)))


def fitted(factors: list[float], n: int) -> float:
    growths = zip(factors, GROWTHS.values(), strict=True)
    return sum(factor * float(growth(float(n))) for factor, growth in growths)


def formula(factors: list[float]) -> str:
    terms = zip(factors, ("", " log2 n", " n", " n^2"), strict=True)
    return " + ".join(f"{factor:.3g}{term}" for factor, term in terms if factor) or "0"


if __name__ == "__main__":
    main()
