"""The LaunchInfo of the calling rank, however it was started."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace

from launcher import launch_secret, registry
from launcher.launch_info import (
    CHOICE,
    ENCRYPT,
    ENCRYPT_VARIABLE,
    TRACE,
    LaunchInfo,
    LaunchInfoError,
)
from launcher.system import linux
from launcher.trace import recorder

# Of ranks that are threads: other threads do not see a context variable.
_thread_info: ContextVar[LaunchInfo | None] = ContextVar("launch_info", default=None)


def current(launcher: str | None = None) -> LaunchInfo:
    """The LaunchInfo of this rank; world_size is 1 if no launcher started this process.

    It comes from the launcher named, or the innermost that started this process. The environment
    variable DRUMLINE_LAUNCHER names one, too, but not for ranks that are threads of this process.

    Raises LaunchInfoError if variables are half set, contradict each other, or are not there for
    the launcher named.
    """
    rank_info = _named(launcher) if launcher else thread_info() or _from_environment()
    info = single_process() if rank_info is None else rank_info
    extras = dict(info.extras)
    if rank_info is not None and "secret_fd" not in extras:  # else it is for ranks to be started
        secret_fd = launch_secret.take(os.environ)
        extras |= {} if secret_fd is None else {"secret_fd": str(secret_fd)}
    if recorder.VARIABLE in os.environ:
        extras.setdefault(TRACE, os.environ[recorder.VARIABLE])
    if is_encrypted():
        extras.setdefault(ENCRYPT, "1")
    return replace(info, extras=extras)


def is_encrypted() -> bool:
    """True in the ranks of a launch with --encrypt that are processes."""
    return os.environ.get(ENCRYPT_VARIABLE, "0") != "0"


def thread_info() -> LaunchInfo | None:
    """The LaunchInfo of this thread, if it is a rank."""
    return _thread_info.get()


@contextlib.contextmanager
def acting_as(info: LaunchInfo | None) -> Iterator[None]:
    """Within this context, on this thread, `launcher.current()` is info."""
    token = _thread_info.set(info)
    try:
        yield
    finally:
        _thread_info.reset(token)


def _from_environment() -> LaunchInfo | None:
    if name := os.environ.get(CHOICE):
        return _named(name)
    detected = (launcher.detect(os.environ) for launcher in registry.all_launchers())
    return next((info for info in detected if info is not None), None)


def _named(name: str) -> LaunchInfo:
    info: LaunchInfo | None = registry.find(name).detect(os.environ)
    if info is None:
        raise LaunchInfoError(
            f"the launcher {name!r} was named, but did not start this process: none of its "
            f"variables is set. Unset {CHOICE}, or start through "
            f"`python -m launcher run --launcher {name}`."
        )
    return info


def single_process() -> LaunchInfo:
    """A world of one rank, with a launch_id of its own for the life of this process."""
    pid = os.getpid()
    stat = linux.process_stat(pid)
    start_time = stat.start_time if stat else 0
    return LaunchInfo(launch_id=f"alone-{socket.gethostname()}-{pid}-{start_time}")
