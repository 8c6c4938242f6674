"""One transformers model over the devices of every rank, as if they were one.

model = inference.load("checkpoint", device_map="auto")
print(model.device_map)
model.generate(tokens)
"""

from inference.artifact_cache import BuildError
from inference.as_accelerate import (
    dispatch_model,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
    load_checkpoint_and_dispatch,
)
from inference.boxes import Split
from inference.dispatch import dispatch
from inference.errors import (
    CheckpointError,
    InferenceError,
    PeerLost,
    PlanError,
    Served,
    StageError,
)
from inference.fastest import Estimate, Link, Speed, Speeds, Step, assumed, estimate
from inference.hoist import (
    HoistError,
    UnmappedDevice,
    assert_on,
    check_devices,
    hoist,
    hoist_package,
)
from inference.hoist import Report as HoistReport
from inference.load import load
from inference.memory import cluster_memory
from inference.mesh import Mesh
from inference.nd_load import Loaded, load_into
from inference.plan import DeviceMap, Layout, Part, Place, plan
from inference.portable import refuse_baked_groups, trace_portable
from inference.precompile import (
    fingerprint,
    get_or_build,
    precompile,
    precompile_alike,
    same_everywhere,
)
from inference.speed import measure_speeds
from inference.tensor_parallel import connect, parallelize, read_plan, shard_of, splits_of

__all__ = [
    "BuildError",
    "CheckpointError",
    "DeviceMap",
    "Estimate",
    "HoistError",
    "HoistReport",
    "InferenceError",
    "Layout",
    "Link",
    "Loaded",
    "Mesh",
    "Part",
    "PeerLost",
    "Place",
    "PlanError",
    "Served",
    "Speed",
    "Speeds",
    "Split",
    "StageError",
    "Step",
    "UnmappedDevice",
    "assert_on",
    "assumed",
    "check_devices",
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
    "measure_speeds",
    "parallelize",
    "plan",
    "precompile",
    "precompile_alike",
    "read_plan",
    "refuse_baked_groups",
    "same_everywhere",
    "shard_of",
    "splits_of",
    "trace_portable",
]
