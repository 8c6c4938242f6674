"""One transformers model over the devices of every rank, as if they were one.

model = drumline.load("checkpoint", device_map="auto")
print(model.device_map)
model.generate(tokens)
"""

from drumline.checkpoint.shard_loader import Loaded, load_into
from drumline.compile_once.artifact_cache import BuildError
from drumline.compile_once.hoist import (
    HoistError,
    UnmappedDevice,
    assert_on,
    check_devices,
    hoist,
    hoist_package,
)
from drumline.compile_once.hoist import Report as HoistReport
from drumline.compile_once.portable import refuse_baked_groups, trace_portable
from drumline.compile_once.precompile import (
    fingerprint,
    get_or_build,
    precompile,
    precompile_alike,
    same_everywhere,
)
from drumline.core.mesh import Mesh
from drumline.core.shards import Split
from drumline.errors import (
    CheckpointError,
    InferenceError,
    PeerLost,
    PlanError,
    Served,
    StageError,
)
from drumline.planner.cost_model import Estimate, Link, Speed, Speeds, Step, assumed, estimate
from drumline.planner.measure import measure_speeds
from drumline.planner.memory import cluster_memory
from drumline.planner.plan import DeviceMap, Layout, Part, Place, plan
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
    parallelize,
    read_plan,
    shard_of,
    splits_of,
)

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
