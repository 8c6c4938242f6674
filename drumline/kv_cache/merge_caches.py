"""Merging of the caches of micro-batches into the cache of the whole batch, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import cache_utils

KINDS = (cache_utils.DynamicCache.__name__, cache_utils.StaticCache.__name__)
LAYERS = (
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.StaticLayer,
    cache_utils.StaticSlidingWindowLayer,
)


def has_known_layers(cache: Any) -> bool:
    """True if its layers hold keys and values by sequence and token, and nothing else."""
    is_plain = type(cache).__name__ in KINDS and not cache.offloading
    return is_plain and all(type(layer) in LAYERS for layer in cache.layers)


def can_be_merged(cache: Any) -> bool:
    """True if it is empty and can be filled by merging the caches of micro-batches."""
    return has_known_layers(cache) and not any(layer.is_initialized for layer in cache.layers)


def merge_caches(whole: cache_utils.Cache, parts: Sequence[cache_utils.Cache]) -> None:
    """Fill an empty cache with the sequences of others, which cannot be used afterwards."""
    for index, layers in enumerate(zip(*[part.layers for part in parts], strict=True)):
        if index == len(whole.layers):
            whole.layers.append(layers[0])
        whole.layers[index] = _joined(layers)


def _joined(layers: Sequence[Any]) -> Any:
    first = layers[0]
    if first.is_initialized:
        first.keys = torch.cat([layer.keys for layer in layers])
        first.values = torch.cat([layer.values for layer in layers])
        if hasattr(first, "batch_size"):
            first.batch_size = first.keys.shape[0]
    return first
