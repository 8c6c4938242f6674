"""Kinds of caches that not every release of transformers has; an absent one has no instances."""

from __future__ import annotations

from typing import Any

from transformers import cache_utils


def _kind(*names: str) -> Any:
    """The first of these classes that transformers has, else an empty one."""
    present = [getattr(cache_utils, name) for name in names if hasattr(cache_utils, name)]
    return present[0] if present else type(names[0], (), {})


BaseQuantizedLayer = _kind("BaseQuantizedLayer", "QuantizedLayer")
Fp8QuantizedLayer = _kind("Fp8QuantizedLayer")
KVSharingDict = _kind("KVSharingDict")
