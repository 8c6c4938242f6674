"""Ranks as threads of one process: the acid test against global state, and quick to try things.

results = launcher.launch(work, nprocs=4, launcher="threads")
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from launcher import context, ports, secret, target, thread_streams
from launcher.errors import Failure, LaunchError, LaunchTimeout
from launcher.info import LaunchInfo
from launcher.infos import of_node
from launcher.job import Job

NAME = "threads"
GRACE_S = 2.0  # once a rank has failed, for the others: only their own errors can end threads


def detect(environ: Mapping[str, str]) -> LaunchInfo | None:
    return context.current()


def run(job: Job, owns_process: bool = False) -> list[Any]:
    """Each rank's result, by rank.

    owns_process: this process exists only for this launch, so its standard streams are ours.
    Raises LaunchError with the first exception as its __cause__.
    """
    if owns_process:
        with thread_streams.replaced(job):
            return run(job)
    with ports.listen(job.launch_id, job.master_addr, job.master_port) as listener:
        secret_fd = secret.create()
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
        with context.rank_of(info):
            try:
                value = work()
            except BaseException as error:
                self._failed(info, error)
            else:
                self._note(lambda: self.values.update({info.rank: value}))

    def _failed(self, info: LaunchInfo, error: BaseException) -> None:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            self._note(lambda: self.values.update({info.rank: None}))
            return
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        failure = Failure(
            rank=info.rank,
            local_rank=info.local_rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            time_s=time.monotonic() - self.began_s,
            exit_code=code,
            type=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
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
                f"the launch took longer than {self.job.timeout_s} s.{still}", exit_code=124
            )
        failures = tuple(failure for failure, _ in self.errors)
        first, cause = self.errors[0]
        error = LaunchError(
            f"{first.summary()}.{still}\n\n{first.traceback}", failures, first.exit_code
        )
        error.__cause__ = cause
        return error
