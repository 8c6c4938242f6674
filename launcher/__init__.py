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
from launcher.launch_job import launch, run_job
from launcher.ports import listen
from launcher.registry import register
from launcher.runtime.outliving import outlive_failures
from launcher.system import gpus, host_addresses, link_state, linux
from launcher.system.engine_request import EngineRequest, engine_request
from launcher.system.free_memory import free_memory_by_limit, free_memory_nbytes
from launcher.timings import ConnectionTimings, patience_s, time_scale
from launcher.trace.live_calls import LiveCalls
from launcher.trace.recorder import Recorder, recorder

if TYPE_CHECKING:
    from launcher.authentication.credentials import Credentials as Credentials
    from launcher.authentication.encryption import EncryptedSocket as EncryptedSocket
    from launcher.authentication.encryption import encryption_problem as encryption_problem
    from launcher.authentication.framed_connection import LENGTH as LENGTH
    from launcher.authentication.framed_connection import SMALL as SMALL
    from launcher.authentication.framed_connection import ConnectionBroken as ConnectionBroken
    from launcher.authentication.framed_connection import FramedConnection as FramedConnection
    from launcher.authentication.framed_connection import NoMessage as NoMessage
    from launcher.authentication.framed_connection import TruncatedMessage as TruncatedMessage
    from launcher.authentication.framed_connection import noop as noop
    from launcher.authentication.handshake import MAX_PENDING as MAX_PENDING
    from launcher.authentication.handshake import Answer as Answer
    from launcher.authentication.handshake import AuthenticatedListener as AuthenticatedListener
    from launcher.authentication.handshake import Handler as Handler
    from launcher.authentication.handshake import Hello as Hello
    from launcher.authentication.handshake import NotReady as NotReady
    from launcher.authentication.handshake import Rejected as Rejected
    from launcher.authentication.handshake import authenticate as authenticate
    from launcher.authentication.handshake import describe_encryption as describe_encryption
    from launcher.authentication.handshake import purpose_of as purpose_of
    from launcher.external.node_follower import Invitation as Invitation
    from launcher.external.node_follower import NodeFollower as NodeFollower
    from launcher.external.node_follower import ask_to_join as ask_to_join
    from launcher.external.node_leader import NodeLeader as NodeLeader
    from launcher.launch_handle import Launch as Launch
    from launcher.launch_handle import start as start
    from launcher.trace import merge_traces as merge_traces

__all__ = [
    "LENGTH",
    "MAX_PENDING",
    "SMALL",
    "Answer",
    "AuthenticatedListener",
    "CauseOrder",
    "ConnectionBroken",
    "ConnectionTimings",
    "Credentials",
    "EncryptedSocket",
    "EngineRequest",
    "Failure",
    "FramedConnection",
    "Handler",
    "Hello",
    "Invitation",
    "Job",
    "Launch",
    "LaunchError",
    "LaunchInfo",
    "LaunchInfoError",
    "LaunchInterrupted",
    "LaunchTimeout",
    "LiveCalls",
    "NoMessage",
    "NodeFollower",
    "NodeLeader",
    "NotReady",
    "Recorder",
    "Rejected",
    "Target",
    "TargetError",
    "TruncatedMessage",
    "ask_to_join",
    "authenticate",
    "current",
    "describe_encryption",
    "encryption_problem",
    "engine_request",
    "free_memory_by_limit",
    "free_memory_nbytes",
    "gpus",
    "host_addresses",
    "is_encrypted",
    "launch",
    "link_state",
    "linux",
    "listen",
    "merge_traces",
    "noop",
    "outlive_failures",
    "patience_s",
    "purpose_of",
    "recorder",
    "register",
    "run_job",
    "start",
    "time_scale",
]

NAMES_BY_MODULE = {
    "launcher.authentication.credentials": "Credentials",
    "launcher.authentication.encryption": "EncryptedSocket encryption_problem",
    "launcher.authentication.framed_connection": (
        "LENGTH SMALL ConnectionBroken FramedConnection NoMessage TruncatedMessage noop"
    ),
    "launcher.authentication.handshake": (
        "MAX_PENDING Answer AuthenticatedListener Handler Hello NotReady Rejected "
        "authenticate describe_encryption purpose_of"
    ),
    "launcher.external.node_follower": "Invitation NodeFollower ask_to_join",
    "launcher.external.node_leader": "NodeLeader",
    "launcher.launch_handle": "Launch start",
}
"""Names that are imported when they are first asked for, by their module: that takes longer."""
MODULES = {name: module for module, names in NAMES_BY_MODULE.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "merge_traces":
        return importlib.import_module("launcher.trace.merge_traces")
    if name in MODULES:
        return getattr(importlib.import_module(MODULES[name]), name)
    if name == "__version__":
        from importlib import metadata

        try:
            return metadata.version("drumline")
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            return "unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
