"""Merge the recordings of all ranks of a launch into one trace, on one clock.

The format is Chrome's Trace Event Format: an object with "traceEvents", times in microseconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import LaunchError
from launcher.records.temporary_folder import temporary_folder
from launcher.system import linux
from launcher.trace.recorder import COLOURS, clock, event, rank_name

log = logging.getLogger("launcher")
LAUNCHER = -1  # the "rank" of the launcher itself
MAX_TIME_US = 1e18  # of an event: 30,000 years


@contextlib.contextmanager
def recordings_merged_into(out: Path, nnodes: int = 1) -> Iterator[Path]:
    """A folder for the recordings of a launch, merged into out at the end of the body.

    For several nodes it is in the folder of out, which they are more likely to share than /tmp.
    Raises OSError at once if out cannot be written. Raises LaunchError if it could not be in the
    end, unless the body has raised already; that is logged then.
    """
    if not (out.is_fifo() and os.access(out, os.W_OK)):  # whose reader would end with this writer
        out.open("a").close()
    launcher, parent = os.getpid(), out.absolute().parent if nnodes > 1 else None
    with temporary_folder("drumline-trace-", parent) as (folder, _):
        start, has_failed = time.monotonic_ns(), True
        try:
            yield folder
            has_failed = False
        finally:
            if os.getpid() == launcher:  # not in a forked rank that unwinds through here
                duration = time.monotonic_ns() - start
                launch = event("launch", "start", start, duration, LAUNCHER, 0, {})
                _merge_launch(folder, out, launch, has_failed)


def _merge_launch(folder: Path, out: Path, launch: dict[str, Any], has_failed: bool) -> None:
    """Merge. A failure of the launch itself is not hidden."""
    try:
        merge(folder, out, [launch])
    except OSError as error:
        problem = f"the trace could not be written: {error}. Free some space, or name another file."
        if not has_failed:
            raise LaunchError(f"The ranks ended well, but {problem}") from error
        log.error("%s", problem)


def merge(folder: Path, out: Path, launch: Iterable[dict[str, Any]] = ()) -> int:
    """Write every rank's events to one file, on rank 0's clock; return their number.

    launch: events of the launcher itself. Raises OSError if out cannot be written.
    """
    recordings = [_recording(path) for path in sorted(folder.glob("rank-*.jsonl"))]
    events = _aligned([*filter(None, recordings), [clock(), *launch]])
    events += list(_start_events(events))
    events += list(_renumber_threads(events))
    events += [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": rank_name(rank)}}
        for rank in sorted({event["pid"] for event in events})
    ]
    write({"traceEvents": events}, out)
    return len(events)


def write(trace: dict[str, Any], out: Path) -> None:
    """Write a trace to a file, ordered by time. Raises OSError if it cannot be written.

    A file is replaced as a whole; a device or a pipe, such as /dev/stdout, is written to.
    """
    trace["traceEvents"].sort(key=lambda event: float(event.get("ts", 0)))
    is_file = out.is_file() or not out.exists()
    part = out.with_name(out.name + ".part") if is_file else out
    try:
        part.write_text(json.dumps({**trace, "displayTimeUnit": "ns"}))
        part.replace(out)
    except OSError as error:
        if is_file:
            part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(out)) from error  # a write names no file


def read(files: Sequence[Path]) -> dict[str, Any]:
    """Join the traces of several nodes, each with its own launcher.

    Raises ValueError for a file that is not a trace.
    """
    events: list[dict[str, Any]] = []
    for file in files:
        lowest = min([0, *(event["pid"] for event in events)])
        try:
            with linux.open_now(file) as text:
                node_events = json.load(text)["traceEvents"]
            for event in node_events:
                _check(event)
                events.append({**event, "pid": event["pid"] + (lowest if event["pid"] < 0 else 0)})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{file} is not a trace: {type(error).__name__}: {error}") from error
    return {"traceEvents": events}


def _check(event: dict[str, Any]) -> None:
    """Raise ValueError, KeyError or TypeError for an event that this package would not write."""
    if event["ph"] not in ("X", "M") or type(event["pid"]) is not int:
        raise ValueError(f"an event of an unknown kind: {event}")
    # A TypeError if one of them is not a number; NaN is not below.
    if not all(abs(event.get(name, 0)) < MAX_TIME_US for name in ("ts", "dur")):
        raise ValueError(f"an event out of all time: {event!s:.200}")
    if event["ph"] == "X":
        if missing := {"name", "cat", "tid", "ts", "dur"} - event.keys():
            raise ValueError(f"an event without {', '.join(sorted(missing))}: {event}")
        kinds = [type(event[name]) for name in ("name", "cat", "tid")]
        if kinds != [str, str, int] or not isinstance(event.get("args", {}), dict):
            raise ValueError(f"a name, kind, thread or arguments of another type: {event!s:.200}")
        if event["cat"] not in COLOURS:
            raise ValueError(f"an event that is not one of {', '.join(COLOURS)}: {event!s:.200}")
        if not event["dur"] >= 0 * event["ts"]:
            raise ValueError(f"an event that ends before it starts: {event}")


def _start_events(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each rank a span from the start of the launcher to its own first event."""
    starts_us = [event["ts"] for event in events if event["pid"] == LAUNCHER]
    first_events: dict[int, dict[str, Any]] = {}
    for recorded in sorted(events, key=lambda event: float(event["ts"])):
        if recorded["pid"] != LAUNCHER:
            first_events.setdefault(recorded["pid"], recorded)
    for start_us in starts_us:
        for rank, first in first_events.items():
            duration = max(int((first["ts"] - start_us) * 1000), 0)
            starting = event("starting", "start", 0, duration, rank, first["tid"], {})
            yield starting | {"ts": start_us}  # not by way of nanoseconds, which rounds it anew


def _renumber_threads(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Number each rank's threads in order of appearance, from 0; return their names as events."""
    numbers: dict[tuple[int, int], int] = {}
    for recorded in sorted(events, key=lambda event: float(event["ts"])):
        known_threads = sum(rank == recorded["pid"] for rank, _ in numbers)
        recorded["tid"] = numbers.setdefault((recorded["pid"], recorded["tid"]), known_threads)
    for (rank, _), number in numbers.items():
        name = f"thread {number}" if number else "first thread"
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": name}}


def _recording(path: Path) -> list[dict[str, Any]]:
    """The records of a rank, without a line that its death has cut off."""
    records = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def _aligned(recordings: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """All events on rank 0's clock. The first record of each recording identifies its clock."""
    offsets, events = _offsets(recordings), []
    for header, *records in recordings:
        offset_us = offsets[header["clock"]] / 1000
        events += [rec | {"ts": rec["ts"] + offset_us} for rec in records if "ts" in rec]
    return events


def _offsets(recordings: list[list[dict[str, Any]]]) -> dict[str, float]:
    """The offset from each clock to rank 0's, in nanoseconds.

    As Coordinators of that host measured it; without one, by the time of day. If no host has
    measured, times are shown by the time of day, which the files of several launchers share.
    """
    measured: dict[str, list[int]] = {}
    days: dict[str, int] = {}
    for header, *records in recordings:
        days.setdefault(header["clock"], header["day_ns"])
        samples = measured.setdefault(header["clock"], [])
        samples += [record["offset_ns"] for record in records if "offset_ns" in record]
    offsets = {name: statistics.median(samples) for name, samples in measured.items() if samples}
    day_of_rank_0 = [days[name] - offset for name, offset in offsets.items()] or [0]
    return {name: offsets.get(name, day - day_of_rank_0[0]) for name, day in days.items()}
