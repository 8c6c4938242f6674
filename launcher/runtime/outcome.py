"""The outcome of a launch: the results of its ranks, or one error with the first failure first."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Iterator
from typing import Any

from launcher import errors
from launcher.errors import Failure, LaunchError, LaunchInterrupted, signal_name
from launcher.job import Job
from launcher.runtime.rank_state import LaunchedRank, without_launcher
from launcher.system import linux
from launcher.system.oom_kills import OomKills

Failures = tuple[Failure, ...]
# Makes the error of a launch that was not ended by a failure of a rank, from those that followed.
EndReason = Callable[[Failures], LaunchError]
READER_GONE = (errno.EPIPE, errno.EIO)


def results_or_raise(
    job: Job,
    ranks: list[LaunchedRank],
    began_s: float,
    reason: EndReason | None,
    oom_kills: OomKills,
) -> list[Any]:
    """Each rank's result. Raises LaunchError if anything failed.

    began_s: of the monotonic clock. oom_kills: by the kernel, since then.
    """
    must_return = job.target.kind == "function"
    ended = [rank for rank in ranks if not rank.was_outlived]
    failed = [rank for rank in ended if rank.has_failed or (must_return and rank.exited_early)]
    failures = errors.by_cause(rank.failure(began_s) for rank in failed)
    if reason is not None:
        raise reason(failures)
    if failures:
        notes = filter(None, _notes(failures[0], ranks, oom_kills))
        raise errors.failed(failures, "\n".join(notes))
    return [rank.result() for rank in ranks]


def timed_out(job: Job, ranks: list[LaunchedRank]) -> EndReason:
    """The launch took too long; ranks: where each of them was, by the time of the error."""

    # Now: to be ended, they are resumed.
    suspended = [
        f"\n\nrank {rank.info.rank} (pid {rank.pid}) was suspended."
        for rank in ranks
        if rank.is_suspended
    ]

    def error(failures: Failures) -> LaunchError:
        stacks = [
            f"\n\nrank {rank.info.rank} was here:\n{without_launcher(rank.dump)}"
            for rank in ranks
            if rank.dump
        ]
        stacks += suspended
        if not any(rank.pid for rank in ranks):
            stacks = [", while modules were imported before the ranks were forked"]
        return errors.timed_out(job.timeout_s, failures, note="".join(stacks))

    return error


def failed_start(problem: str) -> EndReason:
    """The fork server could not start the ranks."""
    return lambda failures: LaunchError(f"the ranks could not be started: {problem}", failures)


def unwritable_output(error: OSError) -> EndReason:
    """The reader of the output has gone, or a disk is full."""
    if error.errno in READER_GONE:
        text, code = "stopped, since nobody reads the output any longer", 128 + signal.SIGPIPE
        return lambda failures: LaunchInterrupted(text, failures, code)
    where = f" to {error.filename}" if error.filename else ""
    return lambda failures: LaunchError(
        f"the output of the ranks cannot be written{where}: {error.strerror}. They were ended, "
        "since it would be lost. Free some space, or write elsewhere.",
        failures,
    )


def server_ended(status: int) -> EndReason:
    """The fork server has ended before its ranks, with this status, or -SIGSTOP was suspended."""
    how = {
        -signal.SIGKILL: "was killed from outside (the kernel does so where memory runs out: see "
        "`dmesg`)",
        -signal.SIGSTOP: "was suspended from outside (SIGSTOP) and not resumed",
    }.get(status, f"was killed by {signal_name(-status)}")
    how = f"exited with code {status}" if status >= 0 else how
    text = f"the fork server of the ranks {how}, so all of them were ended."
    return lambda failures: LaunchError(text, failures, linux.shell_exit_code(status) or 1)


def _notes(first: Failure, ranks: list[LaunchedRank], oom_kills: OomKills) -> Iterator[str]:
    early = [str(rank.info.rank) for rank in ranks if rank.exited_early]
    if early and first.exit_code:
        yield f"Rank {', '.join(early)} had exited early, with code 0."
    if first.signal == signal.SIGKILL:
        yield oom_kills.note(first.rank)
    if first.signal == signal.SIGBUS:
        yield (
            "A file that it had mapped, such as the weights of a model, was cut off meanwhile, or "
            "/dev/shm was full."
        )
