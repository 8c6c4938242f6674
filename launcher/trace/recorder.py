"""Timeline recording: one file of every rank's calls for Perfetto (ui.perfetto.dev).

python -m launcher run -n 4 --trace out.json train.py
python -m launcher trace out.json --png out.png

The format is Chrome's Trace Event Format: an object with "traceEvents", times in microseconds.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.launch_info import TRACE, LaunchInfo
from launcher.system import linux

VARIABLE = "DRUMLINE_TRACE"  # the folder for recordings, under a backend launcher
FLUSH_EVENTS = 64
# Colours that the viewers know by name (catapult, color_scheme.html).
COLOURS = {
    "start": "grey",
    "wait": "thread_state_iowait",
    "move": "rail_load",
    "work": "thread_state_running",
}


class Recorder:
    """Recorder of one rank's spans, into a file of its own. Thread-safe."""

    def __init__(self, folder: Path, info: LaunchInfo) -> None:
        self._rank = info.rank
        name = f"rank-{info.rank}-{os.getpid()}-{os.urandom(4).hex()}.jsonl"
        self._file = (folder / name).open("x", buffering=1 << 20)
        self._lock = threading.Lock()
        self._buffered: list[dict[str, Any]] = [clock()]
        self._pid = os.getpid()
        atexit.register(self.close)  # unless it is closed before
        self._calls: dict[str, int] = {}

    @contextlib.contextmanager
    def span(self, name: str, kind: str, **args: Any) -> Iterator[None]:
        """Record how long the body takes. kind: wait, work or move, which selects the colour."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self._add_span(name, kind, start, time.monotonic_ns(), args)

    def follow(
        self, target: Any, names: Iterable[str] | Mapping[str, str], kind: str, **extra_args: Any
    ) -> None:
        """Record every call of these methods of target from now on.

        With each call: its number, its bytes, those of its arguments that are numbers or text, and
        extra_args. names: of methods, or method -> the name that a viewer shows.
        """
        labels = names if isinstance(names, Mapping) else {name: name for name in names}
        for name, label in labels.items():
            # Of the class: the method of an object may be native, and then has no signature.
            parameters = list(inspect.signature(getattr(type(target), name)).parameters)[1:]
            method = getattr(target, name)
            setattr(target, name, self.recorded(method, parameters, label, kind, extra_args))

    def recorded(
        self,
        method: Callable[..., Any],
        parameters: Sequence[str],
        label: str,
        kind: str,
        extra_args: Mapping[str, Any],
    ) -> Callable[..., Any]:
        """The method, with every call recorded as follow() does. parameters: their names."""

        @functools.wraps(method)
        def recorded(*args: Any, **named: Any) -> Any:
            start = time.monotonic_ns()
            try:
                return method(*args, **named)
            finally:
                end = time.monotonic_ns()
                number = self._calls[label] = self._calls.get(label, 0) + 1
                arguments = {**dict(zip(parameters, args, strict=False)), **named}
                short = {k: v for k, v in arguments.items() if isinstance(v, (bool, int, str))}
                sizes = {**_nbytes(args), **_num_tokens(arguments)}
                details = {**extra_args, "number": number, **sizes, **short}
                self._add_span(label, kind, start, end, details)

        return recorded

    def align(self, offset_ns: int) -> None:
        """Record the offset from this host's clock to that of rank 0's host.

        It holds for everything that ranks record on this host, by any recorder.
        """
        self._add({"offset_ns": offset_ns})

    def close(self) -> None:
        """Write the rest. A forked child has a copy of the recorder, which must not write."""
        if os.getpid() == self._pid:
            atexit.unregister(self.close)
            with self._lock:
                self._write(is_last=True)

    def _add_span(self, name: str, kind: str, start: int, end: int, args: dict[str, Any]) -> None:
        thread = threading.get_native_id()
        self._add(event(name, kind, start, end - start, self._rank, thread, args))

    def _add(self, record: dict[str, Any]) -> None:
        with self._lock:
            self._buffered.append(record)
            if len(self._buffered) >= FLUSH_EVENTS:
                self._write()

    def _write(self, is_last: bool = False) -> None:
        """Encode and write what is buffered; many at once, to keep the calls themselves fast.

        Warns and closes the file if that fails: what is recorded has its own result.
        """
        records, self._buffered = self._buffered, []
        if self._file.closed:
            return
        try:
            self._file.write("".join(json.dumps(record) + "\n" for record in records))
            self._file.flush()
            if is_last:
                self._file.close()
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.close()
            warnings.warn(
                f"{rank_name(self._rank)}: the trace will lack the calls from here on, for its "
                f"recording cannot be written: {error}: {self._file.name}. Free some space.",
                RuntimeWarning,
                stacklevel=2,
            )


def rank_name(rank: int) -> str:
    """The name of a rank in viewers; -1 is the launcher."""
    return f"rank {rank}" if rank >= 0 else "launcher"


def event(
    name: str, kind: str, start: int, duration: int, rank: int, thread: int, args: dict[str, Any]
) -> dict[str, Any]:
    """A complete event of the Trace Event Format, from times in nanoseconds."""
    times = {"ph": "X", "ts": start / 1000, "dur": duration / 1000}
    return {"name": name, "cat": kind, **times, "pid": rank, "tid": thread, "args": args} | {
        "cname": COLOURS[kind]
    }


def clock() -> dict[str, Any]:
    """The first line of every recording: the identity of its clock, and the clock's offset.

    clock: of one boot of one kernel. day_ns: how far it is behind the time of day.
    """
    day_ns = time.time_ns() - time.monotonic_ns()
    return {"clock": linux.clock_id() or platform.node(), "day_ns": day_ns}


def recorder(info: LaunchInfo) -> Recorder | None:
    """A new recorder for this rank; None if its launch is not traced."""
    if not info.is_traced:
        return None
    folder = Path(info.extras[TRACE])
    if folder.is_dir():
        return Recorder(folder, info)
    warnings.warn(
        f"rank {info.rank}: the folder {folder}, where the trace is merged, is not on this "
        "host, so the trace will lack this rank. Give --trace a file in a folder that all hosts "
        "share, or trace each host by itself with --launcher torchrun.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


@contextlib.contextmanager
def recording_span(info: LaunchInfo, name: str) -> Iterator[None]:
    """Record the body as one span of this rank, if its launch is traced."""
    rank_recorder = recorder(info)
    if rank_recorder is None:
        yield
        return
    with contextlib.closing(rank_recorder), rank_recorder.span(name, "work"):
        yield


def _nbytes(args: tuple[Any, ...]) -> dict[str, int]:
    """The size of the first argument that has one: bytes, or anything with nbytes."""
    for value in args[:1]:
        nbytes = len(value) if isinstance(value, bytes) else getattr(value, "nbytes", None)
        if nbytes is not None:
            return {"bytes": nbytes}
    return {}


def _num_tokens(arguments: Mapping[str, Any]) -> dict[str, int]:
    """The tokens that a call of a model is to read."""
    count = getattr(arguments.get("input_ids"), "numel", None)
    return {} if count is None else {"tokens": count()}
