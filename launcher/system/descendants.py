"""Ends what descends from this process: SIGTERM, a grace period, SIGKILL."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from launcher import timings
from launcher.system import linux

MIN_LOOKS = 20  # at what is left
SUPERVISOR_NAME = "launch-server"  # of the process that starts ranks and adopts their children


def end_all(grace_s: float) -> None:
    """Send SIGTERM to all descendants, wait grace_s for them to exit, and kill the rest.

    For a subreaper, which has no descendants once it has no children; then it takes no time.
    """
    if grace_s and have_children():
        signal_all(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while have_children() and time.monotonic() < deadline:
            time.sleep(timings.TIMINGS.reap_poll_s)
    if have_children():
        # Zombies too: a launcher that is a subreaper would inherit them.
        kill_all(lambda: linux.descendants(os.getpid(), zombies=True))


def have_children() -> bool:
    """Reap the children that have ended; True if any is left."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def signal_all(number: int) -> None:
    """Send a signal to every descendant."""
    for pid in linux.descendants(os.getpid()):
        linux.send_signal(pid, number)


class Orphans:
    """The processes of one launch that a killed supervisor of it leaves to this process.

    To be made before the supervisor is started; this process must be a subreaper when it is killed.
    What another thread of this process starts meanwhile, in a session of its own, looks the same.
    """

    def __init__(self) -> None:
        self._earlier = linux.descendants(os.getpid())

    def kill(self) -> None:
        kill_all(self._find)

    def _find(self) -> set[int]:
        """Our descendants in other sessions, except those of the supervisors of other launches."""
        own_session = os.getsid(0)
        orphans = linux.descendants(os.getpid(), zombies=True) - self._earlier
        for pid in filter(_is_supervisor, list(orphans)):
            orphans -= {pid, *linux.descendants(pid, zombies=True)}
        stats = {pid: linux.process_stat(pid) for pid in orphans}
        return {pid for pid, stat in stats.items() if stat and stat.session not in (0, own_session)}


def _is_supervisor(pid: int) -> bool:
    """True if it has that name; a rank just forked still has it, but leads no session yet."""
    stat = linux.process_stat(pid)
    is_leader = stat is not None and stat.session == pid
    return is_leader and linux.process_name(pid) == SUPERVISOR_NAME


def kill_all(find_processes: Callable[[], set[int]]) -> None:
    """Kill and reap the processes until find_processes finds none, or only unkillable ones.

    On a machine so busy that one look takes longer than unkillable_s, too.
    """
    deadline, num_looks = time.monotonic() + timings.TIMINGS.unkillable_s, 0
    while pids := find_processes():
        num_looks += 1
        if num_looks > MIN_LOOKS and time.monotonic() > deadline:
            break
        for pid in pids:
            linux.send_signal(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(timings.TIMINGS.reap_poll_s)
