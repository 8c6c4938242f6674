"""The ranks of one node behind a front, until they end or have to; and the nodes without a front.

with launcher.Launch(job) as launch:
    error = end_of(launch, watch(launch, is_over))
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import launcher
from drumline import timings
from drumline.errors import DrumlineError

log = logging.getLogger("drumline")


def follow_front(job: launcher.Job) -> None:
    """Start the job's ranks whenever the front, at the first node, does; return when it has ended.

    Raises LaunchError when it has ended with an error, or is gone.
    """
    poll_s = timings.TIMINGS.failure_poll_s
    with contextlib.closing(launcher.NodeFollower(job, stays=True)) as follower:
        while (attempt := follower.join()) is not None:
            with launcher.Launch(attempt) as launch, contextlib.ExitStack() as stack:
                stack.callback(launch.stop)  # with that of the launch, at once: SIGTERM, Ctrl-C
                error = end_of(launch, watch(launch, lambda: follower.is_over(poll_s)))
            log.warning("node %d: the ranks have ended: %s", job.node_rank, first_line(error))


def first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:1000]


def watch(launch: launcher.Launch, is_over: Callable[[], bool]) -> str:
    """Wait until the ranks end or have to; why they must be killed, or nothing.

    is_over(): True if they have to, as those of other nodes have ended; it waits a moment before.
    """
    well_at = time.monotonic()
    limit_s = max(timings.TIMINGS.suspended_s, launcher.patience_s())
    while not is_over() and launch.poll() is None:
        stats = {pid: launcher.linux.process_stat(pid) for pid in launch.pids if pid}
        suspended = [pid for pid, stat in stats.items() if stat is not None and stat.is_stopped]
        if not suspended:
            well_at = time.monotonic()
        elif time.monotonic() - well_at > limit_s:
            return f"a rank (pid {suspended[0]}) was suspended"
    return ""


def end_of(launch: launcher.Launch, why_kill: str) -> Exception:
    """Why the ranks have ended, once they have; those that do not in time are killed."""
    try:
        if not why_kill:
            launch.wait(timings.TIMINGS.ranks_end_s)
            return DrumlineError("the ranks ended without an error")
    except TimeoutError:
        why_kill = "one rank ended and another did not"
    except (launcher.LaunchError, OSError) as error:  # OSError: they could not be started
        return error
    launch.stop()
    launch.stop()  # at once
    with contextlib.suppress(launcher.LaunchError):
        launch.wait()
    return DrumlineError(why_kill)
