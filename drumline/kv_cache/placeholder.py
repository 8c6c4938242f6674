"""Placeholders on rank 0 for the keys and values of cache layers that other ranks hold.

A placeholder has the rows and tokens of the keys, so that lengths are right, and shows their whole
shape once their rank has told it. The version of a layer is its placeholder as its rank last heard
of it: a script that changes a layer by hand is noticed, since every change makes another tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
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


class HeadSizes(NamedTuple):
    """The heads of keys or values, and the width of each."""

    num_heads: int
    width: int


@dataclass(frozen=True, eq=False)
class LayerOrigin:
    """The rank that holds a layer; the sizes of its keys and values, None until it has told them.

    None also where they have no heads. Two that are equal are the same object, see layer_origin.
    """

    rank: int | None
    keys: HeadSizes | None
    values: HeadSizes | None


@functools.cache
def layer_origin(
    rank: int | None = None, keys: HeadSizes | None = None, values: HeadSizes | None = None
) -> LayerOrigin:
    return LayerOrigin(rank, keys, values)


UNKNOWN = layer_origin()


class PlaceholderTensor(torch.Tensor):
    """A tensor in the shape of keys whose sizes are right; reading its values raises."""

    origin = UNKNOWN
    sizes: HeadSizes | None = None

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
        own = args[0] if args else None
        if isinstance(own, PlaceholderTensor) and own.sizes is not None:
            args = (own.whole(), *args[1:])
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, PlaceholderTensor):
            result.origin = getattr(own, "origin", UNKNOWN)
        return result

    def whole(self) -> PlaceholderTensor:
        """A view in the shape that the keys have on their rank."""
        if self.sizes is None:
            return self
        with torch_private.plain_functions():
            rows, _, tokens, _ = self.shape
            shown = self.expand(rows, self.sizes.num_heads, tokens, self.sizes.width)
        return mark(shown, self.origin, None)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        with torch_private.plain_functions():
            twin = self.clone()
        return mark(twin, self.origin, self.sizes)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        rank = self.origin.rank
        where = "another rank" if rank is None else f"rank {rank}"
        return f"<keys or values of shape {tuple(self.whole().shape)} on {where}>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def mark(tensor: torch.Tensor, origin: LayerOrigin, sizes: HeadSizes | None) -> PlaceholderTensor:
    """The tensor as a placeholder; sizes: of what it stands for, if those are not its own."""
    placeholder = tensor.as_subclass(PlaceholderTensor)
    placeholder.origin = origin
    placeholder.sizes = sizes if tensor.dim() == 4 else None
    return placeholder


ONE = torch.zeros((), dtype=torch.uint8)
"""Expanded to any number of tokens, and never written to."""


def make_placeholders(
    batch: int, tokens: int, origin: LayerOrigin = UNKNOWN
) -> tuple[torch.Tensor, torch.Tensor]:
    """Placeholders of shape [batch, 1, tokens, 1] for the keys and values of a layer."""
    keys = mark(ONE.expand(batch, 1, tokens, 1), origin, origin.keys)
    if origin.keys == origin.values:
        return keys, keys
    return keys, mark(ONE.expand(batch, 1, tokens, 1), origin, origin.values)


counting_tokens = torch_private.plain_functions
"""Within this context, of one thread, a cache may do to placeholders all that it does to keys."""


def replace_with_placeholders(layer: Any, origin: LayerOrigin) -> None:
    """Turn the keys and values that a layer of a cache made itself into placeholders."""
    for name, sizes in (("keys", origin.keys), ("values", origin.values)):
        if type(getattr(layer, name, None)) is torch.Tensor:
            setattr(layer, name, mark(getattr(layer, name), origin, sizes))


def origin_of(version: LayerVersion) -> LayerOrigin:
    """The origin that the placeholders of a layer have."""
    return getattr(version.keys, "origin", UNKNOWN)


def show_origin(layer: Any, origin: LayerOrigin) -> None:
    """Have the placeholders of a layer say where it is, and the sizes that it has there."""
    with torch_private.plain_functions():
        for name in ("keys", "values"):
            if isinstance(tensor := getattr(layer, name, None), PlaceholderTensor):
                setattr(layer, name, tensor.detach())
    replace_with_placeholders(layer, origin)


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
