"""Ranks as threads of one process: the acid test against global state, and the quickest way to try
something.

results = launcher.launch(work, nprocs=4, launcher="threads")
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launcher import ports, secret, target
from launcher.errors import Failure, LaunchError, LaunchTimeout
from launcher.info import LaunchInfo
from launcher.job import Job

NAME = "threads"
GRACE_S = (
    2.0  # for the others, once one has failed: a thread can be asked by its peers' errors only
)

_info: contextvars.ContextVar[LaunchInfo | None] = contextvars.ContextVar("info", default=None)


def detect(environ: Mapping[str, str]) -> LaunchInfo | None:
    return _info.get()


@contextlib.contextmanager
def rank_of(info: LaunchInfo | None) -> Iterator[None]:
    """Within this context, on this thread, `launcher.current()` is info."""
    token = _info.set(info)
    try:
        yield
    finally:
        _info.reset(token)


def run(job: Job) -> list[Any]:
    """Each rank's result, by rank. Raises LaunchError with the first exception; its __cause__ is
    that exception.
    """
    with ports.listen(job.launch_id, job.master_addr, job.master_port) as listener:
        secret_fd = secret.create()
        try:
            return _Ranks(job, infos(job, listener, secret_fd)).results()
        finally:
            os.close(secret_fd)


def infos(job: Job, listener: socket.socket, secret_fd: int) -> list[LaunchInfo]:
    """The LaunchInfo of each rank. Every rank of one process shares the descriptors, and the
    launcher closes them.
    """
    master_fd = {"master_fd": str(listener.fileno())}
    return [
        LaunchInfo(
            launch_id=job.launch_id,
            world_size=job.nprocs,
            local_world_size=job.nprocs,
            rank=rank,
            local_rank=rank,
            master_addr=job.master_addr,
            master_port=listener.getsockname()[1],
            extras={"secret_fd": str(secret_fd), **(master_fd if rank == 0 else {})},
        )
        for rank in range(job.nprocs)
    ]


class _Ranks:
    def __init__(self, job: Job, infos: list[LaunchInfo]) -> None:
        self.job = job
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
        with rank_of(info):
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
            time_s=time.monotonic(),
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
        error = LaunchError(f"{first.summary()}.{still}", failures, first.exit_code)
        error.__cause__ = cause
        return error
