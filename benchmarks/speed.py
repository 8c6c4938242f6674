"""The few numbers of the README, out of the tables of the last run.

speed.write(Path("README.md"), RESULTS)  # between the two marks
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.table import text

START, END = "<!-- speed: written by `python -m benchmarks` -->\n", "<!-- speed ends -->"
HEAD = ("what", "ours", "instead", "", "ours / that")
Row = dict[str, Any]


@dataclass(frozen=True)
class Pick:
    """One line: two cells of a table. ours, theirs: a column, and what the row must hold."""

    what: str
    table: str
    unit: str
    instead: str
    ours: tuple[str, Row]
    theirs: tuple[str, Row]


def beside(
    what: str, table: str, unit: str, instead: str, row: Row, ours: str, theirs: str
) -> Pick:
    """Both in one row of the table."""
    return Pick(what, table, unit, instead, (ours, row), (theirs, row))


def started(what: str, ranks: int, peer: str) -> Pick:
    row = {"what": what, "ranks": ranks, "peer": peer}
    return beside(f"{what}, {ranks} ranks", "startup", "s", peer, row, "ours (s)", "(s)")


def allreduce(size: str, nbytes: int, peer: str) -> Pick:
    row = {"operation": "allreduce", "dtype": "float32", "bytes": nbytes, "peer": peer}
    what = f"allreduce of {size}, 2 ranks"
    return beside(what, "collectives-2-ranks", "us", peer, row, "ours (us)", "(us)")


def decode(batch: int, peer: str, ours: str = "ours") -> Pick:
    column, what = "ms per token", f"decode, batch {batch}"
    sides = [(column, {"what": what, "over": over}) for over in (ours, peer)]
    how = ours.removeprefix("ours")
    return Pick(f"{what}, 2 ranks{how}", "inference", "ms a token", peer, *sides)


FASTEST = 'ours, "fastest"'
RPC = "torch RPC, as in Accelerate's PR 4066"
PICKS = (
    started("command to barrier", 4, "torchrun"),
    started("command to barrier", 4, "mpiexec, MPICH"),
    started("death to the end", 2, "torchrun"),
    beside(
        *("barrier of the Coordinator, 2 ranks", "coordinator-2", "us", "torch.distributed, gloo"),
        *({"operation": "barrier"}, "ours (us)", "torch.distributed (us)"),
    ),
    allreduce("8 B", 8, "gloo"),
    allreduce("8 B", 8, "MPICH"),
    allreduce("64 MiB", 64 << 20, "MPICH"),
    beside(
        *("a call from Python into C", "calls", "ns", "ctypes, as vLLM's pynccl"),
        *({"peer": "ctypes, as vLLM's pynccl"}, "ours (ns)", "(ns)"),
    ),
    decode(1, "one process"),
    decode(1, RPC),
    decode(32, "one process"),
    decode(1, "one process", FASTEST),
    decode(32, "one process", FASTEST),
    beside(
        *("peak memory of a rank, model over 4", "model", "MiB", "from_pretrained in one process"),
        *({"ranks": 4}, "peak of a rank (MiB)", "plain peak (MiB)"),
    ),
)


def write(readme: Path, results: Path) -> None:
    """Put the lines between the marks; nothing else is touched."""
    page = readme.read_text()
    start, end = page.index(START) + len(START), page.index(END)
    readme.write_text(f"{page[:start]}{lines(results)}{page[end:]}")


def lines(results: Path) -> str:
    """A small table of what the tables have, and where and when they were measured."""
    found = [(pick, *cells(pick, results)) for pick in PICKS]
    rows = [row(pick, ours, theirs) for pick, ours, theirs in found if ours and theirs]
    used = [each for _, each, _ in found if each]
    where, when = ({each[fact]: None for each in used} for fact in ("machine", "commit"))
    said = f"{'; '.join(where)}; commit {', '.join(when)}"
    head = [" | ".join(HEAD).join(("| ", " |")), "|---|---:|---|---:|---:|"]
    return "\n".join([*head, *rows, "", f"Medians. {said}.", ""])


def cells(pick: Pick, results: Path) -> tuple[Row | None, Row | None]:
    path = results / f"{pick.table}.jsonl"
    table = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    ours, theirs = (
        next((each for each in table if wanted.items() <= each.items()), None)
        for _, wanted in (pick.ours, pick.theirs)
    )
    return ours, theirs


def row(pick: Pick, ours: Row, theirs: Row) -> str:
    mine, other = median(ours[pick.ours[0]]), median(theirs[pick.theirs[0]])
    numbers = (f"{text(mine)} {pick.unit}", pick.instead, f"{text(other)} {pick.unit}")
    return "| " + " | ".join((pick.what, *numbers, f"{mine / other:.2g}")) + " |"


def median(cell: Any) -> float:
    return float(cell["median"] if isinstance(cell, dict) else cell)
