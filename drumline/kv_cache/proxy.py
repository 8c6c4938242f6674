"""The master's side of a cache whose layers live on other ranks.

The cache object stays the one that transformers made, so lengths, masks, windows and croppings are
its own. A layer held elsewhere is kept in step with one byte per token in place of keys and values,
and what changes a cache outside the layers (reorder, crop, repeat...) is written down and sent
along with the next call.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    QuantizedCache,
    StaticCache,
    StaticLayer,
)

from drumline.core.cache_kinds import BaseQuantizedLayer
from drumline.errors import DrumlineError
from drumline.kv_cache.merge import merge_caches
from drumline.kv_cache.owner import QUANTIZED_BACKENDS, change_layers, quantization_options
from drumline.kv_cache.placeholder import (
    counting_tokens,
    make_placeholder,
    replace_with_placeholders,
)
from drumline.kv_cache.version import EMPTY_LAYER, LayerVersion, check_unchanged, version_of


class CacheOpLog(Protocol):
    """Where operations wait for the next message."""

    def record(self, name: str, *arguments: Any) -> None: ...
    def forget(self, number: int) -> None: ...
    def next_cache(self) -> int: ...
    def rows_and_tokens(self) -> tuple[int, int]: ...

    @property
    def shape_of_pass(self) -> tuple[int, int] | None: ...


class LayerGrowth(NamedTuple):
    """How a layer went on: those of one pass, whose keys were the same before, share the rest."""

    before: torch.Tensor | None = None
    shape: tuple[int, int] = (0, 0)
    version: LayerVersion = EMPTY_LAYER


class CacheProxy:
    """Mixed into the class of a cache once it is known to other ranks."""

    journal: CacheOpLog
    number: int
    is_inconsistent = False
    step = LayerGrowth()
    ahead: tuple[int, LayerVersion] = (
        0,
        EMPTY_LAYER,
    )  # rows, and a layer with one token more than now

    known: dict[int, LayerVersion]
    """The layers that are on other ranks, as those know them."""

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
        self.journal.record("reset", self.number)
        with counting_tokens():
            super().reset()  # type: ignore[misc]
        self.remember()

    def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx in self.known:
            raise DrumlineError(
                f"rank 0: layer {layer_idx} of this cache is on another rank, which would not get "
                "keys and values that are put in here; call the model with the tokens, and it "
                "makes them where they belong."
            )
        return super().update(keys, values, layer_idx, *args, **kwargs)  # type: ignore[misc]

    def remember(self) -> None:
        """The other ranks have changed their layers as these here were."""
        layers = self.layers  # type: ignore[attr-defined]
        for index in self.known:
            replace_with_placeholders(layers[index])
            self.known[index] = version_of(layers[index])

    def _change(self, name: str, *arguments: Any) -> None:
        if isinstance(self, QuantizedCache) and name != "reorder_cache":
            raise DrumlineError(
                f"rank 0: {name}() of a quantized cache would change only those of its tokens that "
                "are not quantized yet; use a dynamic cache, or start from an empty one."
            )
        for index, known in self.known.items():
            check_unchanged(index, _layer(self, index), known)
        try:
            with counting_tokens():
                change_layers(self, name, *arguments)
            self.journal.record(name, self.number, *arguments)
        except BaseException:
            self.is_inconsistent = True  # some layers were changed; nobody else is told
            raise
        self.remember()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        others = ("journal", "number", "ahead")
        own = {key: value for key, value in vars(self).items() if key not in others}
        twin.__dict__.update(copy.deepcopy(own, memo))
        _register(twin, self.journal)
        self.journal.record("fork", twin.number, self.number)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise DrumlineError(
            "a cache with layers on other ranks cannot be pickled, as most of it is not here; use "
            "copy.deepcopy for a copy, or keep the tokens."
        )


def cache_number(cache: Cache, journal: CacheOpLog, layers: Iterable[int] = ()) -> int:
    """The number by which other ranks know this cache; the first time, they create it.

    layers: those of the cache that another rank is about to fill, so they must be empty till then.
    """
    if isinstance(cache, CacheProxy):
        if cache.journal is not journal:
            raise DrumlineError(
                "this cache belongs to another distributed model, whose ranks hold its keys and "
                "values; start from an empty cache."
            )
        if cache.is_inconsistent:
            raise DrumlineError(
                "a call with this cache failed half-way, so its layers no longer hold the same "
                "tokens; start from an empty cache."
            )
        return cache.number
    _refuse_contents(cache, layers)
    recipe = _recipe(cache)
    cache.__class__ = _mirrored(type(cache))
    assert isinstance(cache, CacheProxy)
    _register(cache, journal)
    cache.known = {}
    journal.record("create", cache.number, recipe)
    if any(getattr(layer, "record_past", False) for layer in cache.layers):  # type: ignore[attr-defined]
        journal.record("activate_past_recording", cache.number)
    return cache.number


def merge_proxies(whole: Cache, parts: Sequence[Cache]) -> None:
    """Put the caches of groups of rows together, here and wherever the other ranks hold them."""
    first = parts[0]
    if isinstance(first, CacheProxy):
        number = cache_number(whole, first.journal)
        first.journal.record("join", number, [cache_number(part, first.journal) for part in parts])
    with counting_tokens():
        merge_caches(whole, parts)
    if isinstance(first, CacheProxy) and isinstance(whole, CacheProxy):
        whole.known = dict(first.known)
        whole.remember()


def _register(cache: CacheProxy, journal: CacheOpLog) -> None:
    cache.journal, cache.number = journal, journal.next_cache()
    weakref.finalize(cache, journal.forget, cache.number).atexit = False


def _mirrored(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (CacheProxy, kind), {"__module__": kind.__module__})


def _refuse_contents(cache: Cache, layers: Iterable[int]) -> None:
    for index in layers:
        layer = _layer(cache, index)
        states = getattr(layer, "has_previous_state", None) or {}
        length = getattr(layer, "get_seq_length", int)()
        if int(length) or any(states.values()):
            raise DrumlineError(
                f"this cache came with {int(length)} tokens in layer {index}, which another rank "
                "holds and knows nothing of them, so its tokens would be wrong; start from an "
                "empty cache, and change one with its own methods (crop, batch_select_indices, "
                "reorder_cache) or copy.deepcopy."
            )


def _recipe(cache: Cache) -> tuple[Any, ...]:
    """What the owner needs to build the same cache: its kind, its length or whether it has layers
    from the beginning, and whether these are of the config's kinds or all plain."""
    if cache.offloading:
        kind = None
    elif isinstance(cache, StaticCache):
        lengths = [layer.max_cache_len for layer in cache.layers if hasattr(layer, "max_cache_len")]
        is_plain = all(type(layer) is StaticLayer for layer in cache.layers)
        return ("static", max(lengths, default=1), is_plain)  # a state takes no room by length
    elif type(cache) is DynamicCache:
        is_plain = all(type(layer) is DynamicLayer for layer in cache.layers)
        return ("dynamic", bool(cache.layers), is_plain)
    elif type(cache) is QuantizedCache and type(cache.layers[0]) in QUANTIZED_BACKENDS:
        return ("quantized", *quantization_options(cache.layers[0]))
    else:
        kind = type(cache).__name__
    raise DrumlineError(
        f"a {kind or 'cache that offloads'} cannot be kept on other ranks, so its keys and values "
        "would be lost; use a dynamic or static cache, or, for a model that has no "
        "other, load it on one rank."
    )


def account_tokens(
    cache: Cache, layers: Iterable[int], hidden: torch.Tensor, by_pass: bool | None = False
) -> None:
    """Count the tokens of `hidden`, [batch, tokens, width], in layers held by other ranks.

    by_pass: count the tokens of the pass instead, see `grew_by_pass`. Some models carry several
    streams, before or behind these axes (Gemma 3n, DeepSeek-V4), some the tokens first (FSMT).
    """
    assert isinstance(cache, CacheProxy)
    is_plain = hidden.dim() == 3 and not by_pass
    batch, tokens = hidden.shape[:2] if is_plain else cache.journal.rows_and_tokens()
    if cache.journal.shape_of_pass == (tokens, batch):
        batch, tokens = tokens, batch
    for index in layers:
        layer = _layer(cache, index)
        if type(layer) is DynamicLayer and layer.is_initialized:
            _advance_dynamic(cache, index, layer, batch, tokens)
        else:
            _advance_layer(cache, index, layer, batch, tokens)


def matches_pass_shape(shape_of_pass: tuple[int, int] | None, hidden: torch.Tensor) -> bool:
    """Whether [batch, tokens, width] are those of the pass; ProphetNet has several streams of them
    behind each other, so what these put into a cache has to be seen first."""
    if shape_of_pass is None or hidden.dim() != 3:
        return True
    rows_and_tokens = tuple(hidden.shape[:2])
    return shape_of_pass in (rows_and_tokens, rows_and_tokens[::-1])


def grew_by_pass(
    shape_of_pass: tuple[int, int] | None, hidden: torch.Tensor, filled: Sequence[Sequence[int]]
) -> bool:
    """Whether the tokens of the pass went into a cache, and not those of a hidden state that has
    others. filled: a layer of the cache, its tokens before, and now."""
    if shape_of_pass is None or matches_pass_shape(shape_of_pass, hidden):
        return False
    rows, tokens = shape_of_pass
    grown = {now - before for _, before, now in filled if now > before}
    return hidden.shape[0] == rows and grown == {tokens}


def layer_lengths(cache: Cache, layers: Iterable[int]) -> dict[int, int]:
    return {index: version_of(_layer(cache, index)).length for index in layers}


def check_lengths(here: Mapping[int, int], filled: Sequence[Sequence[int]], where: str) -> None:
    """Raise DrumlineError unless layers of a cache have as many tokens on their rank as `here`."""
    for index, _, length in filled:
        if here[index] != length:
            raise DrumlineError(
                f"rank 0: {where} has {length} tokens in layer {index} of the cache, where its "
                f"hidden states had {here[index]}, so the lengths that masks are made of would be "
                "wrong; give it to rank 0 in device_map."
            )


def _layer(cache: Any, index: int) -> Any:
    return cache.layers[index] if index < len(cache.layers) else None


def _advance_dynamic(
    cache: CacheProxy, index: int, layer: DynamicLayer, batch: int, tokens: int
) -> None:
    """The layers of one pass share one shadow, so that most need no more than to be given it."""
    known, keys = cache.known.get(index, EMPTY_LAYER), layer.keys
    if keys is not known.keys or layer.values is not known.values:
        check_unchanged(index, layer, known)
    step = cache.step
    if keys is not step.before or (batch, tokens) != step.shape:
        now = step.version
        if (step.shape[0], now.length) != (batch, known.length + tokens):
            now = _full(cache, batch, known.length + tokens)
        cache.step = step = LayerGrowth(keys, (batch, tokens), now)
    layer.keys = layer.values = step.version.keys
    cache.known[index] = step.version


def _full(cache: CacheProxy, batch: int, tokens: int) -> LayerVersion:
    rows, now = cache.ahead
    if (rows, now.length) == (batch, tokens):
        return now
    keys = make_placeholder(batch, tokens)
    return LayerVersion(keys, keys, tokens)


def prepare_next_token(cache: Cache) -> None:
    """Make the shadow of the next token while there is time: of all that is done for a token before
    it is sent, that takes longest."""
    if isinstance(cache, CacheProxy) and (step := cache.step).version is not EMPTY_LAYER:
        cache.ahead = step.shape[0], _full(cache, step.shape[0], step.version.length + 1)


def _advance_layer(cache: CacheProxy, index: int, layer: Any, batch: int, tokens: int) -> None:
    check_unchanged(index, layer, cache.known.get(index, EMPTY_LAYER))
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)
        layer.batch_size = batch
    if index not in cache.known and getattr(layer, "is_initialized", False):
        layer.is_initialized = False  # generate() made room for keys, which do not come here
    if isinstance(layer, BaseQuantizedLayer):
        layer = cache.layers[index] = DynamicLayer()  # type: ignore[attr-defined]  # counts as well
    if layer is None or hasattr(layer, "get_seq_length"):
        with counting_tokens():
            _count(cache, index, make_placeholder(batch, tokens))
        replace_with_placeholders(_layer(cache, index))
    cache.known[index] = version_of(_layer(cache, index))


def _count(cache: CacheProxy, index: int, new: torch.Tensor) -> None:
    try:
        super(CacheProxy, cache).update(new, new, index)  # type: ignore[misc]
    except (IndexError, RuntimeError) as error:
        raise DrumlineError(
            f"rank 0: layer {index} of this {type(cache).__name__} has no room for the "
            f"{new.shape[-2]} tokens of {new.shape[0]} rows that it is called with ({error}), so "
            "it cannot be kept in step with the rank that holds it; use a dynamic cache, or load "
            "the model on one rank."
        ) from error
