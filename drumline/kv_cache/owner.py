"""The KV caches of one rank, by the number that rank 0 gave them."""

from __future__ import annotations

import copy
from typing import Any

from transformers import cache_utils
from transformers.cache_utils import Cache, EncoderDecoderCache

from drumline.core.pytree import class_named
from drumline.errors import DrumlineError
from drumline.kv_cache.merge_caches import merge_caches

CACHE_OPERATIONS = (
    "reorder_cache",
    "crop",
    "reset",
    "batch_repeat_interleave",
    "batch_select_indices",
    "activate_past_recording",
)


QUANTIZED_BACKENDS = {
    cache_utils.Fp8QuantizedLayer: "fp8",
    cache_utils.HQQQuantizedLayer: "hqq",
    cache_utils.QuantoQuantizedLayer: "quanto",
}
"""The backend of a QuantizedCache, which keeps only its layers."""

GROUP_WISE = ("nbits", "axis_key", "axis_value", "q_group_size", "residual_length")


def quantization_options(layer: Any) -> tuple[str, dict[str, int]]:
    """The backend and options with which a QuantizedCache has such layers."""
    options = {name: getattr(layer, name) for name in GROUP_WISE if hasattr(layer, name)}
    return QUANTIZED_BACKENDS[type(layer)], options


class CacheRegistry:
    """The keys and values of the layers of this rank; they never leave it."""

    def __init__(self, config: Any):
        self.config = config
        self.by_number: dict[int, Cache] = {}
        self.pairs: dict[tuple[int, int], EncoderDecoderCache] = {}

    def cache(self, number: int) -> Cache:
        try:
            return self.by_number[number]
        except KeyError:
            raise DrumlineError(
                f"cache {number} is not known here, because the call that created or changed it "
                "failed; generate again from an empty cache."
            ) from None

    def pair(self, own: Cache, cross: Cache) -> EncoderDecoderCache:
        """Both caches as one; the same object each time, since it remembers the filled layers."""
        key = (id(own), id(cross))
        if key not in self.pairs:
            self.pairs[key] = EncoderDecoderCache(own, cross)
        return self.pairs[key]

    def apply(self, operation: str, number: int, *arguments: Any) -> None:
        """Apply an operation that rank 0 logged.

        A cache for which it fails is forgotten: it would differ from its parts on other ranks.
        """
        try:
            self._apply(operation, number, *arguments)
        except Exception:
            self._free(number)
            raise

    # Every rank applies every operation, also for caches whose layers it does not hold: those stay
    # empty here, and the numbers and the pairs of all ranks remain the same.
    def _apply(self, operation: str, number: int, *arguments: Any) -> None:
        if operation == "create":
            self.by_number[number] = self._build(*arguments[0])
        elif operation == "fork":
            self.by_number[number] = copy.deepcopy(self.cache(*arguments))
        elif operation == "join":
            merge_caches(self.cache(number), [self.cache(part) for part in arguments[0]])
        elif operation == "free":
            self._free(number)
        elif operation in CACHE_OPERATIONS:
            self._change(operation, number, *arguments)
        else:
            raise DrumlineError(
                f"{operation!r} is not an operation on a cache; install the same version of "
                "drumline on all ranks."
            )

    def _build(self, kind: str, detail: Any, rest: Any) -> Cache:
        """Build as on rank 0, where a cache may lack the config's windows: across an encoder."""
        if kind == "quantized":
            return cache_utils.QuantizedCache(detail, self.config, **rest)
        is_plain = rest
        if kind == "static":
            cache = cache_utils.StaticCache(config=self.config, max_cache_len=detail)
            if is_plain:
                cache.layers = [cache_utils.StaticLayer(max_cache_len=detail) for _ in cache.layers]
            return cache
        if kind == "own":
            return class_named(detail, cache_utils.DynamicCache)()
        assert kind == "dynamic", kind
        return cache_utils.DynamicCache(config=self.config if detail and not is_plain else None)

    def _change(self, operation: str, number: int, *arguments: Any) -> None:
        cache = self.cache(number)
        change_layers(cache, operation, *arguments)
        if operation == "reset":
            for pair in self.pairs.values():
                if cache in (pair.self_attention_cache, pair.cross_attention_cache):
                    pair.is_updated = dict.fromkeys(pair.is_updated, False)

    def _free(self, number: int) -> None:
        cache = self.by_number.pop(number, None)
        self.pairs = {key: pair for key, pair in self.pairs.items() if id(cache) not in key}


def change_layers(cache: Cache, operation: str, *arguments: Any) -> None:
    """Apply a cache's method of this name to those of its layers that hold something here."""
    for layer in cache.layers:
        if _can(layer, operation):
            getattr(_filled_part(layer, operation), operation)(layer, *arguments)


def _filled_part(layer: Any, operation: str) -> type[Any]:
    """The class of a layer, or of its keys alone if another rank has its states (Inkling)."""
    for kind in type(layer).__mro__ if not _has_states(layer) else ():
        is_of_keys = issubclass(kind, cache_utils.CacheLayerMixin) and hasattr(kind, operation)
        if is_of_keys and not issubclass(kind, cache_utils.LinearAttentionCacheLayerMixin):
            return kind
    return type(layer)


def _can(layer: Any, operation: str) -> bool:
    """True if the operation applies to the layer.

    Layers of other ranks stay empty here, and crop() expects a window or a state in a layer.
    """
    if operation == "activate_past_recording":
        return hasattr(layer, operation)
    return is_filled(layer)


def is_filled(layer: Any) -> bool:
    """True if a layer of a cache holds keys or a state here."""
    return bool(getattr(layer, "is_initialized", False)) or _has_states(layer)


def _has_states(layer: Any) -> bool:
    names = ("is_conv_states_initialized", "is_recurrent_states_initialized")
    return any(any(getattr(layer, name, {}).values()) for name in names)
