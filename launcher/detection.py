"""Who this process is, wherever it was started."""

from __future__ import annotations

import os
import socket

from launcher import linux, registry
from launcher.info import CHOICE, LaunchInfo, LaunchInfoError


def current(launcher: str | None = None) -> LaunchInfo:
    """The LaunchInfo of this rank: from the launcher named, or the innermost that started it, or a
    world of one.

    launcher: insist on this one; the environment variable DRUMLINE_LAUNCHER does the same.
    Raises LaunchInfoError if variables are half set, contradict each other, or are not those of the
    launcher named.
    """
    name = launcher or os.environ.get(CHOICE)
    if name:
        return _insist(name)
    found = (candidate.detect(os.environ) for candidate in registry.every())
    return next((info for info in found if info is not None), None) or alone()


def _insist(name: str) -> LaunchInfo:
    info: LaunchInfo | None = registry.find(name).detect(os.environ)
    if info is None:
        raise LaunchInfoError(
            f"the launcher {name!r} was named, but did not start this process: none of its "
            "variables is set. "
            f"Unset {CHOICE}, or start through `python -m launcher run --launcher {name}`."
        )
    return info


def alone() -> LaunchInfo:
    """A world of one; the same for the whole life of this process, and different in any other."""
    pid = os.getpid()
    return LaunchInfo(launch_id=f"alone-{socket.gethostname()}-{pid}-{linux.start_time(pid)}")
