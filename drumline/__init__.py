"""One transformers model over the devices of every rank, as if they were one device.

model = drumline.load("checkpoint", device_map="auto")
print(model.device_map)
model.generate(tokens)

Engines find the lower layers' names here too: `from drumline import Coordinator, Communicator`.
`import drumline` imports nothing else. A name imports its module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as in NAMES_BY_MODULE, for type checkers and editors
    from communicator import (
        Communicator,
        CommunicatorError,
        CommunicatorTimeout,
        Unsupported,
        backend_names,
    )
    from coordinator import (
        Coordinator,
        CoordinatorError,
        CoordinatorTimeout,
        DrumlineError,
        Peer,
        PeerLost,
        RankFailure,
        RemoteError,
    )
    from drumline.checkpoint.plan_executor import LoadStats
    from drumline.checkpoint.shard_loader import load_into
    from drumline.compile_once.artifact_cache import BuildError
    from drumline.compile_once.device_check import assert_device, check_devices
    from drumline.compile_once.device_mapping import HoistError, HoistReport, UnmappedDevice
    from drumline.compile_once.hoist import hoist
    from drumline.compile_once.hoist_package import hoist_package
    from drumline.compile_once.portable import check_no_process_groups, trace_portable
    from drumline.compile_once.precompile import (
        assert_identical_on_ranks,
        fingerprint,
        get_or_build,
        precompile,
        precompile_modules,
    )
    from drumline.core.device_map import DeviceMap, ModelProfile, ModulePart, Place
    from drumline.core.mesh import Mesh
    from drumline.core.shards import ShardSpec
    from drumline.errors import CheckpointError, PlanError, StageError, WorkerExit
    from drumline.planner.cost_model import (
        DeviceSpeed,
        DeviceSpeeds,
        Estimate,
        LinkSpeed,
        PassShape,
        estimate,
        uniform_speeds,
    )
    from drumline.planner.measure import measure_speeds
    from drumline.planner.memory import cluster_memory
    from drumline.planner.plan import plan
    from drumline.strategies.accelerate_compat import (
        dispatch_model,
        get_balanced_memory,
        get_max_memory,
        infer_auto_device_map,
        load_checkpoint_and_dispatch,
    )
    from drumline.strategies.existing_model import dispatch
    from drumline.strategies.load import load
    from drumline.tensor_parallel.parallelize import local_shard, parallelize, shard_specs
    from drumline.tensor_parallel.tp_layers import insert_collectives
    from drumline.tensor_parallel.tp_plan import read_plan
    from launcher import LaunchError, LaunchInfo, current, launch

NAMES_BY_MODULE = {
    "launcher": ("LaunchError", "LaunchInfo", "current", "launch"),
    "coordinator": (
        "Coordinator",
        "CoordinatorError",
        "CoordinatorTimeout",
        "DrumlineError",
        "Peer",
        "PeerLost",
        "RankFailure",
        "RemoteError",
    ),
    "communicator": (
        "Communicator",
        "CommunicatorError",
        "CommunicatorTimeout",
        "Unsupported",
        "backend_names",
    ),
    "drumline.checkpoint.plan_executor": ("LoadStats",),
    "drumline.checkpoint.shard_loader": ("load_into",),
    "drumline.compile_once.artifact_cache": ("BuildError",),
    "drumline.compile_once.device_check": ("assert_device", "check_devices"),
    "drumline.compile_once.device_mapping": ("HoistError", "HoistReport", "UnmappedDevice"),
    "drumline.compile_once.hoist": ("hoist",),
    "drumline.compile_once.hoist_package": ("hoist_package",),
    "drumline.compile_once.portable": ("check_no_process_groups", "trace_portable"),
    "drumline.compile_once.precompile": (
        "assert_identical_on_ranks",
        "fingerprint",
        "get_or_build",
        "precompile",
        "precompile_modules",
    ),
    "drumline.core.device_map": ("DeviceMap", "ModelProfile", "ModulePart", "Place"),
    "drumline.core.mesh": ("Mesh",),
    "drumline.core.shards": ("ShardSpec",),
    "drumline.errors": ("CheckpointError", "PlanError", "StageError", "WorkerExit"),
    "drumline.planner.cost_model": (
        "DeviceSpeed",
        "DeviceSpeeds",
        "Estimate",
        "LinkSpeed",
        "PassShape",
        "estimate",
        "uniform_speeds",
    ),
    "drumline.planner.measure": ("measure_speeds",),
    "drumline.planner.memory": ("cluster_memory",),
    "drumline.planner.plan": ("plan",),
    "drumline.strategies.accelerate_compat": (
        "dispatch_model",
        "get_balanced_memory",
        "get_max_memory",
        "infer_auto_device_map",
        "load_checkpoint_and_dispatch",
    ),
    "drumline.strategies.existing_model": ("dispatch",),
    "drumline.strategies.load": ("load",),
    "drumline.tensor_parallel.parallelize": ("local_shard", "parallelize", "shard_specs"),
    "drumline.tensor_parallel.tp_layers": ("insert_collectives",),
    "drumline.tensor_parallel.tp_plan": ("read_plan",),
}

__all__ = [
    "BuildError",
    "CheckpointError",
    "Communicator",
    "CommunicatorError",
    "CommunicatorTimeout",
    "Coordinator",
    "CoordinatorError",
    "CoordinatorTimeout",
    "DeviceMap",
    "DeviceSpeed",
    "DeviceSpeeds",
    "DrumlineError",
    "Estimate",
    "HoistError",
    "HoistReport",
    "LaunchError",
    "LaunchInfo",
    "LinkSpeed",
    "LoadStats",
    "Mesh",
    "ModelProfile",
    "ModulePart",
    "PassShape",
    "Peer",
    "PeerLost",
    "Place",
    "PlanError",
    "RankFailure",
    "RemoteError",
    "ShardSpec",
    "StageError",
    "UnmappedDevice",
    "Unsupported",
    "WorkerExit",
    "assert_device",
    "assert_identical_on_ranks",
    "backend_names",
    "check_devices",
    "check_no_process_groups",
    "cluster_memory",
    "current",
    "dispatch",
    "dispatch_model",
    "estimate",
    "fingerprint",
    "get_balanced_memory",
    "get_max_memory",
    "get_or_build",
    "hoist",
    "hoist_package",
    "infer_auto_device_map",
    "insert_collectives",
    "launch",
    "load",
    "load_checkpoint_and_dispatch",
    "load_into",
    "local_shard",
    "measure_speeds",
    "parallelize",
    "plan",
    "precompile",
    "precompile_modules",
    "read_plan",
    "shard_specs",
    "trace_portable",
    "uniform_speeds",
]

MODULES = {name: module for module, names in NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name == "__version__":
        return importlib.import_module("launcher").__version__
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
