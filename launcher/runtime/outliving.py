"""The messages of a rank to the launcher of its machine, about itself while it runs.

launcher.outlive_failures(info)
"""

from __future__ import annotations

import os
import stat
from dataclasses import replace

from launcher.launch_info import LaunchInfo
from launcher.records import pipe_records

REPORT_FD = "report_fd"


def with_report(info: LaunchInfo, fd: int) -> LaunchInfo:
    """The info of a rank that can say so to the launcher of this machine."""
    return replace(info, extras={**info.extras, REPORT_FD: str(fd)})


def outlive_failures(info: LaunchInfo) -> None:
    """Let this rank go on when others fail, and the launch end as this rank does.

    Its own failure still ends all. Other launchers than ours decide by themselves, and are told
    nothing.
    """
    _tell(info, outlives_failures=True)


def report_meeting(info: LaunchInfo) -> None:
    """Tell the launcher that all ranks of several machines have met.

    From then on each rank sees by itself if another fails.
    """
    _tell(info, has_met=True)


def _tell(info: LaunchInfo, **facts: bool) -> None:
    fd = int(info.extras.get(REPORT_FD, -1))
    if fd >= 0 and stat.S_ISFIFO(os.fstat(fd).st_mode):
        pipe_records.send(fd, facts)
