"""One file of all that the ranks of a launch recorded, on one clock.

The form is Chrome's Trace Event Format: an object with "traceEvents", times in microseconds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from launcher.tracing import event

LAUNCHER = -1  # the row of the launcher itself, beside those of ranks


@contextlib.contextmanager
def gathered(out: Path) -> Iterator[Path]:
    """A folder for the recordings of a launch, merged into out at the end of the body.

    Raises OSError at once if out cannot be written.
    """
    out.open("a").close()
    launcher = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix=f"drumline-trace-{launcher}-"))
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
    events = list(launch)
    for path in sorted(folder.glob("rank-*.jsonl")):
        events += _aligned(path)
    events += list(_starting(events))
    events += list(_numbered(events))
    events += [_row_name(rank) for rank in sorted({one["pid"] for one in events})]
    events.sort(key=lambda one: float(one.get("ts", 0)))
    beside = out.with_name(out.name + ".part")
    beside.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
    beside.replace(out)
    return len(events)


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


def _aligned(path: Path) -> list[dict[str, Any]]:
    """The events of one file on rank 0's clock. A line cut off by the rank's death is left out."""
    events, offset_ns = [], 0
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "offset_ns" in record:
            offset_ns = record["offset_ns"]
        else:
            events.append(record)
    return [event | {"ts": event["ts"] + offset_ns / 1000} for event in events]


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
