"""One file of all that the ranks of a launch recorded, on one clock.

The form is Chrome's Trace Event Format: an object with "traceEvents", times in microseconds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.trace.recorder import clock, event

LAUNCHER = -1  # the row of the launcher itself, beside those of ranks


@contextlib.contextmanager
def gathered(out: Path, nnodes: int = 1) -> Iterator[Path]:
    """A folder for the recordings of a launch, merged into out at the end of the body.

    For several nodes it lies beside out, where they are likelier to find it than in one's /tmp.
    Raises OSError at once if out cannot be written.
    """
    out.open("a").close()
    launcher, beside = os.getpid(), out.absolute().parent
    prefix = f"drumline-trace-{launcher}-"
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=beside if nnodes > 1 else None))
    start = time.monotonic_ns()
    try:
        yield folder
    finally:
        if os.getpid() == launcher:  # a forked rank that unwinds through here has nothing to do
            took = time.monotonic_ns() - start
            merge(folder, out, [event("launch", "start", start, took, LAUNCHER, 0, {})])
            shutil.rmtree(folder)


def merge(folder: Path, out: Path, launch: Iterable[dict[str, Any]] = ()) -> int:
    """Write every rank's events to one file, on rank 0's clock; how many there are.

    launch: events of the launcher itself. Raises OSError if out cannot be written.
    """
    recordings = [_recording(path) for path in sorted(folder.glob("rank-*.jsonl"))]
    events = _aligned([*filter(None, recordings), [clock(), *launch]])
    events += list(_starting(events))
    events += list(_numbered(events))
    events += [_row_name(rank) for rank in sorted({one["pid"] for one in events})]
    write({"traceEvents": events}, out)
    return len(events)


def write(trace: dict[str, Any], out: Path) -> None:
    """Put a trace into a file, in order of time. Raises OSError if it cannot be written."""
    trace["traceEvents"].sort(key=lambda one: float(one.get("ts", 0)))
    beside = out.with_name(out.name + ".part")
    beside.write_text(json.dumps({**trace, "displayTimeUnit": "ns"}))
    beside.replace(out)


def read(files: Sequence[Path]) -> dict[str, Any]:
    """One trace of those that the nodes of a launch have written, each with its own launcher.

    Raises ValueError if one of them is none that a viewer opens.
    """
    events: list[dict[str, Any]] = []
    for file in files:
        lowest = min([0, *(one["pid"] for one in events)])
        try:
            trace = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file} is no trace: {error}") from error
        if wrong := problems(trace):
            raise ValueError(f"{file} is no trace: {'; '.join(wrong[:3])}")
        for one in trace["traceEvents"]:
            events.append({**one, "pid": one["pid"] + (lowest if one["pid"] < 0 else 0)})
    return {"traceEvents": events}


def _starting(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each rank, from the command to its first own line: what the launcher took."""
    launched = [one["ts"] for one in events if one["pid"] == LAUNCHER]
    firsts: dict[int, dict[str, Any]] = {}
    for one in events:
        if one["pid"] != LAUNCHER and one["ts"] < firsts.get(one["pid"], {"ts": math.inf})["ts"]:
            firsts[one["pid"]] = one
    for start in launched:
        for rank, first in firsts.items():
            took = max(int((first["ts"] - start) * 1000), 0)
            yield event("starting", "start", round(start * 1000), took, rank, first["tid"], {})


def _numbered(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Give each rank's threads small numbers, the first to be seen 0; the names of their rows."""
    rows: dict[tuple[int, int], int] = {}
    for one in sorted(events, key=lambda one: float(one["ts"])):
        seen = sum(rank == one["pid"] for rank, _ in rows)
        one["tid"] = rows.setdefault((one["pid"], one["tid"]), seen)
    for (rank, _), row in rows.items():
        name = f"thread {row}" if row else "first thread"
        yield {
            "name": "thread_name",
            "ph": "M",
            "pid": rank,
            "tid": row,
            "args": {"name": name},
        }


def _recording(path: Path) -> list[dict[str, Any]]:
    """What a rank wrote. A line cut off by its death is left out."""
    records = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def _aligned(recordings: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The events of all on rank 0's clock. Each recording begins with which clock it reads."""
    offsets, events = _offsets(recordings), []
    for which, *records in recordings:
        offset_us = offsets[which["clock"]] / 1000
        events += [one | {"ts": one["ts"] + offset_us} for one in records if "ts" in one]
    return events


def _offsets(recordings: list[list[dict[str, Any]]]) -> dict[str, float]:
    """What to add to each clock to have rank 0's: as Coordinators measured it, whoever of that host
    did so; by the time of day where none has. If nobody has, it is the time of day that is shown,
    which the files of several launchers share."""
    measured: dict[str, list[int]] = {}
    days: dict[str, int] = {}
    for which, *records in recordings:
        days.setdefault(which["clock"], which["day_ns"])
        found = measured.setdefault(which["clock"], [])
        found += [one["offset_ns"] for one in records if "offset_ns" in one]
    known = {name: statistics.median(found) for name, found in measured.items() if found}
    of_rank_0 = [days[name] - offset for name, offset in known.items()] or [0]
    return {name: known.get(name, day - of_rank_0[0]) for name, day in days.items()}


def _row_name(rank: int) -> dict[str, Any]:
    name = "launcher" if rank < 0 else f"rank {rank}"
    return {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": name}}


# What each kind of event must have, by the Trace Event Format; ts and dur are numbers.
NEEDED = {
    "X": {"name", "ph", "pid", "tid", "ts", "dur"},
    "M": {"name", "ph", "pid", "args"},
}
ROUNDING_US = 1.0


def problems(trace: Any) -> list[str]:
    """What is wrong with a trace, by the Trace Event Format; empty if a viewer will open it."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["there is no list of traceEvents"]
    events = trace["traceEvents"]
    found = [f"event {n} {wrong}" for n, one in enumerate(events) for wrong in _wrong(one)]
    return found or list(_crossing(events))


def _wrong(one: Any) -> Iterator[str]:
    kind = one.get("ph") if isinstance(one, dict) else None
    if kind not in NEEDED:
        yield f"is of no kind that is written here: {kind!r}"
        return
    missing = NEEDED[kind] - one.keys()
    if missing:
        yield f"has no {', '.join(sorted(missing))}"
    if not isinstance(one.get("pid", 0), int):
        yield f"has {one['pid']!r} for pid, which is no whole number"
    for name in ("ts", "dur"):
        if not isinstance(one.get(name, 0), (int, float)):
            yield f"has {one[name]!r} for {name}, which is no number"
        elif one.get("dur", 0) < 0 and name == "dur":
            yield "ends before it starts"


def _crossing(events: list[dict[str, Any]]) -> Iterator[str]:
    """Spans of one thread must lie within each other or apart: else viewers draw them wrongly."""
    spans = [one for one in events if one["ph"] == "X"]
    around: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for one in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
        open_ones = around.setdefault((one["pid"], one["tid"]), [])
        while open_ones and _end(open_ones[-1]) <= one["ts"] + ROUNDING_US:
            open_ones.pop()
        if open_ones and _end(one) > _end(open_ones[-1]) + ROUNDING_US:
            where = f"in a thread of rank {one['pid']}"
            yield f"{one['name']} begins within {open_ones[-1]['name']} and ends after it, {where}"
        open_ones.append(one)


def _end(one: dict[str, Any]) -> float:
    return float(one["ts"] + one["dur"])
