"""Ranks as threads of one process: the acid test against global state, and quick to try things.

results = launcher.launch(work, nprocs=4, launcher="threads")
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from launcher import launch_context, launch_secret, ports, target
from launcher.backends import thread_streams
from launcher.errors import TIMEOUT_CODE, Failure, LaunchError, LaunchInterrupted, LaunchTimeout
from launcher.job import Job
from launcher.launch_info import LaunchInfo
from launcher.local.launch_infos import of_node
from launcher.runtime import rank_process

NAME = "threads"
HONOURS = frozenset({"log_dir", "trace"})
GRACE_S = 2.0  # once a rank has failed, for the others: only their own errors can end threads


def detect(environ: Mapping[str, str]) -> LaunchInfo | None:
    return launch_context.current()


def run(job: Job, owns_process: bool = False) -> list[Any]:
    """Each rank's result, by rank.

    owns_process: this process exists only for this launch, so its standard streams are ours.
    Raises LaunchError with the first exception as its __cause__.
    """
    if not owns_process:
        _check_streams(job)
        return _run(job)
    try:
        with thread_streams.replaced(job):
            return _run(job)
    except KeyboardInterrupt as stopped:
        number = signal.SIGINT
        raise LaunchInterrupted(f"stopped by {number.name}", exit_code=128 + number) from stopped


def _check_streams(job: Job) -> None:
    if job.log_dir is not None:
        raise ValueError(
            f"log_dir={job.log_dir!r} cannot be honoured for threads of a program: they print where"
            " the program prints, so nothing was started. Leave it out, or use the command line."
        )


def _run(job: Job) -> list[Any]:
    with ports.listen(job.launch_id, job.master_addr, job.master_port) as listener:
        secret_fd = launch_secret.create()
        extras = {"secret_fd": str(secret_fd)}
        master = {**extras, "master_fd": str(listener.fileno())}
        try:
            infos = of_node(job, listener.getsockname()[1], extras, master)
            return _Ranks(job, infos).results()
        finally:
            os.close(secret_fd)


class _Ranks:
    def __init__(self, job: Job, infos: list[LaunchInfo]) -> None:
        self.job = job
        self.began_s = time.monotonic()
        self.values: dict[int, Any] = {}
        self.errors: list[tuple[Failure, BaseException]] = []
        self.changed = threading.Condition()
        work = target.callables(job)
        self.threads = [
            threading.Thread(
                target=self._rank, args=(info, work(info)), name=f"rank-{info.rank}", daemon=True
            )
            for info in infos
        ]

    def results(self) -> list[Any]:
        for thread in self.threads:
            thread.start()
        with self.changed:
            in_time = self.changed.wait_for(self._over, self.job.timeout_s)
            if self.errors:
                self.changed.wait_for(self._all_ended, GRACE_S)
        if self.errors or not in_time:
            raise self._error()
        return [self.values[rank] for rank in range(self.job.nprocs)]

    def _rank(self, info: LaunchInfo, work: Callable[[], Any]) -> None:
        with launch_context.rank_of(info):
            try:
                value = work()
            except BaseException as error:
                self._failed(info, error)
            else:
                self._note(lambda: self.values.update({info.rank: value}))

    def _failed(self, info: LaunchInfo, error: BaseException) -> None:
        if rank_process.exit_code(error) == 0:
            self._note(lambda: self.values.update({info.rank: None}))
            return
        said = rank_process.describe(error)
        failure = Failure(
            rank=info.rank,
            local_rank=info.local_rank,
            pid=os.getpid(),
            **{**said, "time_s": said["time_s"] - self.began_s},
        )
        self._note(lambda: self.errors.append((failure, error)))

    def _note(self, change: Callable[[], None]) -> None:
        with self.changed:
            change()
            self.changed.notify_all()

    def _all_ended(self) -> bool:
        return len(self.values) + len(self.errors) == self.job.nprocs

    def _over(self) -> bool:
        return bool(self.errors) or self._all_ended()

    def _error(self) -> LaunchError:
        ended = {*self.values, *(failure.rank for failure, _ in self.errors)}
        running = [str(rank) for rank in range(self.job.nprocs) if rank not in ended]
        still = (
            f" Threads cannot be ended from outside: rank {', '.join(running)} still runs."
            if running
            else ""
        )
        if not self.errors:
            return LaunchTimeout(
                f"the launch took longer than {self.job.timeout_s} s.{still}",
                exit_code=TIMEOUT_CODE,
            )
        failures = tuple(failure for failure, _ in self.errors)
        first, cause = self.errors[0]
        error = LaunchError(
            f"{first.summary()}.{still}\n\n{first.traceback}", failures, first.exit_code
        )
        error.__cause__ = cause
        return error
