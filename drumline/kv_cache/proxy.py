"""The KV cache on rank 0 whose layers are on other ranks: a proxy with placeholder tensors.

The cache object stays the one that transformers made, so lengths, masks, windows and crop() are its
own. A layer that another rank holds has placeholders for keys and values, and changes of a cache
outside the layers (reorder, crop, repeat...) are logged and sent with the next call.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch

from drumline.contact import cache_layers, caches
from drumline.contact.cache_layers import CROPPABLE, DynamicLayer
from drumline.contact.caches import Cache
from drumline.core.mixed_classes import mixed_class
from drumline.errors import DrumlineError, RefusedUse
from drumline.kv_cache import placeholder
from drumline.kv_cache.merge_caches import merge_caches
from drumline.kv_cache.owner import change_layers
from drumline.kv_cache.placeholder import EMPTY_LAYER, UNKNOWN, LayerOrigin, LayerVersion


class CacheOpLog(Protocol):
    """A log of cache operations, which are sent with the next message."""

    def record(self, name: str, *arguments: Any) -> None: ...
    def forget(self, number: int) -> None: ...
    def next_cache(self) -> int: ...

    @property
    def uncroppable(self) -> set[int]: ...


class CacheProxy:
    """Mixed into the class of a cache once it is known to other ranks."""

    op_log: CacheOpLog
    number: int
    is_inconsistent = False
    grown: dict[LayerOrigin, tuple[int, LayerVersion]]
    """By origin, the rows and the version of the layer that was made last: others take it, too."""

    remote_versions: dict[int, LayerVersion]
    """By index of a layer that another rank holds, the version that it knows."""

    def can_be_cropped(self) -> bool:
        """True if crop() can put the whole cache back as it was.

        transformers asks it before it decodes with an assistant. A layer with states does not know
        it here, so its own rank says it."""
        if is_own(self) or caches.is_quantized(self):
            return False  # see `_change`
        layers = enumerate(self.layers)  # type: ignore[attr-defined]
        return all(self._is_croppable(index, layer) for index, layer in layers)

    def _is_croppable(self, index: int, layer: Any) -> bool:
        if self.remote_versions.get(index, EMPTY_LAYER).has_state:
            return index not in self.op_log.uncroppable
        return cache_layers.is_croppable(layer)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._change("reorder_cache", beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        self._change("crop", int(tokens_to_remove))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change("batch_repeat_interleave", int(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._change("batch_select_indices", indices)

    def activate_past_recording(self) -> None:
        self._change("activate_past_recording")

    def reset(self) -> None:
        self.op_log.record("reset", self.number)
        with placeholder.counting_tokens():
            super().reset()  # type: ignore[misc]
        self.sync_versions()

    def update(self, *args: Any, **kwargs: Any) -> Any:
        index = next((n for n in (*args, *kwargs.values()) if isinstance(n, int)), None)
        if index in self.remote_versions:
            raise DrumlineError(
                f"rank 0: layer {index} of this cache is on another rank, which would not get "
                "keys and values that are put in here; call the model with the tokens, and it "
                "makes them where they belong. If a rank was lost meanwhile, so was this cache: "
                "start from an empty one."
            )
        return super().update(*args, **kwargs)  # type: ignore[misc]

    def sync_versions(self) -> None:
        """Take the placeholders as they are now for the versions that the other ranks have."""
        layers = self.layers  # type: ignore[attr-defined]
        for index in self.remote_versions:
            origin = placeholder.origin_of(self.remote_versions[index])
            placeholder.replace_with_placeholders(layers[index], origin)
            self.remote_versions[index] = placeholder.version_of(layers[index])

    def _change(self, name: str, *arguments: Any) -> None:
        if caches.is_quantized(self) and name != "reorder_cache":
            raise DrumlineError(
                f"rank 0: {name}() of a quantized cache would change only those of its tokens that "
                "are not quantized yet; use a dynamic cache, or start from an empty one."
            )
        kind = type(self).__mro__[2]
        if is_own(self) and not caches.changes_as_usual(kind, name):
            raise DrumlineError(
                f"rank 0: {kind.__name__} has a {name}() of its own, which reads all layers, and "
                "some are on other ranks; start from an empty cache, or load the model on one rank."
            )
        for index, version in self.remote_versions.items():
            placeholder.check_unchanged(index, _layer(self, index), version)
        # First the placeholders, then the log: what is refused here must not happen elsewhere.
        try:
            with placeholder.counting_tokens():
                change_layers(self, name, *arguments)
            self.op_log.record(name, self.number, *arguments)
        except BaseException:
            self.is_inconsistent = True  # some layers were changed here, and none elsewhere
            raise
        self.sync_versions()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        others = ("op_log", "number", "grown")
        own = {key: value for key, value in vars(self).items() if key not in others}
        twin.__dict__.update(copy.deepcopy(own, memo))
        _register(twin, self.op_log)
        self.op_log.record("fork", twin.number, self.number)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DrumlineError(
            "a cache with layers on other ranks cannot be pickled, as most of it is not here; use "
            "copy.deepcopy for a copy, or keep the tokens."
        )


setattr(CacheProxy, CROPPABLE, property(CacheProxy.can_be_cropped))


def cache_number(
    cache: Cache, op_log: CacheOpLog, layers: Callable[[Cache], Iterable[int]] = lambda _: ()
) -> int:
    """The number of this cache on all ranks; the first call makes it a proxy and logs its creation.

    layers(cache): those that another rank is about to fill; they must be empty until then.
    """
    if isinstance(cache, CacheProxy):
        if cache.op_log is not op_log:
            raise RefusedUse(
                "this cache belongs to another distributed model, whose ranks hold its keys and "
                "values; start from an empty cache."
            )
        if cache.is_inconsistent:
            raise DrumlineError(
                "a call with this cache failed half-way, so its layers no longer hold the same "
                "tokens; start from an empty cache."
            )
        return cache.number
    # The number names the cache in every later message. "create" is sent ahead of the first call
    # that is given the cache, and "free" once the script has let go of it.
    _check_empty(cache, layers(cache))
    recipe = _recipe(cache)
    cache.__class__ = mixed_class(type(cache), CacheProxy, type(cache))
    assert isinstance(cache, CacheProxy)
    _register(cache, op_log)
    cache.remote_versions = {}
    op_log.record("create", cache.number, recipe)
    if any(map(cache_layers.records_past, cache.layers)):  # type: ignore[attr-defined]
        op_log.record("activate_past_recording", cache.number)
    return cache.number


def merge_proxies(whole: Cache, parts: Sequence[Cache]) -> None:
    """Merge the caches of micro-batches, here and on the ranks that hold their layers."""
    first = parts[0]
    if isinstance(first, CacheProxy):
        number = cache_number(whole, first.op_log)
        first.op_log.record("join", number, [cache_number(part, first.op_log) for part in parts])
    with placeholder.counting_tokens():
        merge_caches(whole, parts)
    if isinstance(first, CacheProxy) and isinstance(whole, CacheProxy):
        whole.remote_versions = dict(first.remote_versions)
        whole.sync_versions()


def _register(cache: CacheProxy, op_log: CacheOpLog) -> None:
    cache.op_log, cache.number, cache.grown = op_log, op_log.next_cache(), {}
    forget_with(cache, op_log, cache.number)


def forget_with(owner: object, op_log: CacheOpLog, number: int) -> None:
    """Have the other ranks forget the cache of a number when its owner here is gone."""
    # The log, whose failure may hold the owner, is not to live by it.
    weakref.finalize(owner, _forget, weakref.ref(op_log), number).atexit = False


def _forget(op_log: weakref.ref[CacheOpLog], number: int) -> None:
    if (log := op_log()) is not None:
        log.forget(number)


def _check_empty(cache: Cache, layers: Iterable[int]) -> None:
    for index in layers:
        version = placeholder.version_of(_layer(cache, index))
        if version.length or version.has_state or (is_own(cache) and len(cache)):
            content = f"{version.length} tokens" if version.length else "a state"
            raise RefusedUse(
                f"this cache came with {content} in layer {index}, of which the rank that holds "
                "the layer knows nothing, so its tokens would be wrong; start from an empty cache, "
                "and change one with its own methods (crop, batch_select_indices, reorder_cache) "
                "or copy.deepcopy."
            )


def _recipe(cache: Cache) -> tuple[Any, ...]:
    """Arguments to build the same cache elsewhere."""
    if (arguments := caches.recipe(cache)) is None:
        kind = "cache that offloads" if caches.is_offloading(cache) else type(cache).__name__
        raise RefusedUse(
            f"a {kind} cannot be kept on other ranks, so its keys and values would be lost; use a "
            "dynamic or static cache. For a model that has no other, pass use_cache=False, or load "
            "it on one rank."
        )
    return arguments


def is_own(cache: Any) -> bool:
    """True for a dynamic cache of a model in transformers, which keeps more beside the keys."""
    kind = type(cache).__mro__[2] if isinstance(cache, CacheProxy) else type(cache)
    return caches.has_own_contents(kind)


def account_tokens(
    cache: Cache,
    layers: Iterable[int],
    hidden: torch.Tensor,
    shape_of_pass: tuple[int, int] | None = None,
    by_pass: bool | None = False,
    origins: Mapping[int, LayerOrigin] = MappingProxyType({}),
) -> None:
    """Count the tokens of `hidden`, [batch, tokens, width], in layers held by other ranks.

    origins: of the layers, by index, as far as they are known. shape_of_pass: its rows and tokens.
    by_pass: count the tokens of the pass instead, see `grew_by_pass`. Some models carry several
    streams, before or behind these axes (Gemma 3n, DeepSeek-V4), some the tokens first (FSMT).
    """
    assert isinstance(cache, CacheProxy)
    is_plain = hidden.dim() == 3 and not by_pass
    rows_and_tokens = (hidden.shape[0], hidden.shape[1]) if is_plain else shape_of_pass
    if rows_and_tokens is None:
        raise DrumlineError(
            "rank 0: a layer was called with a hidden state of more than three axes, outside of "
            "its model, so its tokens and streams cannot be told apart; call the model."
        )
    batch, tokens = rows_and_tokens
    if shape_of_pass == (tokens, batch):
        batch, tokens = tokens, batch
    for index in layers:
        layer, origin = _layer(cache, index), origins.get(index, UNKNOWN)
        if type(layer) is DynamicLayer and layer.keys is not None:
            _grow_dynamic(cache, index, layer, (batch, tokens), origin)
        else:
            _grow_layer(cache, index, layer, (batch, tokens), origin)


def show_origins(cache: Cache, origins: Mapping[int, LayerOrigin]) -> None:
    """Have what stands for keys and values of layers say where those are, and their shape."""
    assert isinstance(cache, CacheProxy)
    for index, origin in origins.items():
        version = cache.remote_versions.get(index, EMPTY_LAYER)
        if version.keys is not None and placeholder.origin_of(version) is not origin:
            layer = _layer(cache, index)
            placeholder.show_origin(layer, origin)
            cache.remote_versions[index] = placeholder.version_of(layer)


def matches_pass_shape(shape_of_pass: tuple[int, int] | None, hidden: torch.Tensor) -> bool:
    """True if [batch, tokens, width] has the shape of the pass.

    ProphetNet has several streams behind each other, so their effect on a cache is seen first."""
    if shape_of_pass is None or hidden.dim() != 3:
        return True
    rows_and_tokens = tuple(hidden.shape[:2])
    return shape_of_pass in (rows_and_tokens, rows_and_tokens[::-1])


def grew_by_pass(
    shape_of_pass: tuple[int, int] | None, hidden: torch.Tensor, filled: Sequence[Sequence[int]]
) -> bool:
    """True if the tokens of the pass went into a cache, not the number that the hidden state has.

    filled: for each layer of the cache: its index, its tokens before, and now.
    """
    if shape_of_pass is None or matches_pass_shape(shape_of_pass, hidden):
        return False
    rows, tokens = shape_of_pass
    grown = {now - before for _, before, now in filled if now > before}
    return hidden.shape[0] == rows and grown == {tokens}


def layer_lengths(cache: Cache, layers: Iterable[int]) -> dict[int, int]:
    return {index: placeholder.version_of(_layer(cache, index)).length for index in layers}


def check_lengths(here: Mapping[int, int], filled: Sequence[Sequence[int]], where: str) -> None:
    """Raise DrumlineError unless layers of a cache have as many tokens on their rank as `here`."""
    for index, _, length in filled:
        if here[index] != length:
            raise DrumlineError(
                f"rank 0: {where} has {length} tokens in layer {index} of the cache, where its "
                f"hidden states had {here[index]}, so the lengths that masks are made of would be "
                "wrong; give a model with an encoder an EncoderDecoderCache, which keeps the "
                "encoder's tokens apart, or give the layer to rank 0 in device_map."
            )


def _layer(cache: Any, index: int) -> Any:
    return cache.layers[index] if index < len(cache.layers) else None


def _grow_dynamic(
    cache: CacheProxy, index: int, layer: Any, growth: tuple[int, int], origin: LayerOrigin
) -> None:
    """Grow a dynamic layer by rows and tokens. Layers of one rank and one shape share placeholders,
    so most of a pass only take what the first of them has made."""
    version = cache.remote_versions.get(index, EMPTY_LAYER)
    if layer.keys is not version.keys or layer.values is not version.values:
        placeholder.check_unchanged(index, layer, version)
    now = _grown(cache, origin, growth[0], version.length + growth[1])
    layer.keys, layer.values = now.keys, now.values
    cache.remote_versions[index] = now


def _grown(cache: CacheProxy, origin: LayerOrigin, batch: int, tokens: int) -> LayerVersion:
    rows, last = cache.grown.get(origin, (0, EMPTY_LAYER))
    if (rows, last.length) == (batch, tokens):
        return last
    now = LayerVersion(*placeholder.make_placeholders(batch, tokens, origin), tokens)
    cache.grown[origin] = batch, now
    return now


def prepare_next_token(cache: Cache) -> None:
    """Make the placeholders of the next token ahead of time: the longest work before sending it."""
    if isinstance(cache, CacheProxy):
        for origin, (batch, last) in list(cache.grown.items()):
            _grown(cache, origin, batch, last.length + 1)


def _grow_layer(
    cache: CacheProxy, index: int, layer: Any, growth: tuple[int, int], origin: LayerOrigin
) -> None:
    batch, tokens = growth
    placeholder.check_unchanged(index, layer, cache.remote_versions.get(index, EMPTY_LAYER))
    cache_layers.note_state(layer, batch)
    if index not in cache.remote_versions:  # generate() allocated keys, which do not come here
        cache_layers.forget_allocation(layer)
    if caches.is_quantized(cache) and type(layer) is not DynamicLayer:
        layer = cache.layers[index] = DynamicLayer()  # type: ignore[attr-defined]  # counts as well
    if layer is None or cache_layers.counts_tokens(layer):
        with placeholder.counting_tokens():
            new, _ = placeholder.make_placeholders(batch, tokens)
            _append_placeholder(cache, index, new)
        placeholder.replace_with_placeholders(_layer(cache, index), origin)
    cache.remote_versions[index] = placeholder.version_of(_layer(cache, index))


def _append_placeholder(cache: CacheProxy, index: int, new: torch.Tensor) -> None:
    try:
        super(CacheProxy, cache).update(new, new, index)  # type: ignore[misc]
    except (IndexError, RuntimeError) as error:
        raise DrumlineError(
            f"rank 0: layer {index} of this {type(cache).__name__} is too small for the "
            f"{new.shape[-2]} tokens of {new.shape[0]} rows that it is called with ({error}), so "
            "it cannot be kept in step with the rank that holds it; use a dynamic cache, or load "
            "the model on one rank."
        ) from error
