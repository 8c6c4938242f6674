"""What every rank did and when: one file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

python -m launcher run -n 4 --trace out.json train.py
python -m launcher trace out.json --png out.png

The form is Chrome's Trace Event Format: an object with "traceEvents", times in microseconds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from launcher.info import LaunchInfo

T = TypeVar("T")
VARIABLE = "DRUMLINE_TRACE"  # the same, under engines that only pass on variables
EXTRA = "trace"  # in LaunchInfo.extras: the folder in which each rank leaves what it recorded
FLUSH_EVENTS = 64
LAUNCHER = -1  # the row of the launcher itself, beside those of ranks
# Colours that the viewers know by name (catapult, color_scheme.html): waiting apart from work.
COLOURS = {"wait": "thread_state_iowait", "work": "thread_state_running", "move": "rail_load"}


class Recorder:
    """Notes spans of one rank, and writes them to a file of its own. Safe to use from threads."""

    def __init__(self, folder: Path, info: LaunchInfo) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rank = info.rank
        name = f"rank-{info.rank}-{os.getpid()}-{id(self):x}.jsonl"
        self._file = (folder / name).open("x", buffering=1 << 20)
        self._lock = threading.Lock()
        self._waiting = 0
        self._rows: dict[int, int] = {}
        self._calls: dict[str, int] = {}

    @contextlib.contextmanager
    def span(self, name: str, kind: str, **args: Any) -> Iterator[None]:
        """Note how long the body takes. kind: wait, work or move, which chooses the colour."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self._note(name, kind, start, time.monotonic_ns(), args)

    def follow(self, thing: Any, names: Iterable[str], kind: str) -> None:
        """Note every call of these methods of thing from now on, with number and bytes."""
        for name in names:
            setattr(thing, name, self._followed(getattr(thing, name), kind))

    def align(self, offset_ns: int) -> None:
        """Say what must be added to this host's clock to have that of rank 0's host."""
        self._write({"offset_ns": offset_ns})

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _followed(self, method: Callable[..., T], kind: str) -> Callable[..., T]:
        name = method.__name__

        @functools.wraps(method)
        def noting(*args: Any, **named: Any) -> T:
            start = time.monotonic_ns()
            try:
                return method(*args, **named)
            finally:
                number = self._calls[name] = self._calls.get(name, 0) + 1
                details = {"number": number, **_nbytes(args)}
                self._note(name, kind, start, time.monotonic_ns(), details)

        return noting

    def _note(self, name: str, kind: str, start: int, end: int, args: dict[str, Any]) -> None:
        self._write(_event(name, kind, start, end - start, self._rank, self._row(), args))

    def _row(self) -> int:
        """A small number for this thread; the first to record is row 0."""
        return self._rows.setdefault(threading.get_ident(), len(self._rows))

    def _write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record) + "\n"
        with self._lock:
            if self._file.closed:
                return
            self._file.write(line)
            self._waiting += 1
            if self._waiting >= FLUSH_EVENTS:
                self._waiting = 0
                self._file.flush()


def _event(
    name: str, kind: str, start: int, took: int, rank: int, row: int, args: dict[str, Any]
) -> dict[str, Any]:
    """A complete event of the Trace Event Format, from times in nanoseconds."""
    times = {"ph": "X", "ts": start / 1000, "dur": took / 1000}
    return {"name": name, "cat": kind, **times, "pid": rank, "tid": row, "args": args} | {
        "cname": COLOURS[kind]
    }


def recorder(info: LaunchInfo) -> Recorder | None:
    """A new recorder for this rank, if its launch is traced; what is not traced costs nothing."""
    return Recorder(Path(info.extras[EXTRA]), info) if EXTRA in info.extras else None


@contextlib.contextmanager
def whole(info: LaunchInfo, name: str) -> Iterator[None]:
    """Note the body as one span of this rank, if its launch is traced."""
    noting = recorder(info)
    if noting is None:
        yield
        return
    with contextlib.closing(noting), noting.span(name, "work"):
        yield


def _nbytes(args: tuple[Any, ...]) -> dict[str, int]:
    """The size of the first argument that has one: bytes, or anything with nbytes."""
    for value in args[:1]:
        nbytes = len(value) if isinstance(value, bytes) else getattr(value, "nbytes", None)
        if nbytes is not None:
            return {"bytes": nbytes}
    return {}


@contextlib.contextmanager
def gathered(out: Path) -> Iterator[Path]:
    """A folder for the recordings of a launch, merged into out at the end of the body.

    Raises OSError at once if out cannot be written.
    """
    out.open("a").close()
    launcher = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix="drumline-trace-"))
    start = time.monotonic_ns()
    try:
        yield folder
    finally:
        if os.getpid() == launcher:  # a forked rank that unwinds through here has nothing to do
            took = time.monotonic_ns() - start
            merge(folder, out, [_event("launch", "work", start, took, LAUNCHER, 0, {})])
            shutil.rmtree(folder)


def merge(folder: Path, out: Path, launch: Iterable[dict[str, Any]] = ()) -> int:
    """Write every rank's events to one file, on rank 0's clock; how many there are.

    launch: events of the launcher itself. Raises OSError if out cannot be written.
    """
    events = list(launch)
    for path in sorted(folder.glob("rank-*.jsonl")):
        events += _aligned(path)
    ranks = sorted({event["pid"] for event in events})
    events += [_row_name(rank) for rank in ranks]
    events.sort(key=lambda event: event.get("ts", 0))
    beside = out.with_name(out.name + ".part")
    beside.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
    beside.replace(out)
    return len(events)


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


def problems(trace: Any) -> list[str]:
    """What is wrong with a trace, by the Trace Event Format; empty if a viewer will open it."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["there is no list of traceEvents"]
    found = []
    for number, event in enumerate(trace["traceEvents"]):
        missing = {"name", "ph", "pid"} - event.keys()
        if event.get("ph") == "X":
            missing |= {"ts", "dur", "tid"} - event.keys()
            if event.get("dur", 0) < 0:
                found.append(f"event {number} ends before it starts")
        if missing:
            found.append(f"event {number} has no {', '.join(sorted(missing))}")
    return found
