"""All that drumline takes from Accelerate: no other module imports it."""

from __future__ import annotations

from typing import Any

import accelerate
import accelerate.utils


def function(name: str) -> Any:
    """One of these functions."""
    return getattr(accelerate.utils, name, None) or getattr(accelerate, name)
