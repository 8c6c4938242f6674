"""The table of the README: ten rows of the last run's tables, those that are lost among them.

speed.write(Path("README.md"), RESULTS)  # between the two marks
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.table import text

START, END = "<!-- speed: written by `python -m benchmarks --renew` -->\n", "<!-- speed ends -->"
HEAD = ("measured", "drumline", "baseline", "baseline time", "ratio")
Row = dict[str, Any]


@dataclass(frozen=True)
class Pick:
    """A row of one results table that matches `where`, beside one baseline.

    time, baseline_time: columns; a rate is shown as the time of one. peer: the baseline's name.
    """

    what: str
    table: str
    where: Row
    unit: str
    time: str
    baseline_time: str
    peer: str

    def pairs(self, results: Path) -> Iterator[tuple[Row, Any, str]]:
        """drumline's row, the baseline's cell and its name."""
        for row in matching(results / f"{self.table}.jsonl", self.where):
            if row.get("peer", self.peer) == self.peer:
                yield row, row[self.baseline_time], self.peer


@dataclass(frozen=True)
class DecodePick(Pick):
    """A table with a row for each contestant: `where` chooses what is measured, `over` drumline's
    row, and `peer` the baseline's. contestant: the column with their names. rival: another
    baseline, which is shown if it was faster."""

    over: str = "drumline"
    contestant: str = "over"
    rival: str = ""

    def pairs(self, results: Path) -> Iterator[tuple[Row, Any, str]]:
        rows = matching(results / f"{self.table}.jsonl", self.where)
        cells = {row[self.contestant]: row[self.baseline_time] for row in rows}
        if {self.over, self.peer, self.rival or self.peer} <= cells.keys():
            names = (self.peer, self.rival or self.peer)
            peer = min(names, key=lambda name: time_of(self.baseline_time, cells[name]))
            ours = next(row for row in rows if row[self.contestant] == self.over)
            yield ours, cells[peer], peer


def allreduce(size: str, nbytes: int, peer: str) -> Pick:
    where = {"operation": "allreduce", "dtype": "float32", "bytes": nbytes}
    what = f"`Communicator.allreduce()` of {size}, 2 ranks"
    return Pick(what, "collectives-2-ranks", where, "us", "drumline (us)", "(us)", peer)


def inference(what: str, measured: str, over: str = "drumline") -> Pick:
    where, time, one = {"what": measured}, "ms per token", ONE_PROCESS
    threads = f"{one}, 2 threads"
    return DecodePick(what, "inference", where, "ms", time, time, one, over, rival=threads)


def too_big(peer: str, table: str = "big", dtype: str = "float32") -> Pick:
    what = f"one token of a model too large for any one of 3 machines, {dtype}, 1 Gbit/s"
    return DecodePick(what, table, {"link, delay": "1gbit, 0 ms"}, "ms", RATE, RATE, peer)


ONE_PROCESS, RATE = "one process", "tokens/s"
PICKS = (
    inference("one token, 2 ranks", "decode, batch 1"),
    inference(
        'one token, 2 ranks, `device_map="fastest"`', "decode, batch 1", 'drumline, "fastest"'
    ),
    inference("32 tokens at a time, 2 ranks", "decode, batch 32"),
    too_big("llama.cpp RPC"),
    too_big("llama.cpp RPC", "big-bfloat16", "bfloat16"),
    too_big("transformers, mapped"),
    DecodePick(
        *("one token for a single client, `drumline serve`, 2 ranks", "serve", {"clients": 1}),
        *("ms", RATE, RATE, "vLLM", "drumline, 2 ranks", "server", "llama.cpp, float32"),
    ),
    Pick(
        *("peak memory of a rank, 4 ranks", "model", {"ranks": 4}, "MiB"),
        *("peak of a rank (MiB)", "plain peak (MiB)", ONE_PROCESS),
    ),
    Pick(
        *("load, 2 ranks", "model", {"ranks": 2}, "s"),
        *("load (s)", "plain load (s)", ONE_PROCESS),
    ),
    allreduce("64 MiB", 64 << 20, "gloo"),
    Pick(
        *("`Coordinator.barrier()`, 2 ranks", "coordinator-peers-2", {"operation": "barrier"}),
        *("us", "drumline (us)", "(us)", "mpi4py, Open MPI"),
    ),
)


def matching(path: Path, where: Row) -> list[Row]:
    """The rows of a table of results that hold all of `where`."""
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return [row for row in rows if where.items() <= row.items()]


def write(readme: Path, results: Path) -> None:
    """Put the lines between the marks; nothing else is touched."""
    page = readme.read_text()
    start, end = page.index(START) + len(START), page.index(END)
    readme.write_text(f"{page[:start]}{lines(results)}{page[end:]}")


def lines(results: Path) -> str:
    """The table of the machine that most rows have; below it the machine and the commits."""
    every = [(pick, *pair) for pick in PICKS for pair in pick.pairs(results)]
    machines = Counter(ours["machine"] for _, ours, _, _ in every)
    (machine,) = [machine for machine, _ in machines.most_common(1)] or ["none"]
    here = [row for row in every if row[1]["machine"] == machine]
    rows = [
        line(pick, time_of(pick.time, ours[pick.time]), time_of(pick.baseline_time, cell), peer)
        for pick, ours, cell, peer in here
    ]
    head = [" | ".join(HEAD).join(("| ", " |")), "|---|---:|---|---:|---:|"]
    tables = {pick.table: ours["commit"] for pick, ours, _, _ in here}
    (commit,) = [commit for commit, _ in Counter(tables.values()).most_common(1)] or ["none"]
    others = [f"; of {table}: {name}" for table, name in tables.items() if name != commit]
    where = f"Medians. Machine: {machine}. Commit: {commit}{''.join(others)}."
    if left_out := len(PICKS) - len(rows):
        where += f" {left_out} more were not measured, or elsewhere."
    return "\n".join([*head, *rows, "", textwrap.fill(where, 100), ""])


def line(pick: Pick, time: float, baseline_time: float, peer: str) -> str:
    times = [f"{text(value)} {pick.unit}" for value in (time, baseline_time)]
    cells = (pick.what, times[0], peer, times[1], f"{time / baseline_time:.3g}")
    return "| " + " | ".join(cells) + " |"


def time_of(column: str, cell: Any) -> float:
    value = float(cell["median"] if isinstance(cell, dict) else cell)
    return 1000 / value if column == RATE else value
