"""The launcher while its ranks run: passes on what they print, and ends them all when one fails."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from launcher import values, wire
from launcher.errors import Failure, LaunchError, LaunchInterrupted, LaunchTimeout, signal_name
from launcher.info import LaunchInfo
from launcher.job import Job
from launcher.output import Output

FAILURE_GRACE_S = 0.5  # between SIGTERM and SIGKILL for the others, once a rank has failed
STOP_GRACE_S = 10.0  # the same, when somebody asked the launcher to stop
REAPING_LAG_S = 0.1  # a death is seen this much later than it happened, at most
STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIMEOUT_CODE = 124  # as timeout(1)


@dataclass
class Rank:
    """What the launcher knows of one rank so far."""

    info: LaunchInfo
    pid: int = 0
    exit_code: int | None = None
    ended_s: float = 0.0
    failure: dict[str, Any] | None = None
    has_result: bool = False
    result: Any = None
    dump: list[str] = field(default_factory=list)
    told_to_end: bool = False

    @property
    def lives(self) -> bool:
        return self.exit_code is None

    @property
    def failed(self) -> bool:
        return self.failure is not None or bool(self.exit_code)


@dataclass(frozen=True)
class Ears:
    """The launcher's ends of the pipes. commands: to the keeper; reports: from it; ranks: (out,
    err, report) of each.
    """

    commands: int
    reports: int
    ranks: list[tuple[int, int, int]]

    def close(self) -> None:
        for fd in (self.commands, self.reports, *(fd for three in self.ranks for fd in three)):
            with contextlib.suppress(OSError):
                os.close(fd)


class Supervisor:
    """Watches one launch from the moment its keeper runs."""

    def __init__(self, job: Job, infos: list[LaunchInfo], ears: Ears, output: Output) -> None:
        self.job = job
        self.ranks = [Rank(info) for info in infos]
        self.ears = ears
        self.output = output
        self.selector = selectors.DefaultSelector()
        self.keeper_lives = True
        self.trouble = ""
        self.stopped_by: int | None = None
        self.timed_out = False
        self.pipes: dict[int, Callable[[bytes], None]] = {}
        self.deadlines: dict[str, float] = {}
        if job.timeout_s is not None:
            self.deadlines["timeout"] = time.monotonic() + job.timeout_s

    def watch(self, bury: Callable[[], None]) -> list[Any]:
        """Each rank's result. Returns or raises LaunchError when bury has ended all that a keeper
        may leave.
        """
        self._listen()
        with self.selector, _signals(self.selector, self._stop):
            while self.keeper_lives:
                for key, _ in self.selector.select(self._patience()):
                    key.data()
                self._meet_deadlines()
            bury()
            self._drain()
        return self._outcome()

    def _listen(self) -> None:
        self._register(self.ears.reports, self._keeper_says(wire.Lines()))
        for rank, (out, err, report) in zip(self.ranks, self.ears.ranks, strict=True):
            self._register(out, self._rank_prints(rank, "out", wire.Lines()))
            self._register(err, self._rank_prints(rank, "err", wire.Lines()))
            self._register(report, self._rank_says(rank, wire.Lines()))

    def _register(self, fd: int, action: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self.pipes[fd] = action
        self.selector.register(fd, selectors.EVENT_READ, lambda: self._read(fd))

    def _read(self, fd: int) -> bool:
        """Whether there was something to read; an empty read is the end of the pipe."""
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return False
        self.pipes[fd](data)
        if not data:
            self.selector.unregister(fd)
            del self.pipes[fd]
        return bool(data)

    def _rank_prints(self, rank: Rank, stream: str, lines: wire.Lines) -> Callable[[bytes], None]:
        def action(data: bytes) -> None:
            for line in lines.feed(data):
                self.output.line(rank.info.rank, stream, line)
            if not data and lines.rest:
                self.output.line(rank.info.rank, stream, lines.rest)

        return action

    def _rank_says(self, rank: Rank, lines: wire.Lines) -> Callable[[bytes], None]:
        def action(data: bytes) -> None:
            for line in lines.feed(data):
                self._hear(rank, line)

        return action

    def _hear(self, rank: Rank, line: bytes) -> None:
        record = wire.parse(line)
        if record is None:
            rank.dump.append(line.decode(errors="replace"))
        elif "result" in record:
            rank.has_result, rank.result = True, values.loads(record["result"])
        else:
            rank.failure = record["failure"]
            self._end(FAILURE_GRACE_S, spare=rank)

    def _keeper_says(self, lines: wire.Lines) -> Callable[[bytes], None]:
        def action(data: bytes) -> None:
            for line in lines.feed(data):
                self._note(wire.parse(line) or {})
            self.keeper_lives = self.keeper_lives and bool(data)

        return action

    def _note(self, record: dict[str, Any]) -> None:
        if "trouble" in record:
            self.trouble = record["trouble"]
            return
        rank = self.ranks[record["rank"]]
        if "pid" in record:
            rank.pid = record["pid"]
        elif "stopped" in record:
            self._notice_stop(rank, record["stopped"])
        elif "exit_code" in record:
            rank.exit_code, rank.ended_s = record["exit_code"], record["time_s"]
            if rank.failed:
                self._end(FAILURE_GRACE_S)

    def _notice_stop(self, rank: Rank, number: int) -> None:
        self.output.notice(
            f"rank {rank.info.rank} (pid {rank.pid}) is stopped by {signal_name(number)}, and the "
            "others will wait "
            f"for it: `kill -CONT {rank.pid}` lets it go on."
        )

    def _stop(self, number: int) -> None:
        """Somebody asked the launcher to stop: pass it on; asked twice, stop at once."""
        if self.stopped_by is not None:
            self._kill()
            return
        self.stopped_by = number
        self._signal(number, self._living(), whole_group=number == signal.SIGINT)
        self._set_deadline("kill", STOP_GRACE_S)

    def _end(self, grace_s: float, spare: Rank | None = None) -> None:
        """Ask every rank that was not asked yet to end, and kill those that do not in time."""
        asked = [rank for rank in self._living() if not rank.told_to_end and rank is not spare]
        if self.stopped_by is None:
            self._signal(signal.SIGTERM, asked)
            self._set_deadline("kill", grace_s)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL, self._living(), whole_group=True)

    def _living(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.lives]

    def _signal(self, number: int, ranks: list[Rank], whole_group: bool = False) -> None:
        for rank in ranks:
            rank.told_to_end = True
        chosen = [rank.info.rank for rank in ranks]
        record = {"signal": int(number), "ranks": chosen, "whole_group": whole_group}
        with contextlib.suppress(BrokenPipeError):
            wire.send(self.ears.commands, record)

    def _set_deadline(self, name: str, after_s: float) -> None:
        self.deadlines.setdefault(name, time.monotonic() + after_s)

    def _patience(self) -> float | None:
        if not self.deadlines:
            return None
        return max(0.0, min(self.deadlines.values()) - time.monotonic())

    def _meet_deadlines(self) -> None:
        now = time.monotonic()
        for name in [name for name, deadline in self.deadlines.items() if deadline <= now]:
            del self.deadlines[name]
            if name == "kill":
                self._kill()
            else:
                self.timed_out = True
                self._end(FAILURE_GRACE_S)

    def _drain(self) -> None:
        """Read what is left in the pipes; nothing writes to them any more."""
        for fd in list(self.pipes):
            while self._read(fd):
                pass

    def _outcome(self) -> list[Any]:
        failures = self._failures()
        if self.stopped_by is not None:
            name = signal_name(self.stopped_by)
            raise LaunchInterrupted(
                f"the launch was stopped by {name}", failures, 128 + self.stopped_by
            )
        if self.timed_out:
            raise LaunchTimeout(
                f"the launch took longer than {self.job.timeout_s} s", failures, TIMEOUT_CODE
            )
        if self.trouble:
            raise LaunchError(f"the ranks could not be started: {self.trouble}", failures)
        if any(rank.lives for rank in self.ranks):
            raise LaunchError("the keeper of the ranks was killed", failures, 128 + signal.SIGKILL)
        if failures:
            first = failures[0]
            details = f"\n\n{first.traceback}" if first.traceback else ""
            raise LaunchError(f"{first.summary()}{details}", failures, first.exit_code)
        return [rank.result for rank in self.ranks]

    def _failures(self) -> tuple[Failure, ...]:
        """The failed ranks, earliest first; those that died because we ended them come last, and
        are said to.
        """
        found = [
            self._failure(rank) for rank in self.ranks if rank.failed or self._left_early(rank)
        ]
        return tuple(sorted(found, key=lambda failure: (failure.ended_by_launcher, failure.time_s)))

    def _left_early(self, rank: Rank) -> bool:
        """A function's rank that ended well, as far as its exit code says, but left no result."""
        return self.job.target.kind == "function" and not rank.has_result and not rank.lives

    def _failure(self, rank: Rank) -> Failure:
        said = rank.failure or {
            "time_s": rank.ended_s - REAPING_LAG_S,
            "host": socket.gethostname(),
            "traceback": "\n".join(rank.dump),
        }
        code = rank.exit_code or said.get("exit_code", 1)
        return Failure(
            rank=rank.info.rank,
            local_rank=rank.info.local_rank,
            pid=rank.pid,
            ended_by_launcher=rank.told_to_end and rank.failure is None,
            **{**said, "exit_code": code},
        )


@contextlib.contextmanager
def _signals(selector: selectors.BaseSelector, action: Callable[[int], None]) -> Iterator[None]:
    """Within this context, a signal that stops programs calls action instead. Only where signals
    arrive: the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    old_fd = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    old = {number: signal.signal(number, lambda *_: None) for number in STOPPING_SIGNALS}
    selector.register(reading, selectors.EVENT_READ, lambda: _each(reading, action))
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in old.items():
            signal.signal(number, handler)
        reading.close()
        writing.close()


def _each(reading: socket.socket, action: Callable[[int], None]) -> None:
    for number in reading.recv(4096):
        if number in STOPPING_SIGNALS:
            action(number)
