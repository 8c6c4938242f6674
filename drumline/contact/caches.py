"""Verbs over the caches of keys and values that transformers' models are given and return.

A cache is known by its kind, never by the name of an argument or of an output: that name differs
between releases, and between models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, TypeGuard

from drumline.contact import transformers_api as api

Cache: TypeAlias = api.Cache
"""Keys and values of all layers of a model, as transformers keeps them."""


def is_cache(value: Any) -> TypeGuard[Cache]:
    return isinstance(value, api.Cache)


def cache_key(values: Mapping[str, Any]) -> str | None:
    """The key of the cache among the arguments or outputs of a pass; None if there is none."""
    for key, value in values.items():
        if is_cache(value):
            return key
    return None


def cache_of(values: Mapping[str, Any]) -> Any:
    """The cache among the arguments or outputs of a pass, whatever its key; None if none is."""
    key = cache_key(values)
    return None if key is None else values[key]


def with_cache(values: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """The arguments or outputs of a pass with another cache under the key of theirs."""
    key = cache_key(values)
    return dict(values) if key is None else {**values, key: cache}


def without_caches(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments or outputs of a pass that are no caches."""
    return {key: value for key, value in values.items() if not is_cache(value)}


def pair_of(cache: Cache) -> tuple[Cache, Cache] | None:
    """The caches of a decoder's own tokens and of its encoder's; None for a cache that is one."""
    if isinstance(cache, api.EncoderDecoderCache):
        return cache.self_attention_cache, cache.cross_attention_cache
    return None


def iter_caches(value: Any) -> Iterator[Cache]:
    """The caches in nested tuples, lists and dicts, in order; those of a pair one by one."""
    if is_cache(value):
        yield from pair_of(value) or (value,)
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from iter_caches(item)


def is_croppable(layer: Any) -> bool:
    """True if a layer of a cache can be taken back to fewer tokens.

    A layer with states knows it once it holds them. Before 5.24 transformers did not ask.
    """
    return bool(getattr(layer, "is_croppable", True))
