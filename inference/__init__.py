"""One transformers model over the devices of every rank, as if they were one.

model = inference.load("checkpoint", device_map="auto")
print(model.device_map)
model.generate(tokens)
"""

from .errors import CheckpointError, InferenceError, PeerLost, PlanError, Served, StageError
from .load import load
from .memory import get_max_memory
from .plan import DeviceMap, Layout, Part, Place, plan

__all__ = [
    "CheckpointError",
    "DeviceMap",
    "InferenceError",
    "Layout",
    "Part",
    "PeerLost",
    "Place",
    "PlanError",
    "Served",
    "StageError",
    "get_max_memory",
    "load",
    "plan",
]
