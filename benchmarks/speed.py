"""The table of the README: a few rows of the last run's tables, each beside every baseline.

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
    """Rows of one results table that match `where`; every peer among them is a baseline.

    time, baseline_time: columns. peer: the column that names the baseline, or its name.
    """

    what: str
    table: str
    where: Row
    unit: str
    time: str
    baseline_time: str = ""
    peer: str = "peer"

    def pairs(self, results: Path) -> Iterator[tuple[Row, str, Any]]:
        """drumline's row, the baseline's name, and the baseline's cell."""
        for row in matching(results / f"{self.table}.jsonl", self.where):
            yield row, str(row.get(self.peer, self.peer)), row[self.baseline_time]


@dataclass(frozen=True)
class DecodePick(Pick):
    """A table with a row for each contestant: `where` chooses drumline's, `over` names it."""

    over: str = "drumline"

    def pairs(self, results: Path) -> Iterator[tuple[Row, str, Any]]:
        rows = matching(results / f"{self.table}.jsonl", self.where)
        for ours in (row for row in rows if row["over"] == self.over):
            for row in rows:
                if not row["over"].startswith("drumline"):
                    yield ours, row["over"], row[self.time]


def startup(what: str, column: str, ranks: int) -> Pick:
    return Pick(what, "startup", {"what": column, "ranks": ranks}, "s", "drumline (s)", "(s)")


def allreduce(size: str, nbytes: int) -> Pick:
    where = {"operation": "allreduce", "dtype": "float32", "bytes": nbytes}
    what = f"`Communicator.allreduce()` of {size}, 2 ranks"
    return Pick(what, "collectives-2-ranks", where, "us", "drumline (us)", "(us)")


def barrier(table: str, baseline_time: str, peer: str = "peer") -> Pick:
    what = "`Coordinator.barrier()`, 2 ranks"
    return Pick(what, table, {"operation": "barrier"}, "us", "drumline (us)", baseline_time, peer)


def decode(batch: int, device_map: str, over: str) -> Pick:
    what = f'decoding on 2 ranks, batch {batch}, `device_map="{device_map}"`'
    where = {"what": f"decode, batch {batch}"}
    return DecodePick(what, "inference", where, "ms/token", "ms per token", over=over)


FASTEST = 'drumline, "fastest"'
PICKS = (
    startup("start until all of 4 ranks passed a barrier", "command to barrier", 4),
    startup("SIGKILL of a rank until the command ended, 2 ranks", "death to the end", 2),
    barrier("coordinator-2", "torch.distributed (us)", "torch.distributed objects, gloo"),
    barrier("coordinator-peers-2", "(us)"),
    allreduce("8 B", 8),
    allreduce("64 MiB", 64 << 20),
    Pick(
        *("one call, from Python into C", "calls", {"call": "allreduce"}),
        *("ns", "drumline (ns)", "(ns)"),
    ),
    decode(1, "auto", "drumline"),
    decode(1, "fastest", FASTEST),
    decode(32, "auto", "drumline"),
    decode(32, "fastest", FASTEST),
    Pick(
        *("peak memory of a rank, model over 4 ranks", "model", {"ranks": 4}, "MiB"),
        *("peak of a rank (MiB)", "plain peak (MiB)", "from_pretrained in one process"),
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
    """The table of the machine and commit that most rows have, and below it which these are."""
    every = [(pick, *pair) for pick in PICKS for pair in pick.pairs(results)]
    sources = Counter((ours["machine"], ours["commit"]) for _, ours, _, _ in every)
    (source,) = [source for source, _ in sources.most_common(1)] or [("none", "none")]
    pairs = [row for row in every if (row[1]["machine"], row[1]["commit"]) == source]
    rows: list[str] = []
    shown: set[str] = set()  # in the first column, once
    for pick, ours, peer, baseline in pairs:
        what = "" if pick.what in shown else pick.what
        shown.add(pick.what)
        rows.append(line(what, pick.unit, peer, median(ours[pick.time]), median(baseline)))
    head = [" | ".join(HEAD).join(("| ", " |")), "|---|---:|---|---:|---:|"]
    left_out = len({pick.what for pick, *_ in every} - {pick.what for pick, *_ in pairs})
    where = f"Medians. Machine: {source[0]}. Commit: {source[1]}."
    where += f" {left_out} more were measured elsewhere or before." if left_out else ""
    return "\n".join([*head, *rows, "", textwrap.fill(where, 100), ""])


def line(what: str, unit: str, peer: str, time: float, baseline_time: float) -> str:
    cells = (what, f"{text(time)} {unit}", peer, f"{text(baseline_time)} {unit}")
    return "| " + " | ".join((*cells, f"{time / baseline_time:.2g}")) + " |"


def median(cell: Any) -> float:
    return float(cell["median"] if isinstance(cell, dict) else cell)
