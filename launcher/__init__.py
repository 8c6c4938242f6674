"""Start ranks, and tell each who it is.

info = launcher.current()
print(info.rank, "of", info.world_size)
results = launcher.launch(work, nprocs=4)
"""

from launcher.detection import current
from launcher.errors import Failure, LaunchError, LaunchInterrupted, LaunchTimeout, TargetError
from launcher.launch_info import LaunchInfo, LaunchInfoError
from launcher.launch_job import launch
from launcher.ports import listen
from launcher.registry import register
from launcher.trace.recorder import Recorder, recorder

__all__ = [
    "Failure",
    "LaunchError",
    "LaunchInfo",
    "LaunchInfoError",
    "LaunchInterrupted",
    "LaunchTimeout",
    "Recorder",
    "TargetError",
    "current",
    "launch",
    "listen",
    "recorder",
    "register",
]
