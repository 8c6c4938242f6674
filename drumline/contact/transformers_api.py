"""All that drumline takes from transformers: no other module imports it.

Only modules of this package import this one. They offer drumline's own verbs, such as
`caches.cache_of`, so that a rename in transformers is mended here and nowhere else.
"""

from __future__ import annotations

from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedConfig,
    QuantizedCache,
    StaticCache,
)
from transformers.utils import ModelOutput

READ_IN = "5.21.0, 5.22.2, 5.23.0, 5.24.0"
"""Releases whose source was read for every name below, where none is given."""

NAMES: dict[str, tuple[str, str]] = {
    "Cache": ("the kind of the value in a pass that is its cache, whatever its key", READ_IN),
    "DynamicCache": ("the cache that grows, built again on other ranks", READ_IN),
    "EncoderDecoderCache": ("a pair of caches, which other ranks get as two", READ_IN),
    "ModelOutput": ("outputs that are built again from their parts", READ_IN),
    "PreTrainedConfig": ("a tiny config, for caches on which kinds of layers are tried", READ_IN),
    "QuantizedCache": ("the cache of which only some tokens are as they were put in", READ_IN),
    "StaticCache": ("the cache of fixed size, built again on other ranks", READ_IN),
}
"""Each name that is taken, by import or as an attribute: why, and the releases it was read in."""

__all__ = [
    "NAMES",
    "READ_IN",
    "Cache",
    "DynamicCache",
    "EncoderDecoderCache",
    "ModelOutput",
    "PreTrainedConfig",
    "QuantizedCache",
    "StaticCache",
]
