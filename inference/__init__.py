"""One transformers model over the devices of every rank, as if they were one.

model = inference.load("checkpoint", device_map="auto")
print(model.device_map)
model.generate(tokens)
"""

from .boxes import Split
from .errors import CheckpointError, InferenceError, PeerLost, PlanError, Served, StageError
from .load import load
from .memory import get_max_memory
from .mesh import Mesh
from .nd_load import Loaded, load_into
from .over_mesh import load_over_mesh
from .plan import DeviceMap, Layout, Part, Place, plan

__all__ = [
    "CheckpointError",
    "DeviceMap",
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
    "get_max_memory",
    "load",
    "load_into",
    "load_over_mesh",
    "plan",
]
