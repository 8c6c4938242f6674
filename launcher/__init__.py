"""Start ranks, and find out which rank this process is.

info = launcher.current()
print(info.rank, "of", info.world_size)
results = launcher.launch(work, nprocs=4)
"""

import importlib
from typing import TYPE_CHECKING, Any

from launcher.detection import current, is_encrypted
from launcher.errors import (
    CauseOrder,
    Failure,
    LaunchError,
    LaunchInterrupted,
    LaunchTimeout,
    TargetError,
)
from launcher.job import Job, Target
from launcher.launch_info import LaunchInfo, LaunchInfoError
from launcher.launch_job import launch
from launcher.ports import listen
from launcher.registry import register
from launcher.runtime.outliving import outlive_failures
from launcher.system import gpus, host_addresses, linux
from launcher.system.engine_request import EngineRequest, engine_request
from launcher.system.free_memory import free_memory_nbytes
from launcher.timings import time_scale
from launcher.trace.live_calls import LiveCalls
from launcher.trace.recorder import Recorder, recorder

if TYPE_CHECKING:
    from launcher.external.node_rendezvous import NodeFollower as NodeFollower
    from launcher.external.node_rendezvous import NodeLeader as NodeLeader
    from launcher.launch_handle import Launch as Launch
    from launcher.launch_handle import start as start
    from launcher.trace import merge_traces as merge_traces

__all__ = [
    "CauseOrder",
    "EngineRequest",
    "Failure",
    "Job",
    "Launch",
    "LaunchError",
    "LaunchInfo",
    "LaunchInfoError",
    "LaunchInterrupted",
    "LaunchTimeout",
    "LiveCalls",
    "NodeFollower",
    "NodeLeader",
    "Recorder",
    "Target",
    "TargetError",
    "current",
    "engine_request",
    "free_memory_nbytes",
    "gpus",
    "host_addresses",
    "is_encrypted",
    "launch",
    "linux",
    "listen",
    "merge_traces",
    "outlive_failures",
    "recorder",
    "register",
    "start",
    "time_scale",
]


def __getattr__(name: str) -> Any:
    """Import only when asked for what takes longer than all the rest."""
    if name == "merge_traces":
        return importlib.import_module("launcher.trace.merge_traces")
    if name in ("NodeFollower", "NodeLeader"):
        return getattr(importlib.import_module("launcher.external.node_rendezvous"), name)
    if name in ("Launch", "start"):
        from launcher import launch_handle

        return getattr(launch_handle, name)
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("drumline")
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            return "unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
