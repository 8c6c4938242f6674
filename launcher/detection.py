"""Who this process is, wherever it was started."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

from launcher import launch_context, launch_secret, registry
from launcher.launch_info import CHOICE, TRACE, LaunchInfo, LaunchInfoError
from launcher.system import linux
from launcher.trace import recorder


def current(launcher: str | None = None) -> LaunchInfo:
    """The LaunchInfo of this rank; a world of one if nobody started it as one.

    It comes from the launcher named, or the innermost that started this process. The environment
    variable DRUMLINE_LAUNCHER names one, too, but not for ranks that are threads of this process.

    Raises LaunchInfoError if variables are half set, contradict each other, or are not there for
    the launcher named.
    """
    info = _insist(launcher) if launcher else launch_context.current() or _from_environment()
    extras = dict(info.extras)
    if "secret_fd" not in extras and (secret_fd := launch_secret.take(os.environ)) is not None:
        extras["secret_fd"] = str(secret_fd)
    if recorder.VARIABLE in os.environ:
        extras.setdefault(TRACE, os.environ[recorder.VARIABLE])
    return replace(info, extras=extras)


def _from_environment() -> LaunchInfo:
    name = os.environ.get(CHOICE)
    if name:
        return _insist(name)
    found = (candidate.detect(os.environ) for candidate in registry.every())
    return next((info for info in found if info is not None), None) or alone()


def _insist(name: str) -> LaunchInfo:
    info: LaunchInfo | None = registry.find(name).detect(os.environ)
    if info is None:
        raise LaunchInfoError(
            f"the launcher {name!r} was named, but did not start this process: none of its "
            f"variables is set. Unset {CHOICE}, or start through "
            f"`python -m launcher run --launcher {name}`."
        )
    return info


def alone() -> LaunchInfo:
    """A world of one; the same for the whole life of this process, and different in any other."""
    pid = os.getpid()
    return LaunchInfo(launch_id=f"alone-{socket.gethostname()}-{pid}-{linux.start_time(pid)}")
