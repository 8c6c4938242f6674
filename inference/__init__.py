"""One transformers model over the devices of every rank, as if they were one.

model = inference.load("checkpoint", device_map="auto")
print(model.device_map)
model.generate(tokens)
"""

from .boxes import Split
from .errors import CheckpointError, InferenceError, PeerLost, PlanError, Served, StageError
from .hoist import HoistError, UnmappedDevice, assert_on, check_devices, hoist, hoist_package
from .hoist import Report as HoistReport
from .load import load
from .memory import get_max_memory
from .mesh import Mesh
from .nd_load import Loaded, load_into
from .over_mesh import load_over_mesh
from .plan import DeviceMap, Layout, Part, Place, plan
from .portable import refuse_baked_groups, trace_portable

__all__ = [
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
    "get_max_memory",
    "hoist",
    "hoist_package",
    "load",
    "load_into",
    "load_over_mesh",
    "plan",
    "refuse_baked_groups",
    "trace_portable",
]
