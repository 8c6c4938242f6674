"""How a launch ended: the results of its ranks, or one error with the earliest failure first."""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.errors import (
    TIMEOUT_CODE,
    Failure,
    LaunchError,
    LaunchInterrupted,
    LaunchTimeout,
    signal_name,
)
from launcher.job import Job
from launcher.runtime.rank_state import REAPING_LAG_S, Rank, without_launcher

READER_GONE = (errno.EPIPE, errno.EIO)


@dataclass
class End:
    """Why the launcher ended the ranks, if it was not a rank's own failure.

    began_s: when the launch began, on the monotonic clock.
    """

    began_s: float
    stopped_by: int | None = None
    times_stopped: int = 0
    timed_out: bool = False
    trouble: str = ""
    unprintable: OSError | None = None
    memory_ran_out: bool = False

    @property
    def is_told(self) -> bool:
        return bool(self.stopped_by or self.timed_out or self.trouble or self.unprintable)


def results(job: Job, ranks: list[Rank], end: End) -> list[Any]:
    """Each rank's result. Raises LaunchError if there is anything wrong."""
    failures = _failures(job, ranks, end)
    error = _end_error(job, ranks, end, failures)
    if error is not None:
        raise error
    if failures:
        raise LaunchError(_message(failures[0], ranks, end), failures, failures[0].exit_code)
    return [rank.result() for rank in ranks]


def _failures(job: Job, ranks: list[Rank], end: End) -> tuple[Failure, ...]:
    """The failed ranks, earliest first; those that the launcher ended come last."""
    must_return = job.target.kind == "function"
    failed = [rank for rank in ranks if rank.failed or (must_return and rank.left_early)]
    found = [rank.failure(end.began_s) for rank in failed]
    return tuple(sorted(found, key=blame))


def blame(failure: Failure) -> tuple[bool, float, int]:
    """Sorts the cause before its consequences.

    A process's death is seen later than it happened: its peers lose their connection to it, and may
    raise, before its parent hears of it. An abort is more often such a consequence than a cause.
    """
    died_silently = not failure.type and failure.signal != signal.SIGABRT
    lag_s = REAPING_LAG_S if died_silently else 0.0
    time_s = 0.0 if failure.ended_by_launcher else failure.time_s - lag_s
    return failure.ended_by_launcher, time_s, failure.rank


def _end_error(
    job: Job, ranks: list[Rank], end: End, failures: tuple[Failure, ...]
) -> LaunchError | None:
    """The error of a launch that its ranks did not end themselves."""
    if end.stopped_by:
        name = signal_name(end.stopped_by)
        return LaunchInterrupted(f"stopped by {name}", failures, 128 + end.stopped_by)
    if end.unprintable:
        return _unprintable(end.unprintable, failures)
    if end.timed_out:
        return LaunchTimeout(_timeout_message(job, ranks), failures, TIMEOUT_CODE)
    if end.trouble:
        return LaunchError(f"the ranks could not be started: {end.trouble}", failures)
    if any(rank.lives for rank in ranks):
        return LaunchError(
            "the process that kept the ranks was killed from outside, so all of them were ended. "
            "The kernel does so where memory runs out: see `dmesg`.",
            failures,
            128 + signal.SIGKILL,
        )
    return None


def _unprintable(error: OSError, failures: tuple[Failure, ...]) -> LaunchError:
    if error.errno in READER_GONE:
        message = "stopped, since nobody reads the output any more"
        return LaunchInterrupted(message, failures, 128 + signal.SIGPIPE)
    where = f" to {error.filename}" if error.filename else ""
    return LaunchError(
        f"what the ranks print cannot be written{where}: {error.strerror}. They were ended, since "
        "their output would be lost. Make room, or write elsewhere.",
        failures,
    )


def _timeout_message(job: Job, ranks: list[Rank]) -> str:
    stacks = [
        f"\n\nrank {rank.info.rank} was here:\n{without_launcher(rank.dump)}"
        for rank in ranks
        if rank.dump
    ]
    return f"not over after {job.timeout_s} s, so it was ended{''.join(stacks)}"


def _message(first: Failure, ranks: list[Rank], end: End) -> str:
    return "\n".join([first.summary(), *_notes(first, ranks, end), *_details(first)])


def _notes(first: Failure, ranks: list[Rank], end: End) -> Iterator[str]:
    early = [str(rank.info.rank) for rank in ranks if rank.left_early]
    if early and first.exit_code:
        yield f"Rank {', '.join(early)} had left early, with exit code 0."
    if first.signal == signal.SIGKILL and end.memory_ran_out:
        yield "The kernel killed processes meanwhile because memory ran out: see `dmesg`."


def _details(first: Failure) -> list[str]:
    return ["", first.traceback] if first.traceback else []
