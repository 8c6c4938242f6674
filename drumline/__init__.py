"""One transformers model over the devices of every rank, as if they were one.

model = drumline.load("checkpoint", device_map="auto")
print(model.device_map)
model.generate(tokens)
"""

from drumline.checkpoint.plan_executor import LoadStats
from drumline.checkpoint.shard_loader import load_into
from drumline.compile_once.artifact_cache import BuildError
from drumline.compile_once.device_check import assert_device, check_devices
from drumline.compile_once.device_mapping import HoistError, UnmappedDevice
from drumline.compile_once.device_mapping import HoistReport as HoistReport
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
from drumline.errors import (
    CheckpointError,
    DrumlineError,
    PeerLost,
    PlanError,
    StageError,
    WorkerExit,
)
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
from drumline.tensor_parallel.parallelize import (
    connect,
    local_shard,
    parallelize,
    read_plan,
    shard_specs,
)

__all__ = [
    "BuildError",
    "CheckpointError",
    "DeviceMap",
    "DeviceSpeed",
    "DeviceSpeeds",
    "DrumlineError",
    "Estimate",
    "HoistError",
    "HoistReport",
    "LinkSpeed",
    "LoadStats",
    "Mesh",
    "ModelProfile",
    "ModulePart",
    "PassShape",
    "PeerLost",
    "Place",
    "PlanError",
    "ShardSpec",
    "StageError",
    "UnmappedDevice",
    "WorkerExit",
    "assert_device",
    "assert_identical_on_ranks",
    "check_devices",
    "check_no_process_groups",
    "cluster_memory",
    "connect",
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
