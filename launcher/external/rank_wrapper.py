"""The wrapper process around each rank that a backend launcher starts.

It labels what the rank prints, and sees how it ends, for a backend launcher may report neither.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import itertools
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO, TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any

from launcher import timings
from launcher.records.pipe_records import LineBuffer
from launcher.runtime import rank_environment
from launcher.runtime.output import LINE_NBYTES, prefix
from launcher.runtime.rank_state import failed_on_request, without_launcher
from launcher.system import descendants, linux
from launcher.system.stop_signals import STOP_SIGNALS

CHUNK = select.PIPE_BUF  # a pipe takes this much atomically, and so not within another's line
PIPE_NBYTES = 1 << 20  # that a pipe holds at most: 16 pages of up to 64 KiB (pipe(7))
STREAMS = {"out": 1, "err": 2}
Pipes = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class RankExit:
    """The end of a rank. identity: its rank and local_rank; empty if it did not report them."""

    identity: dict[str, int]
    exit_code: int
    failure: dict[str, Any]


def run_wrapped(work: Callable[[Callable[..., None]], int], logs: Path) -> int | RankExit:
    """Run work in a child, the rank: there, return its exit code; here, how the rank ended.

    work gets a function by which it reports its rank and local_rank. logs: the folder for
    rank-0.out and so on, if it exists.
    """
    pipes = {name: os.pipe() for name in (*STREAMS, "identity")}
    crash_fd = os.memfd_create("crash")
    wrapper = os.getpid()
    # Both sides unblock once they are ready: the rank when it can die by a signal, the wrapper when
    # it can pass one on.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    rank_pid = os.fork()
    if rank_pid == 0:
        return work(_setup_child(wrapper, pipes, crash_fd))
    return _supervise(rank_pid, pipes, crash_fd, logs)


def _setup_child(wrapper: int, pipes: Pipes, crash_fd: int) -> Callable[..., None]:
    # Its own process group: a signal to the backend launcher's group must reach it only once,
    # through the wrapper.
    os.setpgid(0, 0)
    linux.die_with(wrapper)
    for name, number in STREAMS.items():
        os.dup2(pipes[name][1], number)
    _, identity_fd = pipes.pop("identity")
    for fd in sum(pipes.values(), ()):
        os.close(fd)
    if isinstance(sys.stdout, TextIOWrapper):  # a rank that is killed has printed its lines
        sys.stdout.reconfigure(line_buffering=True)
    linux.line_buffer_c_stdout()
    faulthandler.enable(file=crash_fd)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def report_identity(**identity: int) -> None:
        os.write(identity_fd, json.dumps(identity).encode())
        os.close(identity_fd)

    return report_identity


def _supervise(rank_pid: int, pipes: Pipes, crash_fd: int, logs: Path) -> RankExit:
    linux.set_subreaper(True)
    signals: dict[int, float] = {}
    for number in STOP_SIGNALS:
        signal.signal(number, functools.partial(_pass_on, rank_pid, signals))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    for _, write_end in pipes.values():
        os.close(write_end)
    streams, identity_fd = {pipes[name][0]: name for name in STREAMS}, pipes["identity"][0]
    early = _read_early(streams, identity_fd)
    identity = json.loads(os.read(identity_fd, 1000) or b"{}")
    if identity:
        linux.set_process_name(f"wrapper-{identity['rank']}")
    with contextlib.suppress(OSError):  # nobody reads any longer: the rank will find that out
        _forward(rank_pid, early, streams, identity.get("rank"), logs)
    for name in STREAMS:
        os.close(pipes[name][0])
    _, status = os.waitpid(rank_pid, 0)
    rank_exit = _rank_exit(identity, rank_pid, os.waitstatus_to_exitcode(status), signals, crash_fd)
    descendants.end_all(timings.TIMINGS.orphan_grace_s)
    return rank_exit


def _pass_on(
    rank_pid: int, signals: dict[int, float], number: int, _frame: FrameType | None
) -> None:
    """Pass a signal on to the rank, and note when it came first."""
    signals.setdefault(number, time.monotonic())
    linux.send_signal(rank_pid, number)
    linux.send_signal(rank_pid, signal.SIGCONT)  # it could not react while it is suspended


def _rank_exit(
    identity: dict[str, int], pid: int, status: int, signals: dict[int, float], crash_fd: int
) -> RankExit:
    ended_s, code = time.monotonic(), linux.shell_exit_code(status)
    signalled_s = min(signals.values(), default=None)
    dump = os.pread(crash_fd, 1 << 20, 0).decode(errors="replace").splitlines()
    failure = {
        **identity,
        "pid": pid,
        "time_s": ended_s,
        "host": socket.gethostname(),
        "exit_code": code,
        "signal": max(0, -status),
        "traceback": without_launcher(dump),
        "ended_by_launcher": failed_on_request(
            ended_s, signalled_s, reacted=status >= 0 or -status in signals
        ),
    }
    return RankExit(identity, code, failure)


def _read_early(streams: Iterable[int], identity_fd: int) -> list[tuple[int, bytes]]:
    """The data of each stream until the rank knows who it is, or has ended: MPI may print much."""
    open_fds, early = set(streams), []
    while identity_fd not in (ready := select.select([*open_fds, identity_fd], [], [])[0]):
        early += [(fd, os.read(fd, PIPE_NBYTES)) for fd in ready]
        open_fds -= {fd for fd, data in early if not data}
    return early


def _forward(
    rank_pid: int,
    early: Iterable[tuple[int, bytes]],
    streams: dict[int, str],
    rank: int | None,
    logs: Path,
) -> None:
    """Forward whole lines until the rank has ended, even where its children hold its streams."""
    buffers = {fd: LineBuffer() for fd in streams}
    pidfd = os.pidfd_open(rank_pid)
    with contextlib.closing(FileIO(pidfd)), _log_files(logs, rank) as files:
        for fd, data in itertools.chain(early, _read(streams, pidfd)):
            _log(files, streams[fd], data)
            lines = buffers[fd].feed(data)
            is_over = not data or buffers[fd].nbytes > LINE_NBYTES
            rest = [buffers[fd].take()] if is_over and buffers[fd].nbytes else []
            _print(streams[fd], rank, [*lines, *rest])


def _read(streams: dict[int, str], pidfd: int) -> Iterator[tuple[int, bytes]]:
    """The data of each stream as it comes; empty at its end."""
    open_fds, has_ended = set(streams), False
    while open_fds and not has_ended:
        has_ended = pidfd in select.select([*open_fds, pidfd], [], [])[0]
        # Of a rank that has ended one read takes all: its children may print for ever.
        for fd in select.select([*open_fds], [], [], 0)[0]:
            data = os.read(fd, PIPE_NBYTES)
            yield fd, data
            open_fds -= set() if data else {fd}
    yield from ((fd, b"") for fd in open_fds)


def _log(files: dict[str, FileIO], stream: str, data: bytes) -> None:
    """Write to the log of a stream; if that fails, end the log and say so: the rank goes on."""
    try:
        while stream in files and data:
            data = data[files[stream].write(data) :]
    except OSError as error:
        _report_unwritable(str(files.pop(stream).name), error)


def _report_unwritable(name: str, error: OSError) -> None:
    line = f"[launcher] {name} cannot be written, and ends here: {error.strerror}\n"
    _write(STREAMS["err"], line.encode(errors="replace"))


def _write(fd: int, data: bytes) -> None:
    """Write all of data, also where somebody has made the stream one that does not block."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select([], [fd], [])


def _print(stream: str, rank: int | None, lines: list[bytes]) -> None:
    # A backend launcher may give ranks a terminal of its own: that ours is one says nothing of it.
    label = b"" if rank is None else prefix(rank, stream, coloured=False)
    chunk = b""
    for line in [label + line + b"\n" for line in lines] + [b""]:
        if not line or len(chunk) + len(line) > CHUNK:
            _write(STREAMS[stream], chunk)
            chunk = b""
        chunk += line


@contextlib.contextmanager
def _log_files(logs: Path, rank: int | None) -> Iterator[dict[str, FileIO]]:
    """The rank's log file of each stream, if there is a folder for them, and it can be written."""
    names = STREAMS if logs.is_dir() and rank is not None else ()
    mode = "a" if rank_environment.RESTART_COUNT in os.environ else "w"
    files = {}
    with contextlib.ExitStack() as stack:
        for name in names:
            path = logs / f"rank-{rank}.{name}"
            try:
                files[name] = stack.enter_context(FileIO(path, mode))
            except OSError as error:
                _report_unwritable(str(path), error)
        yield files
