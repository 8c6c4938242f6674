"""One transformers model over the devices of every rank, as if they were one.

model = inference.load("checkpoint", device_map="auto")
print(model.device_map)
model.generate(tokens)
"""

from inference.artifact_cache import BuildError
from inference.boxes import Split
from inference.errors import (
    CheckpointError,
    InferenceError,
    PeerLost,
    PlanError,
    Served,
    StageError,
)
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
from inference.memory import get_max_memory
from inference.mesh import Mesh
from inference.nd_load import Loaded, load_into
from inference.over_mesh import load_over_mesh
from inference.plan import DeviceMap, Layout, Part, Place, plan
from inference.portable import refuse_baked_groups, trace_portable
from inference.precompile import fingerprint, get_or_build, precompile, same_everywhere
from inference.tensor_parallel import connect, parallelize, read_plan, shard_of, splits_of

__all__ = [
    "BuildError",
    "CheckpointError",
    "DeviceMap",
    "HoistError",
    "HoistReport",
    "InferenceError",
    "Layout",
    "Loaded",
    "Mesh",
    "Part",
    "PeerLost",
    "Place",
    "PlanError",
    "Served",
    "Split",
    "StageError",
    "UnmappedDevice",
    "assert_on",
    "check_devices",
    "connect",
    "fingerprint",
    "get_max_memory",
    "get_or_build",
    "hoist",
    "hoist_package",
    "load",
    "load_into",
    "load_over_mesh",
    "parallelize",
    "plan",
    "precompile",
    "read_plan",
    "refuse_baked_groups",
    "same_everywhere",
    "shard_of",
    "splits_of",
    "trace_portable",
]
