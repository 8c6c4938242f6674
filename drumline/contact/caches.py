"""Verbs over the caches of keys and values that transformers' models are given and return.

A cache is known by its kind, never by the name of an argument or of an output: that name differs
between releases, and between models.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import torch

from drumline.contact import cache_layers
from drumline.contact import transformers_api as api
from drumline.contact.class_names import class_named, full_name

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
    """The arguments or outputs of a pass that are not caches."""
    return {key: value for key, value in values.items() if not is_cache(value)}


def pair_of(cache: Cache) -> tuple[Cache, Cache] | None:
    """The caches of a decoder's own tokens and of its encoder's; None for a cache that is one."""
    if isinstance(cache, api.EncoderDecoderCache):
        own, cross = filter(is_cache, vars(cache).values())  # as they are given to it
        return own, cross
    return None


def iter_caches(value: Any) -> Iterator[Cache]:
    """The caches in nested tuples, lists and dicts, in order; those of a pair one by one."""
    if is_cache(value):
        yield from pair_of(value) or (value,)
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from iter_caches(item)


def held_tensors(state: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a model keeps between passes: a cache, or an object, list or dict of
    tensors in place of one."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        yield from held_tensors(list(state.values()))
    elif isinstance(state, (tuple, list)):
        for item in state:
            yield from held_tensors(item)
    elif is_of_transformers(type(state).__module__) and not isinstance(
        state, (api.PreTrainedConfig, torch.nn.Module)
    ):
        yield from held_tensors(list(vars(state).values()))


def make_pair(own: Cache, cross: Cache) -> Cache:
    """A decoder's own cache and that of its encoder as one; it notes which layers are filled."""
    return api.EncoderDecoderCache(own, cross)


def is_of_transformers(module_name: str) -> bool:
    """True for the name of a module of transformers, as `__module__` has it."""
    return module_name.partition(".")[0] == "transformers"


def has_own_contents(kind: type[Any]) -> bool:
    """True for a dynamic cache of a model in transformers, which keeps more beside the keys.

    It is MiniMax's. It takes no arguments, so all that is in it comes from the layers. In a cache
    of other code, what the model puts there outside of its layers would be missing on other ranks.
    """
    is_of_model = kind.__module__.startswith("transformers.models.")
    is_dynamic = issubclass(kind, api.DynamicCache)
    return is_of_model and is_dynamic and not inspect.signature(kind).parameters


def is_plain(cache: Any) -> bool:
    """True if its layers hold keys and values by sequence and token, and it nothing else."""
    # By name, since a cache that other ranks know has a class of its own, of the same name.
    names = [full_name(kind) for kind in (api.DynamicCache, api.StaticCache)]
    is_usual = full_name(type(cache)) in names and not is_offloading(cache)
    return is_usual and all(map(cache_layers.is_plain, cache.layers))


def has_windows(cache: Any) -> bool:
    return any(map(cache_layers.is_window, cache.layers))


_FLAGS = [name for name, value in vars(api.DynamicCache()).items() if value is False]
"""What a cache that keeps its layers where they are computed says that it does not."""


def is_offloading(cache: Any) -> bool:
    """True if it keeps its layers on the CPU while others are computed."""
    return any(getattr(cache, name, False) for name in _FLAGS)


def is_quantized(cache: Any) -> bool:
    return isinstance(cache, api.QuantizedCache)


def changes_as_usual(kind: type[Any], method: str) -> bool:
    """True if a kind of cache is changed by this method layer by layer."""
    return getattr(kind, method) is getattr(api.DynamicCache, method)


def recipe(cache: Any) -> tuple[Any, ...] | None:
    """Numbers and text from which `make_cache` builds the same cache elsewhere; None if it cannot
    be built."""
    kinds = {type(layer) for layer in cache.layers}
    if is_offloading(cache):
        return None
    windows = [*map(cache_layers.is_window, cache.layers)]
    if isinstance(cache, api.StaticCache):
        lengths = [length for layer in cache.layers if (length := cache_layers.max_tokens(layer))]
        is_all_plain = kinds <= {cache_layers.StaticLayer}
        length = max(lengths, default=1)  # a state's size is of no length
        return "static", length, is_all_plain, windows
    if type(cache) is api.DynamicCache:
        return "dynamic", bool(cache.layers), kinds <= {cache_layers.DynamicLayer}, windows
    if type(cache) is api.QuantizedCache and len(kinds) == 1:
        options = cache_layers.constructor_options(cache.layers[0])
        return "quantized", [full_name(kinds.pop()), len(cache.layers)], options
    if has_own_contents(type(cache)):
        return "own", full_name(type(cache)), None
    return None


def make_cache(
    config: Any, kind: str, detail: Any, rest: Any, windows: Sequence[bool] = ()
) -> Cache:
    """The cache of a `recipe`. The one there may lack the config's windows: across an encoder."""
    if kind == "quantized":
        name, num_layers = detail
        base: Any = cache_layers.DynamicLayer
        layer = class_named(name, base)
        return api.Cache(layers=[layer(**rest) for _ in range(num_layers)])
    if kind == "own":
        return class_named(detail, api.DynamicCache)()
    is_all_plain = rest
    if kind == "static":
        cache = api.StaticCache(config, detail)
        if is_all_plain:
            layers = [cache_layers.StaticLayer(detail) for _ in cache.layers]
            cache.layers = layers
        return _lengthened(cache, windows)
    assert kind == "dynamic", kind
    cache = api.DynamicCache(config=config if detail and not is_all_plain else None)
    return _lengthened(cache, windows) if cache.layers else cache


def _lengthened(cache: Cache, windows: Sequence[bool]) -> Cache:
    """With layers that a model has added to those of its config, for turns of a recurrence."""
    like = {cache_layers.is_window(layer): layer for layer in cache.layers}
    added = [like[kind] for kind in windows[len(cache.layers) :] if kind in like]
    cache.layers += map(copy.deepcopy, added)
    return cache
