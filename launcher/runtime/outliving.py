"""A rank that goes on when others of its launch have failed, which the launcher then does not end.

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
    fd = int(info.extras.get(REPORT_FD, -1))
    if fd >= 0 and stat.S_ISFIFO(os.fstat(fd).st_mode):
        pipe_records.send(fd, {"outlives_failures": True})
