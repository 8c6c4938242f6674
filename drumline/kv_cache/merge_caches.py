"""Merging of the caches of micro-batches into the cache of the whole batch, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drumline.contact.cache_layers import is_filled, join_layers
from drumline.contact.caches import Cache, is_plain


def can_be_merged(cache: Any) -> bool:
    """True if it is empty and can be filled by merging the caches of micro-batches."""
    return is_plain(cache) and not any(map(is_filled, cache.layers))


def merge_caches(whole: Cache, parts: Sequence[Cache]) -> None:
    """Fill an empty cache with the sequences of others, which cannot be used afterwards."""
    for index, layers in enumerate(zip(*[part.layers for part in parts], strict=True)):
        if index == len(whole.layers):
            whole.layers.append(layers[0])
        whole.layers[index] = join_layers(layers)
