"""Beside each rank that an engine starts: its attendant, which labels what it prints, and sees how
it ends, for an engine may tell neither.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import Any

from launcher.external import reaper
from launcher.records.pipe_records import Lines
from launcher.runtime.output import prefix
from launcher.runtime.rank_state import without_launcher
from launcher.system import linux

PASSED_ON = reaper.PASSED_ON
CHUNK = select.PIPE_BUF  # a pipe takes this much at once, and so not in the middle of another's
STREAMS = {"out": 1, "err": 2}


@dataclass(frozen=True)
class End:
    """How a rank ended. who: its rank and local_rank; empty if it did not come that far."""

    who: dict[str, int]
    exit_code: int
    failure: dict[str, Any]


def attended(work: Callable[[Callable[..., None]], int], logs: Path) -> int | End:
    """Run work in a child, the rank: there, its exit code; here, how it ended.

    work is given a function to tell its rank and local_rank by. logs: for rank-0.out and so on, if
    that folder is there.
    """
    pipes = {name: os.pipe() for name in (*STREAMS, "who")}
    crash = os.memfd_create("crash")
    attendant = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    rank = os.fork()
    if rank == 0:
        return work(_seat(attendant, pipes, crash))
    return _attend(rank, pipes, crash, logs)


def _seat(attendant: int, pipes: dict[str, tuple[int, int]], crash: int) -> Callable[..., None]:
    os.setpgid(0, 0)  # what an engine sends to a whole group is passed on, and must come once
    linux.die_with(attendant)
    for name, number in STREAMS.items():
        os.dup2(pipes[name][1], number)
    _, tell = pipes.pop("who")
    for end in sum(pipes.values(), ()):
        os.close(end)
    faulthandler.enable(file=crash)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)

    def told(**who: int) -> None:
        os.write(tell, json.dumps(who).encode())
        os.close(tell)

    return told


def _attend(rank: int, pipes: dict[str, tuple[int, int]], crash: int, logs: Path) -> End:
    linux.adopt_orphans(True)
    asked: list[int] = []
    for number in PASSED_ON:
        signal.signal(number, functools.partial(_pass_on, rank, asked))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    for _, end in pipes.values():
        os.close(end)
    who = json.loads(os.read(pipes["who"][0], 1000) or b"{}")
    with contextlib.suppress(OSError):  # nobody reads any more: the rank will find that out
        _label(rank, {pipes[name][0]: name for name in STREAMS}, who.get("rank"), logs)
    for name in STREAMS:
        os.close(pipes[name][0])
    _, status = os.waitpid(rank, 0)
    reaper.end_rest()
    return _end(who, rank, os.waitstatus_to_exitcode(status), bool(asked), crash)


def _pass_on(rank: int, asked: list[int], number: int, _frame: FrameType | None) -> None:
    asked.append(number)
    linux.send_signal(rank, number)


def _end(who: dict[str, int], pid: int, status: int, was_asked: bool, crash: int) -> End:
    code = status if status >= 0 else 128 - status
    dump = os.pread(crash, 1 << 20, 0).decode(errors="replace").splitlines()
    failure = {
        **who,
        "pid": pid,
        "time_s": time.monotonic(),
        "host": socket.gethostname(),
        "exit_code": code,
        "signal": max(0, -status),
        "traceback": without_launcher(dump),
        "ended_by_launcher": was_asked,
    }
    return End(who, code, failure)


def _label(rank: int, streams: dict[int, str], number: int | None, logs: Path) -> None:
    """Pass on whole lines until the rank has ended, even where its children hold its streams."""
    lines = {fd: Lines() for fd in streams}
    ended = os.pidfd_open(rank)
    with contextlib.closing(FileIO(ended)), _files(logs, number) as files:
        for fd, data in _read(streams, ended):
            if streams[fd] in files:
                files[streams[fd]].write(data)
            whole = lines[fd].feed(data)
            rest = [] if data or not lines[fd].nbytes else [lines[fd].take()]
            _print(streams[fd], number, [*whole, *rest])


def _read(streams: dict[int, str], ended: int) -> Iterator[tuple[int, bytes]]:
    """What comes from each stream; nothing at its end."""
    left = set(streams)
    while left:
        ready = set(select.select([*left, ended], [], [])[0])
        for fd in ready & left:
            data = os.read(fd, 1 << 16)
            yield fd, data
            left -= set() if data else {fd}
        if ready == {ended}:
            yield from ((fd, b"") for fd in left)
            return


def _print(stream: str, number: int | None, lines: list[bytes]) -> None:
    # An engine may give ranks a terminal of its own, so ours tells nothing here of the real one.
    mark = b"" if number is None else prefix(number, stream, coloured=False)
    waiting = b""
    for line in lines:
        text = mark + line + b"\n"
        if len(waiting) + len(text) > CHUNK:
            _write(STREAMS[stream], waiting)
            waiting = b""
        waiting += text
    _write(STREAMS[stream], waiting)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


@contextlib.contextmanager
def _files(logs: Path, number: int | None) -> Iterator[dict[str, FileIO]]:
    """The rank's files for what it prints, if there is a folder for them."""
    wanted = STREAMS if logs.is_dir() and number is not None else ()
    files = {name: FileIO(logs / f"rank-{number}.{name}", "w") for name in wanted}
    try:
        yield files
    finally:
        for file in files.values():
            file.close()
