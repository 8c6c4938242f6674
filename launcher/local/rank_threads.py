"""Ranks as threads of this process: runs them, and prints their lines with their rank."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from launcher import detection, errors, launch_secret, ports, target, timings
from launcher.errors import Failure, LaunchError
from launcher.job import Job
from launcher.launch_info import LaunchInfo
from launcher.local.launch_infos import infos_for_node
from launcher.runtime import rank_process
from launcher.runtime.output import Output
from launcher.system.held_forks import TOO_MANY_PROCESSES


def run(job: Job) -> list[Any]:
    """Each rank's result, by rank. Raises LaunchError, with the cause's exception as __cause__."""
    with ports.listen(job.launch_id, job.master_addr, job.master_port) as listener:
        secret_fd = launch_secret.create()
        extras = {"secret_fd": str(secret_fd)}
        first_extras = {**extras, "master_fd": str(listener.fileno())}
        try:
            infos = infos_for_node(job, listener.getsockname()[1], extras, first_extras)
            return RankThreads(job, infos).results()
        finally:
            os.close(secret_fd)


class RankThreads:
    """One thread a rank, and what they have returned or raised so far."""

    def __init__(self, job: Job, infos: list[LaunchInfo]) -> None:
        self.job = job
        self.began_s = time.monotonic()
        self.values: dict[int, Any] = {}
        self.errors: list[tuple[Failure, BaseException]] = []
        self.changed = threading.Condition()
        work = target.callables(job)
        self.threads = [
            threading.Thread(
                target=self._run_rank,
                args=(info, work(info)),
                name=f"rank-{info.rank}",
                daemon=True,
            )
            for info in infos
        ]

    def results(self) -> list[Any]:
        """Start the threads and wait until all have ended, one has failed, or the timeout."""
        for thread in self.threads:
            try:
                thread.start()
            except RuntimeError as error:
                raise LaunchError(f"{thread.name}: {error}. {TOO_MANY_PROCESSES}.") from error
        with self.changed:
            in_time = self.changed.wait_for(
                lambda: bool(self.errors) or self._all_ended(), self.job.timeout_s
            )
            if self.errors:  # the others can only end by themselves
                self.changed.wait_for(self._all_ended, timings.TIMINGS.thread_grace_s)
        if self.errors or not in_time:
            raise self._launch_error()
        return [self.values[rank] for rank in range(self.job.nprocs)]

    def _run_rank(self, info: LaunchInfo, work: Callable[[], Any]) -> None:
        with detection.acting_as(info):
            value, failure = None, None
            try:
                value = work()
            except BaseException as error:
                if rank_process.exit_code(error) != 0:
                    failure = self._failure(info, error), error
        with self.changed:
            if failure is None:
                self.values[info.rank] = value
            else:
                self.errors.append(failure)
            self.changed.notify_all()

    def _failure(self, info: LaunchInfo, error: BaseException) -> Failure:
        report = rank_process.describe(error, info)
        return Failure(**{**report, "time_s": report["time_s"] - self.began_s})

    def _all_ended(self) -> bool:
        return len(self.values) + len(self.errors) == self.job.nprocs

    def _launch_error(self) -> LaunchError:
        ended = {*self.values, *(failure.rank for failure, _ in self.errors)}
        running = [str(rank) for rank in range(self.job.nprocs) if rank not in ended]
        note = f"Threads cannot be ended from outside: rank {', '.join(running)} still runs."
        if not self.errors:
            return errors.timed_out(self.job.timeout_s, note=f". {note}")
        failures = errors.by_cause(failure for failure, _ in self.errors)
        error = errors.failed(failures, note if running else "")
        error.__cause__ = next(raised for cause, raised in self.errors if cause is failures[0])
        return error


@contextlib.contextmanager
def rank_streams(job: Job) -> Iterator[None]:
    """From now on, a rank's thread prints as a rank's process does: lines with its rank.

    The streams stay: print() of Python 3.11 crashes if its stream is freed meanwhile. After this
    context, what threads that still run print is lost.
    """
    output, lock = Output(job), threading.Lock()
    streams = [
        RankStream(output, lock, "out", sys.stdout),
        RankStream(output, lock, "err", sys.stderr),
    ]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        with lock:
            for rank in range(job.nprocs):
                output.take(rank, "out", b"")
                output.take(rank, "err", b"")
            _pump_all(output)
            output.close()
            for stream in streams:
                stream.is_over = True


def _pump_all(output: Output) -> None:
    while output.is_waiting:
        output.pump(timings.TIMINGS.output_poll_s)


class RankStream(io.TextIOBase):
    """A standard stream for all ranks; text of threads that are not ranks passes unchanged."""

    def __init__(self, output: Output, lock: threading.Lock, name: str, before: TextIO) -> None:
        self._output = output
        self._lock = lock
        self._name = name
        self._before = before
        self.is_over = False

    @property
    def buffer(self) -> Any:
        """The bytes below the stream: what is written there has no rank's label."""
        return self._before.buffer

    def write(self, text: str) -> int:
        info = detection.thread_info()
        if info is None:
            return self._before.write(text)
        with self._lock:
            if self.is_over:
                return len(text)
            self._output.take(info.rank, self._name, text.encode(errors="backslashreplace"))
            _pump_all(self._output)
        return len(text)

    def flush(self) -> None:
        """Flush what is not a rank's; of ranks, only unfinished lines wait here."""
        self._before.flush()

    def isatty(self) -> bool:
        return self._before.isatty()
