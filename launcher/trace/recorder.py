"""What every rank did and when: one file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

python -m launcher run -n 4 --trace out.json train.py
python -m launcher trace out.json --png out.png

The form is Chrome's Trace Event Format: an object with "traceEvents", times in microseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import json
import os
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.launch_info import TRACE, LaunchInfo

VARIABLE = "DRUMLINE_TRACE"  # the same, under engines that only pass on variables
FLUSH_EVENTS = 64
# Colours that the viewers know by name (catapult, color_scheme.html): waiting apart from work.
COLOURS = {
    "start": "grey",
    "wait": "thread_state_iowait",
    "move": "rail_load",
    "work": "thread_state_running",
}


class Recorder:
    """Notes spans of one rank, and writes them to a file of its own. Safe to use from threads."""

    def __init__(self, folder: Path, info: LaunchInfo) -> None:
        self._rank = info.rank
        name = f"rank-{info.rank}-{os.getpid()}-{id(self):x}.jsonl"
        self._file = (folder / name).open("x", buffering=1 << 20)
        self._lock = threading.Lock()
        self._waiting: list[dict[str, Any]] = [clock()]
        self._pid = os.getpid()
        atexit.register(self.close)  # for those who do not come to close it
        self._calls: dict[str, int] = {}

    @contextlib.contextmanager
    def span(self, name: str, kind: str, **args: Any) -> Iterator[None]:
        """Note how long the body takes. kind: wait, work or move, which chooses the colour."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self._note(name, kind, start, time.monotonic_ns(), args)

    def follow(
        self, thing: Any, names: Iterable[str] | Mapping[str, str], kind: str, **always: Any
    ) -> None:
        """Note every call of these methods of thing from now on: its number, its bytes, and those
        of its arguments that are numbers or text.

        names: of methods, or from those to what a viewer shows. always: noted with each call.
        """
        shown = names if isinstance(names, Mapping) else {name: name for name in names}
        for name in shown:
            noting = self._followed(thing, name, shown[name], kind, always)
            setattr(thing, name, noting)

    def align(self, offset_ns: int) -> None:
        """Say what must be added to this host's clock to have that of rank 0's host.

        It holds for all that ranks record here, by whatever recorder.
        """
        self._keep({"offset_ns": offset_ns})

    def close(self) -> None:
        if os.getpid() == self._pid:  # a forked child has a copy, and nothing to say with it
            atexit.unregister(self.close)
            with self._lock:
                self._write()
                self._file.close()

    def _followed(
        self, thing: Any, name: str, shown: str, kind: str, always: dict[str, Any]
    ) -> Callable[..., Any]:
        method = getattr(thing, name)
        # Of the class: the method of an object may be native, and then has no signature.
        parameters = list(inspect.signature(getattr(type(thing), name)).parameters)[1:]

        @functools.wraps(method)
        def noting(*args: Any, **named: Any) -> Any:
            start = time.monotonic_ns()
            try:
                return method(*args, **named)
            finally:
                end = time.monotonic_ns()
                number = self._calls[shown] = self._calls.get(shown, 0) + 1
                given = {**dict(zip(parameters, args, strict=False)), **named}
                details = {**always, "number": number, **_nbytes(args), **_plain(given)}
                self._note(shown, kind, start, end, details)

        return noting

    def _note(self, name: str, kind: str, start: int, end: int, args: dict[str, Any]) -> None:
        row = threading.get_native_id()
        self._keep(event(name, kind, start, end - start, self._rank, row, args))

    def _keep(self, record: dict[str, Any]) -> None:
        with self._lock:
            self._waiting.append(record)
            if len(self._waiting) >= FLUSH_EVENTS:
                self._write()

    def _write(self) -> None:
        """Turned into text here, many at once: a call that is timed should not pay for it."""
        if not self._file.closed:
            self._file.write("".join(json.dumps(record) + "\n" for record in self._waiting))
            self._file.flush()
        self._waiting.clear()


def event(
    name: str, kind: str, start: int, took: int, rank: int, row: int, args: dict[str, Any]
) -> dict[str, Any]:
    """A complete event of the Trace Event Format, from times in nanoseconds."""
    times = {"ph": "X", "ts": start / 1000, "dur": took / 1000}
    return {"name": name, "cat": kind, **times, "pid": rank, "tid": row, "args": args} | {
        "cname": COLOURS[kind]
    }


def clock() -> dict[str, Any]:
    """Which clock times are read from here, that of one boot of one kernel, and how far behind the
    time of day it is: the first line of every recording."""
    names = ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/time")
    with contextlib.suppress(OSError):
        boot, namespace = Path(names[0]).read_text().strip(), os.readlink(names[1])
        return {"clock": f"{boot} {namespace}", "day_ns": time.time_ns() - time.monotonic_ns()}
    return {"clock": platform.node(), "day_ns": time.time_ns() - time.monotonic_ns()}


def recorder(info: LaunchInfo) -> Recorder | None:
    """A new recorder for this rank, if its launch is traced; what is not traced costs nothing."""
    if not info.is_traced:
        return None
    folder = Path(info.extras[TRACE])
    if folder.is_dir():
        return Recorder(folder, info)
    warnings.warn(
        f"rank {info.rank}: the folder {folder}, where the trace is put together, is not on this "
        "host, so what this rank does is not in it. Give --trace a file in a folder that all hosts "
        "share, or trace each host by itself with --launcher torchrun.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


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


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that say something in a line: src=1, op="sum"."""
    return {name: value for name, value in given.items() if isinstance(value, (bool, int, str))}
