"""The master's side of a cache whose layers live on other ranks.

The cache object stays the one that transformers made, so lengths, masks, windows and croppings are
its own. A layer held elsewhere is kept in step with one byte per token in place of keys and values,
and what changes a cache outside the layers (reorder, crop, repeat...) is written down and sent
along with the next call.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    StaticCache,
)

from inference.errors import InferenceError
from inference.shadow import hide, shadow


class Journal(Protocol):
    """Where operations wait for the next message."""

    def record(self, name: str, *arguments: Any) -> None: ...
    def forget(self, number: int) -> None: ...
    def next_cache(self) -> int: ...


class Mirrored:
    """Mixed into the class of a cache once it is known to other ranks."""

    journal: Journal
    number: int
    torn = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.journal.record("reorder_cache", self.number, beam_idx)
        super().reorder_cache(beam_idx)  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        self.journal.record("crop", self.number, int(tokens_to_remove))
        super().crop(tokens_to_remove)  # type: ignore[misc]

    def reset(self) -> None:
        self.journal.record("reset", self.number)
        super().reset()  # type: ignore[misc]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.journal.record("batch_repeat_interleave", self.number, int(repeats))
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.journal.record("batch_select_indices", self.number, indices)
        super().batch_select_indices(indices)  # type: ignore[misc]

    def activate_past_recording(self) -> None:
        self.journal.record("activate_past_recording", self.number)
        super().activate_past_recording()  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        own = {key: value for key, value in vars(self).items() if key not in ("journal", "number")}
        twin.__dict__.update(copy.deepcopy(own, memo))
        _register(twin, self.journal)
        self.journal.record("fork", twin.number, self.number)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InferenceError(
            "a cache with layers on other ranks cannot be pickled, as most of it is not here; use "
            "copy.deepcopy for a copy, or keep the tokens."
        )


def number_of(cache: Cache, journal: Journal) -> int:
    """The number by which other ranks know this cache; the first time, they create it."""
    if isinstance(cache, Mirrored):
        if cache.journal is not journal:
            raise InferenceError(
                "this cache belongs to another distributed model, whose ranks hold its keys and "
                "values; start from an empty cache."
            )
        if cache.torn:
            raise InferenceError(
                "a call with this cache failed half-way, so its layers no longer hold the same "
                "tokens; start from an empty cache."
            )
        return cache.number
    recipe = _recipe(cache)
    cache.__class__ = _mirrored(type(cache))
    assert isinstance(cache, Mirrored)
    _register(cache, journal)
    journal.record("create", cache.number, recipe)
    return cache.number


def _register(cache: Mirrored, journal: Journal) -> None:
    cache.journal, cache.number = journal, journal.next_cache()
    weakref.finalize(cache, journal.forget, cache.number).atexit = False


def _mirrored(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (Mirrored, kind), {"__module__": kind.__module__})


def _recipe(cache: Cache) -> tuple[Any, ...]:
    """What the owner needs to build the same cache from its own copy of the config."""
    if cache.offloading:
        kind = None
    elif isinstance(cache, StaticCache):
        lengths = [layer.max_cache_len for layer in cache.layers if hasattr(layer, "max_cache_len")]
        return ("static", max(lengths))
    elif type(cache) is DynamicCache:
        return ("dynamic", bool(cache.layers))
    else:
        kind = type(cache).__name__
    raise InferenceError(
        f"a {kind or 'cache that offloads'} cannot be kept on other ranks, so its keys and values "
        "would be lost; use a dynamic or static cache."
    )


def advance(cache: Cache, layers: Iterable[int], hidden: torch.Tensor) -> None:
    """Account for the tokens of `hidden`, [..., batch, tokens, width], in layers held elsewhere."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    for index in layers:
        _advance_layer(cache, index, hidden.shape[-3], hidden.shape[-2])


def _advance_layer(cache: Cache, index: int, batch: int, tokens: int) -> None:
    layer = cache.layers[index] if index < len(cache.layers) else None
    if layer is not None and type(layer) is DynamicLayer and layer.is_initialized:
        layer.keys = layer.values = shadow(batch, layer.get_seq_length() + tokens)
        return
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
        layer.batch_size = batch
    if layer is None or hasattr(layer, "get_seq_length"):
        cache.update(shadow(batch, tokens), shadow(batch, tokens), index)
        hide(cache.layers[index])
