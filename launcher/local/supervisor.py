"""The launcher while its ranks run: passes on what they print, and ends them all when one fails."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from launcher.errors import signal_name
from launcher.job import Job
from launcher.launch_info import LaunchInfo
from launcher.records import pipe_records
from launcher.runtime import outcome
from launcher.runtime.output import Output
from launcher.runtime.rank_process import DUMP_SIGNAL
from launcher.runtime.rank_state import Rank
from launcher.system import linux, stop_signals

FAILURE_GRACE_S = 0.5  # between SIGTERM and SIGKILL for the others, once a rank has failed
STOP_GRACE_S = 10.0  # the same, when somebody asked the launcher to stop
LONGEST_WAIT_S = 3600.0  # epoll_wait(2) takes no more milliseconds than an int holds
DUMP_S = 0.2  # for ranks to write down where they are, before a launch that takes too long is ended


@dataclass(frozen=True)
class Ears:
    """The launcher's ends of the pipes: to and from the keeper, and (out, err, report) of ranks."""

    commands: int
    reports: int
    ranks: list[tuple[int, int, int]]

    def close(self) -> None:
        for fd in (self.commands, self.reports, *(fd for three in self.ranks for fd in three)):
            os.close(fd)


class Supervisor:
    """Watches one launch from the moment its keeper runs."""

    def __init__(self, job: Job, infos: list[LaunchInfo], ears: Ears, output: Output) -> None:
        self.job = job
        self.ranks = [Rank(info) for info in infos]
        self.ears = ears
        self.output = output
        self.selector = selectors.DefaultSelector()
        self.pipes: dict[int, Callable[[bytes], None]] = {}
        self.prints = {fd for out, err, _ in ears.ranks for fd in (out, err)}
        self.deadlines: dict[float, Callable[[], None]] = {}
        self.keeper_lives = True
        self.is_ending = False
        self.kills_before = linux.out_of_memory_kills()
        self.end = outcome.End(began_s=time.monotonic())

    def watch(self, bury: Callable[[], None]) -> list[Any]:
        """Each rank's result, or LaunchError, when bury has ended all that a keeper may leave."""
        self._listen()
        if self.job.timeout_s is not None:
            self._after(self.job.timeout_s, self._time_is_over)
        with self.selector, stop_signals.heard(self.selector, self._stop):
            while self.keeper_lives:
                self._turn()
            bury()
            self._drain()
            while self.output.is_waiting and self.end.times_stopped < 2:
                self._turn()
        self.end.memory_ran_out = linux.out_of_memory_kills() > self.kills_before
        return outcome.results(self.job, self.ranks, self.end)

    def _turn(self) -> None:
        """Wait for something to happen, and answer it."""
        is_full = self.output.is_full
        for key, _ in self.selector.select(self._patience()):
            if not (is_full and key.fd in self.prints):
                key.data()
        self._meet_deadlines()
        with self._printing():
            self.output.pump(0.02 if is_full else 0)

    def _patience(self) -> float | None:
        """Seconds until something is due; None for never."""
        now = time.monotonic()
        due = [min(max(0.0, deadline - now), LONGEST_WAIT_S) for deadline in self.deadlines]
        if (output := self.output.patience()) is not None:
            due.append(output)
        return 0 if self.output.is_full else min(due, default=None)

    def _listen(self) -> None:
        self._register(self.ears.reports, _by_line(self._keeper_says))
        for rank, (out, err, report) in zip(self.ranks, self.ears.ranks, strict=True):
            self._register(out, self._printer(rank, "out"))
            self._register(err, self._printer(rank, "err"))
            self._register(report, self._listener(rank))

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
            self.keeper_lives = self.keeper_lives and fd != self.ears.reports
        return bool(data)

    def _printer(self, rank: Rank, stream: str) -> Callable[[bytes], None]:
        def action(data: bytes) -> None:
            with self._printing():
                self.output.take(rank.info.rank, stream, data)

        return action

    def _listener(self, rank: Rank) -> Callable[[bytes], None]:
        return _by_line(lambda line: self._hear(rank, line))

    @contextlib.contextmanager
    def _printing(self) -> Iterator[None]:
        """End the launch if what the ranks print can go nowhere."""
        try:
            yield
        except OSError as error:
            self.output.give_up()
            self._note_end(unprintable=error)
            self._end_ranks(STOP_GRACE_S)

    def _hear(self, rank: Rank, line: bytes) -> None:
        """What a rank reports of itself: how its target ended, or the dump of a crash."""
        record = pipe_records.parse(line)
        if record is None:
            rank.dump.append(line.decode(errors="replace"))
            return
        rank.record = record
        if "failure" in record:
            self.output.log(rank.info.rank, record["failure"]["traceback"])
            self._end_ranks(FAILURE_GRACE_S)

    def _keeper_says(self, line: bytes) -> None:
        record = pipe_records.parse(line) or {}
        if "trouble" in record:
            self._note_end(trouble=record["trouble"])
            return
        rank = self.ranks[record["rank"]]
        if "pid" in record:
            rank.pid = record["pid"]
        elif "stopped" in record:
            self._notice_stopped(rank, record["stopped"])
        elif "exit_code" in record:
            rank.exit_code, rank.signal = record["exit_code"], record["signal"]
            rank.ended_s = record["time_s"]
            if rank.failed:
                self._end_ranks(FAILURE_GRACE_S)

    def _notice_stopped(self, rank: Rank, number: int) -> None:
        self.output.notice(
            f"rank {rank.info.rank} (pid {rank.pid}) was stopped by {signal_name(number)}, and the "
            f"others will wait for it: `kill -CONT {rank.pid}` lets it go on."
        )

    def _stop(self, number: int) -> None:
        """Somebody asked the launcher to stop: ask the ranks; asked again, end them at once."""
        self.end.times_stopped += 1
        self.is_ending = True
        if self.end.times_stopped > 1:
            self._kill()
            return
        self._note_end(stopped_by=number)
        self.output.notice(f"{signal_name(number)}: the ranks are asked to end; another ends them")
        is_key = number == signal.SIGINT
        self._signal(number if is_key else signal.SIGTERM, self._living(), whole_group=is_key)
        self._after(STOP_GRACE_S, self._kill)

    def _time_is_over(self) -> None:
        """Learn where every rank is, then end them."""
        self._note_end(timed_out=True)
        self._signal(DUMP_SIGNAL, self._living())
        self._after(DUMP_S, lambda: self._end_ranks(FAILURE_GRACE_S))

    def _note_end(self, **why: Any) -> None:
        """Only the first reason counts: the later ones follow from it."""
        if not self.end.is_told:
            for name, value in why.items():
                setattr(self.end, name, value)

    def _end_ranks(self, grace_s: float) -> None:
        """Ask the ranks to end, once, but for those that are leaving; kill those that do not."""
        if not self.is_ending:
            self.is_ending = True
            self._signal(signal.SIGTERM, [rank for rank in self._living() if not rank.failed])
            self._after(grace_s, self._kill)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL, self._living(), whole_group=True)

    def _living(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.lives]

    def _signal(self, number: int, ranks: list[Rank], whole_group: bool = False) -> None:
        if number != DUMP_SIGNAL:
            for rank in ranks:
                rank.told_to_end_s = rank.told_to_end_s or time.monotonic()
        chosen = [rank.info.rank for rank in ranks]
        record = {"signal": int(number), "ranks": chosen, "whole_group": whole_group}
        with contextlib.suppress(BrokenPipeError):
            pipe_records.send(self.ears.commands, record)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self.deadlines[time.monotonic() + seconds] = action

    def _meet_deadlines(self) -> None:
        now = time.monotonic()
        for deadline in sorted(due for due in self.deadlines if due <= now):
            self.deadlines.pop(deadline)()

    def _drain(self) -> None:
        """Read what is left in the pipes; nothing writes to them any more."""
        for fd in list(self.pipes):
            while self._read(fd):
                pass
            if fd in self.prints and fd in self.pipes:
                self.pipes[fd](b"")


def _by_line(action: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """What to do with bytes, so that action is called with each line of them."""
    lines = pipe_records.Lines()

    def feed(data: bytes) -> None:
        for line in lines.feed(data):
            action(line)

    return feed
