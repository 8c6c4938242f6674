"""Ranks as threads of one process: the acid test against global state, and quick to try things.

results = launcher.launch(work, nprocs=4, launcher="threads")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher import detection
from launcher.job import Job
from launcher.launch_info import LaunchInfo
from launcher.local import rank_threads

NAME = "threads"
SUPPORTS = frozenset({"encrypt", "log_dir", "share_devices", "trace"})


def detect(environ: Mapping[str, str]) -> LaunchInfo | None:
    """The rank of the calling thread; None if it is none."""
    return detection.thread_info()


def run(job: Job, owns_process: bool = False) -> list[Any]:
    """Each rank's result, by rank.

    owns_process: this process exists only for this launch. Then the threads run in another one,
    under a reaper, so that whatever is killed leaves nothing behind; and without their results.
    Raises LaunchError, here with the exception that is the cause as its __cause__.
    """
    if owns_process:
        from launcher.backends import threads_main  # not needed for detection
        from launcher.external import backend_launcher

        return backend_launcher.run(threads_main, job)
    if job.log_dir is not None:
        raise ValueError(
            f"log_dir={job.log_dir!r} is not supported for threads of a program, which print where "
            "the program prints, so nothing was started. Remove it, or use the command line."
        )
    return rank_threads.run(job)
