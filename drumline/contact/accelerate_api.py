"""All that drumline takes from Accelerate: no other module imports it."""

from __future__ import annotations

from typing import Any

import accelerate
import accelerate.utils

READ_IN = "1.1.0, 1.15.0"
"""Releases that were asked for every name below."""

NAMES: dict[str, tuple[str, str]] = {
    "get_max_memory": ("bytes free by device of one process, with its signature", READ_IN),
    "get_balanced_memory": ("as get_max_memory, for an even spread", READ_IN),
    "infer_auto_device_map": ("the device map of one process, with its signature", READ_IN),
    "dispatch_model": ("a model spread over the devices of one process", READ_IN),
    "load_checkpoint_and_dispatch": ("as dispatch_model, with the weights of a file", READ_IN),
}
"""Its functions that drumline has under the same names: all public, why, and where read."""


def function(name: str) -> Any:
    """One of these functions."""
    return getattr(accelerate.utils, name, None) or getattr(accelerate, name)
