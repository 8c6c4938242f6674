"""Placeholders on rank 0 for the keys and values of cache layers that other ranks hold.

A placeholder has the shape of the keys and one byte for all tokens, so that lengths are right. The
version of a layer is its placeholder as its rank last heard of it: a script that changes a layer by
hand is noticed, since every change makes another tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from coordinator import torch_private
from drumline.contact.cache_layers import has_state, num_tokens
from drumline.errors import DrumlineError

COUNTING_FUNCTIONS = {
    "__get__",
    "__getitem__",
    "as_subclass",
    "clone",
    "detach",
    "dim",
    "expand",
    "index_select",
    "numel",
    "repeat_interleave",
    "size",
    "to",
}
"""Functions that count, slice and reorder tokens; none reads a value, and none writes one."""


class PlaceholderTensor(torch.Tensor):
    """A tensor in the shape of keys whose sizes are right; reading its values raises."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ not in COUNTING_FUNCTIONS:
            raise DrumlineError(
                f"{func.__name__}() on the keys or values of a layer that is on another rank, "
                "where they stay; this rank only counts its tokens. Change a cache with its own "
                "methods (crop, reset, batch_select_indices, reorder_cache), or load the model on "
                "one rank to read and write them."
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        with torch_private.plain_functions():
            return self.clone().as_subclass(PlaceholderTensor)


ONE = torch.zeros((), dtype=torch.uint8)
"""Expanded to any number of tokens, and never written to."""


def make_placeholder(batch: int, tokens: int) -> torch.Tensor:
    """A placeholder of shape [batch, 1, tokens, 1]."""
    return ONE.expand(batch, 1, tokens, 1).as_subclass(PlaceholderTensor)


counting_tokens = torch_private.plain_functions
"""Within this context, of one thread, a cache may do to placeholders all that it does to keys."""


def replace_with_placeholders(layer: Any) -> None:
    """Turn the keys and values that a layer of a cache made itself into placeholders."""
    for name in ("keys", "values"):
        if type(getattr(layer, name, None)) is torch.Tensor:
            setattr(layer, name, getattr(layer, name).as_subclass(PlaceholderTensor))


class LayerVersion(NamedTuple):
    """A layer as its rank last heard of it."""

    keys: Any = None
    values: Any = None
    length: int = 0
    has_state: bool = False


EMPTY_LAYER = LayerVersion()


def version_of(layer: Any) -> LayerVersion:
    """The present version of a layer."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    return LayerVersion(keys, values, num_tokens(layer), has_state(layer))


def check_unchanged(index: int, layer: Any, version: LayerVersion) -> None:
    """Raise DrumlineError unless the layer, None if it was removed, has this version."""
    now = version_of(layer)
    if version is EMPTY_LAYER and (now.length, now.has_state) == (0, False):
        return
    is_same = now.keys is version.keys and now.values is version.values
    if not is_same or now[2:] != version[2:]:
        raise DrumlineError(
            f"rank 0: layer {index} of this cache was changed by hand: it has {now.length} tokens "
            f"here, and {version.length} on the rank that holds it, so later tokens would be "
            "wrong; change the whole cache, with cache.crop(-3), "
            "cache.batch_select_indices(rows) or cache.reorder_cache(rows), or start from an "
            "empty one."
        )
