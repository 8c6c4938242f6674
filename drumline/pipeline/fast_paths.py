"""Self-check of the fast paths: a tiny model is run with the installed transformers, and watched.

python -m drumline.pipeline.fast_paths      # one JSON object, for `drumline doctor`

A fast path is chosen by what a pass is given. Where a release of transformers names that otherwise,
tokens would be right and come later, with nothing said. No version number is compared.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from drumline.checkpoint.safetensors_index import TORCH_DTYPES, StoredTensor
from drumline.checkpoint.shard_plan import whole_tensor
from drumline.checkpoint.weight_map import dtype_overrides, map_weights, merge_tied_names
from drumline.contact import model_parts
from drumline.contact.cache_layers import (
    CROPPABLE,
    counts_in_python,
    max_tokens,
    num_tokens,
    tiny_cache,
)
from drumline.contact.caches import cache_of
from drumline.contact.passes import knows_masks_of_windows
from drumline.contact.releases import READ, installed
from drumline.core.mixed_classes import mixed_class
from drumline.pipeline.overlap import MicrobatchMixin
from drumline.pipeline.pass_hooks import PassContext
from drumline.pipeline.remote_layer import cache_layers

ROWS, TOKENS = 8, 64
"""Of a batch that is worth two groups: see `microbatch.groups_of_pass`."""

STORED_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

STREAMS = 32
"""Rows that are worth two generations at the same time."""


class _Split(Exception):
    """Ends a generation whose prompt was split: the rest of it tells nothing more."""


class _Watch:
    """In place of the driver of several ranks: notes that a batch is split."""

    def __init__(self) -> None:
        self.microbatches, self.unread, self.context = self, set[str](), PassContext()
        self.is_split, self.runs_parts = False, True

    def map(self, work: Callable[[Any], Any], parts: Iterable[Any], *until: Any) -> list[Any]:
        self.is_split = True
        if not self.runs_parts:
            raise _Split
        return [work(part) for part in parts]


class _WatchedModel(MicrobatchMixin):
    """Mixed into a tiny model, as if its last layer was on the second of two ranks."""

    _stages = (2, 1)
    _last_layer = object()
    outputs: list[Any]

    def _pass(self, *args: Any, **kwargs: Any) -> Any:
        self.outputs.append(super()._pass(*args, **kwargs))
        return self.outputs[-1]


def _watched() -> Any:
    model = model_parts.build_tiny()
    model.__class__ = mixed_class(type(model), _WatchedModel, type(model))
    model._driver, model.outputs = _Watch(), []
    return model


def _splits(model: Any, rows: int, tokens: int, runs_parts: bool = False) -> bool:
    """True if a prompt of this shape is split on its way to the first token."""
    ids = torch.arange(rows * tokens).view(rows, tokens) % model_parts.VOCABULARY
    model._driver.is_split, model._driver.runs_parts = False, runs_parts
    with contextlib.suppress(_Split):
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False
        )
    return bool(model._driver.is_split)


def _merged_caches(model: Any) -> bool:
    """The batch in groups has left one cache behind, of all rows and tokens."""
    cache = cache_of(model.outputs[-1])
    layers = [] if cache is None else cache.layers
    return {(layer.keys.shape[0], num_tokens(layer)) for layer in layers} == {(ROWS, TOKENS)}


def _chunks(model: Any) -> bool:
    """They follow the layer that is last in the cache, and masks of windows are known by name."""
    model.prefill_chunk = 4
    knows_masks = knows_masks_of_windows(vars(sys.modules[type(model).__module__]))
    return knows_masks and cache_layers(model) == (0,) and _splits(model, 1, 8)


def _mapped_weights(model: Any) -> bool:
    """Each weight is one that is stored, as it is: what is put together or cast is copied."""
    index = {
        name: StoredTensor("", 0, STORED_DTYPES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
    }
    pieces = merge_tied_names(model, map_weights(model, index).slices)
    as_stored = all(pieces[name] == whole_tensor(name, index[name].shape) for name in pieces)
    return len(pieces) > 1 and as_stored and not dtype_overrides(model, model.dtype)


def _static_layers(model: Any) -> bool:
    layers = tiny_cache(is_static=True).layers
    return not counts_in_python(layers[0]) and max_tokens(layers[0]) == 8


def _changed_caches(model: Any) -> bool:
    """The methods by which generate() changes a cache leave rows and tokens as they should."""
    cache, keys = tiny_cache(is_static=False), torch.zeros(2, 1, 3, 1)
    cache.activate_past_recording()
    for index in range(len(cache.layers)):
        cache.update(keys, keys, index)
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.arange(5))
    cache.reorder_cache(torch.arange(4))
    cache.crop(-1)
    shapes = {tuple(layer.keys.shape) for layer in cache.layers}
    return shapes == {(4, 1, 2, 1)} and bool(CROPPABLE)


FAST_PATHS: dict[str, Callable[[Any], bool]] = {
    "groups of rows": functools.partial(_splits, rows=ROWS, tokens=TOKENS, runs_parts=True),
    "merged caches": _merged_caches,
    "generations side by side": functools.partial(_splits, rows=STREAMS, tokens=2),
    "chunks of long prompts": _chunks,
    "mapped weights": _mapped_weights,
    "static layers": _static_layers,
    "changes of caches": _changed_caches,
}
"""By name, what tells with a watched model whether it happens, in this order."""


@functools.cache
def check() -> dict[str, bool]:
    """By name of each fast path, whether it happens with what is installed: once per process.

    The state of random numbers stays as it was. A processor of 2026 took 35 ms, of which 20 build
    the model and 9 run it; imports and tables of names beside that, the load has needed, too.
    """
    with torch.no_grad():
        model = _watched()
        return {name: _happens(path, model) for name, path in FAST_PATHS.items()}


def _happens(path: Callable[[Any], bool], model: Any) -> bool:
    try:
        return path(model)
    except Exception:  # whatever it is: a check must not keep a model from being loaded
        return False


@functools.cache
def warn_if_off() -> None:
    """Warn, once per process, if a fast path does not happen with what is installed."""
    if off := [name for name, happens in check().items() if not happens]:
        warnings.warn(
            f"transformers {installed('transformers')}: {', '.join(off)} do not happen with "
            "this version, so tokens come later, or an error does. `drumline doctor` shows the "
            f"versions that were read; pip install 'transformers=={READ['transformers'][-1]}' "
            "is the newest of them.",
            stacklevel=3,
        )


def main() -> None:
    facts = {"transformers": installed("transformers"), "read": list(READ["transformers"])}
    print(json.dumps({**facts, "fast_paths": check()}))


if __name__ == "__main__":
    main()
