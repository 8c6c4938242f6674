"""Verbs over the layers of a cache.

What a layer holds is seen by looking at its tensors, and what its kind does by trying it on caches
of a tiny config: attributes and classes of layers change from release to release.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from drumline.contact import transformers_api as api


def tiny_cache(is_static: bool, window: int = 4, tokens: int = 8) -> Any:
    """A cache of a layer with room for all tokens, or these, and one that keeps a window."""
    kinds = ["full_attention", "sliding_attention"]
    config = api.PreTrainedConfig(num_hidden_layers=2, sliding_window=window, layer_types=kinds)
    return api.StaticCache(config, tokens) if is_static else api.DynamicCache(config=config)


DynamicLayer, DynamicWindow = [type(layer) for layer in tiny_cache(False).layers]
StaticLayer, StaticWindow = [type(layer) for layer in tiny_cache(True).layers]
PLAIN_KINDS = (DynamicLayer, DynamicWindow, StaticLayer, StaticWindow)
"""The kinds of layers that hold keys and values by sequence and token, and nothing else."""


def _recording(cache: Any) -> Any:
    getattr(cache, "activate_past_recording", int)()
    return cache


def _layer_with_state(is_filled: bool, is_reset: bool = False) -> Any:
    """One that records: without it, the first state of a fixed size imports torch._dynamo."""
    config = api.PreTrainedConfig(num_hidden_layers=1, layer_types=["conv"])
    cache = _recording(api.DynamicCache(config=config))
    if is_filled:
        with contextlib.suppress(AttributeError, TypeError):  # told by the check of fast paths
            cache.update_conv_state(torch.zeros(1, 1, 1), 0)
    if is_reset:
        cache.reset()
    return cache.layers[0]


def _attribute(layers: Sequence[Any], values: Sequence[Any]) -> str:
    """The attribute that has these values, in the order of the layers; "" if none has."""
    names = (name for name in dir(layers[0]) if not name.startswith("_"))
    reprs = [*map(repr, values)]
    return next((n for n in names if [repr(getattr(y, n, None)) for y in layers] == reprs), "")


MOST_KEPT = 1 / 0.95
"""Times as much memory as its tensors have that a layer may keep."""

_WINDOWS = [tiny_cache(False).layers[1], tiny_cache(False, window=5).layers[1]]
_WINDOW = _attribute(_WINDOWS, (4, 5))
_ROOM = _attribute([tiny_cache(True, tokens=size).layers[0] for size in (8, 9)], (8, 9))
_RECORDS = _attribute([_WINDOWS[0], _recording(tiny_cache(False)).layers[1]], (False, True))
_STATEFUL = [_layer_with_state(*case) for case in ((False,), (True,), (True, True))]
_STATES = _attribute(_STATEFUL, ({0: False}, {0: True}, {0: False}))
CROPPABLE = _attribute(_STATEFUL, (False, True, True))
"""Attributes of layers, found by what they say; "", which no layer has, where none says it."""


def is_plain(layer: Any) -> bool:
    return type(layer) in PLAIN_KINDS


def is_filled(layer: Any) -> bool:
    """True if a layer of a cache holds keys or a state here."""
    return any(tensor.dim() > 1 for tensor in _tensors(vars(layer).values()))


def _holds_states(layer: Any) -> bool:
    """True if it holds tensors by number, as states of recurrences and convolutions are kept."""
    inner = [value.values() for value in vars(layer).values() if isinstance(value, dict)]
    return any(tensor.dim() > 1 for values in inner for tensor in _tensors(values))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (dict, tuple)):
            yield from _tensors(value.values() if isinstance(value, dict) else value)


def tensors_of(layer: Any) -> list[torch.Tensor]:
    """All that a plain layer holds on a device."""
    return [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]


def shapes(layer: Any) -> tuple[list[int], list[int]]:
    """The shapes of its keys and values, empty where it has none."""
    keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
    return [*getattr(keys, "shape", ())], [*getattr(values, "shape", ())]


def counts_in_python(layer: Any) -> bool:
    """True unless its tensors and counters stay in the same memory from token to token."""
    return type(layer) is not StaticLayer or static_has_counter()


@functools.cache
def static_has_counter() -> bool:
    """True if a new static layer has a whole number that is 0: those of its size are not."""
    new = tiny_cache(True).layers[0]
    return any(type(value) is int and value == 0 for value in vars(new).values())


def is_croppable(layer: Any) -> bool:
    """True if a layer of a cache can be taken back to fewer tokens.

    A layer with states knows it once it holds them. Before 5.24 transformers asked no other.
    """
    return bool(getattr(layer, CROPPABLE, True))


def num_tokens(layer: Any) -> int:
    """The tokens that a layer has seen; 0 for None, and for one that counts none."""
    return int(getattr(layer, "get_seq_length", int)())


def counts_tokens(layer: Any) -> bool:
    return hasattr(layer, "get_seq_length")


def keep_no_more(layer: Any) -> None:
    """Copy tensors that are views of something larger, by more than plans may be wrong.

    A window of more than 20 tokens is not copied for each new one.
    """
    copies: dict[int, torch.Tensor] = {}
    for values in (vars(layer), *(v for v in vars(layer).values() if isinstance(v, dict))):
        for name, value in values.items():
            if type(value) is not torch.Tensor:  # but a placeholder
                continue
            memory = value.untyped_storage().nbytes()
            if id(value) not in copies and memory > MOST_KEPT * value.nbytes:
                copies[id(value)] = value.clone()
            values[name] = copies.get(id(value), value)


def is_window(layer: Any) -> bool:
    """True if it keeps the last tokens only."""
    return isinstance(layer, (DynamicWindow, StaticWindow))


def window_tokens(layer: Any) -> float:
    """The tokens that it keeps at most; infinity if it keeps them all."""
    return float(getattr(layer, _WINDOW, math.inf)) if is_window(layer) else math.inf


def records_past(layer: Any) -> bool:
    """True if it keeps what it would forget, until crop() is called."""
    return bool(getattr(layer, _RECORDS, False))


def max_tokens(layer: Any) -> int | None:
    """The tokens that a static layer has room for; None if it has no such number."""
    return getattr(layer, _ROOM, None)


def has_state(layer: Any) -> bool:
    """True if a pass has put a recurrent or convolutional state into a layer."""
    return any(getattr(layer, _STATES, {}).values())


def note_state(layer: Any, rows: int) -> None:
    """Have a layer without tensors say that a pass of `rows` has put a state into it."""
    if (states := getattr(layer, _STATES, None)) is not None:
        setattr(layer, _STATES, dict.fromkeys(states, True))
        layer.batch_size = rows


def forget_allocation(layer: Any) -> None:
    """Have a layer allocate keys and values anew with the next ones that it is given."""
    if getattr(layer, "is_initialized", False):
        layer.is_initialized = False


def class_for(layer: Any, operation: str) -> type[Any]:
    """The class of a layer, or of its keys alone if another rank has its states (Inkling)."""
    for kind in type(layer).__mro__ if not _holds_states(layer) else ():
        is_of_keys = hasattr(kind, "update") and not hasattr(kind, "update_conv_state")
        if is_of_keys and hasattr(kind, operation):
            return kind
    return type(layer)


def constructor_options(layer: Any) -> dict[str, Any]:
    """The options with which a layer of a quantized cache was made, which it keeps by name."""
    names = inspect.signature(type(layer)).parameters
    return {name: getattr(layer, name) for name in names if hasattr(layer, name)}


def join_layers(layers: Sequence[Any]) -> Any:
    """The first of some plain layers of equal length, with the rows of all of them."""
    first = layers[0]
    kind: Any = type(first)
    for name in _row_attributes(kind):
        values: list[Any] = [getattr(layer, name, None) for layer in layers]
        if isinstance(values[0], torch.Tensor):
            setattr(first, name, torch.cat(values))
        elif values[0] is not None:
            setattr(first, name, sum(values))
    return first


@functools.cache
def _row_attributes(kind: Any) -> list[str]:
    """The attributes of a kind of plain layers that grow with the rows: tensors, and a number.

    They are seen by giving 2 rows to a layer and 3 to another. The first static one takes seconds,
    as it imports torch._dynamo."""
    at, is_static = PLAIN_KINDS.index(kind) % 2, PLAIN_KINDS.index(kind) > 1
    layers = [tiny_cache(is_static).layers[at] for _ in range(2)]
    for rows, layer in zip((2, 3), layers, strict=True):
        layer.update(torch.zeros(rows, 1, 1, 1), torch.zeros(rows, 1, 1, 1))
    two, three = map(vars, layers)
    return [name for name in two if _num_rows(two[name], three.get(name)) == (2, 3)]


def _num_rows(*values: Any) -> tuple[Any, ...]:
    return tuple(
        value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else value
        for value in values
    )
