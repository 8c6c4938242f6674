"""Ranks as processes of this machine: the launcher that needs nothing but Python.

python -m launcher run -n 4 train.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launcher.job import Job
from launcher.launch_info import LaunchInfo
from launcher.system import nesting

if TYPE_CHECKING:
    from launcher.local.launch_watch import LaunchWatch

NAME = "multiprocessing"
SUPPORTS = frozenset({"bind", "encrypt", "log_dir", "nnodes", "preload", "share_devices", "trace"})


def detect(environ: Mapping[str, str]) -> LaunchInfo | None:
    """The rank that we made of this process; None if it is one of a launch nested inside it."""
    info = LaunchInfo.from_env(environ)
    if info is None or nesting.is_inside_another(info.extras, environ):
        return None
    return info


def run(job: Job, owns_process: bool = False, watch: LaunchWatch | None = None) -> list[Any]:
    """Each rank's result, by rank; see launcher/local/launch_local.py."""
    from launcher.local.launch_local import launch_local  # not needed for detection

    return launch_local(job, owns_process, watch)
