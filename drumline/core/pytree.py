"""Arguments of a layer as a template, which is sent once, and the numbers and tensors that vary.

A template is nested tuples of text and numbers, so it can be hashed here and written as JSON for
the other side. Only plain values travel: anything else is an error that names its type, and nothing
is ever pickled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils import ModelOutput

from drumline.core.cache_kinds import KVSharingDict
from drumline.errors import DrumlineError

TreeSpec = tuple[Any, ...]

NEW_HIDDEN_STATE: TreeSpec = ("list", ("hidden",))
"""The output of nearly every layer: a new hidden state, and nothing written elsewhere."""


@dataclass
class Leaves:
    """What varies in the arguments of one call."""

    ints: list[int] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)
    shared: list[KVSharingDict] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)

    def tensor(self, tensor: torch.Tensor) -> int:
        """Its position; the same tensor given twice is one."""
        position = self.positions.setdefault(id(tensor), len(self.tensors))
        if position == len(self.tensors):
            self.tensors.append(tensor)
        return position


def flatten(value: Any, leaves: Leaves, handle: Callable[[Cache], int]) -> TreeSpec:
    """The template of a value; what varies is put into `leaves`. The frequent kinds come first."""
    if isinstance(value, torch.Tensor):
        return ("tensor", leaves.tensor(value))
    if value is None or isinstance(value, (bool, float, str)):
        return ("value", value)
    if isinstance(value, int):
        leaves.ints.append(value)
        return ("int",)
    if isinstance(value, (tuple, list)):
        kind = "list" if isinstance(value, list) else "tuple"
        return (kind, *[flatten(item, leaves, handle) for item in value])
    if isinstance(value, dict):
        items = ("dict", *[(_key(k), flatten(v, leaves, handle)) for k, v in value.items()])
        return _made(value, items)
    if isinstance(value, Cache):
        return _flatten_cache(value, leaves, handle)
    if isinstance(value, KVSharingDict):
        leaves.shared.append(value)
        return ("shared", *[(_key(k), flatten(v, leaves, handle)) for k, v in value.items()])
    if isinstance(value, torch.dtype):
        return ("dtype", str(value).removeprefix("torch."))
    raise DrumlineError(
        f"a layer on another rank was given a {type(value).__module__}.{type(value).__qualname__}, "
        "which cannot be sent; only numbers, text, tensors, caches, and tuples, lists and dicts "
        "of them travel."
    )


def _flatten_cache(cache: Cache, leaves: Leaves, handle: Callable[[Cache], int]) -> TreeSpec:
    if isinstance(cache, EncoderDecoderCache):
        pair = (cache.self_attention_cache, cache.cross_attention_cache)
        return ("pair", *[flatten(each, leaves, handle) for each in pair])
    leaves.caches.append(cache)
    leaves.ints.append(handle(cache))
    return ("cache",)


def _made(value: dict[str, Any], items: TreeSpec) -> TreeSpec:
    """The items of a dict, and what is made of them for an output, as of ViTMAE's decoder."""
    kind = type(value)
    return ("made", _full_name(kind), items) if issubclass(kind, ModelOutput) else items


def _full_name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.cache
def _output_class(name: str) -> type[Any]:
    """By its name, among those that the model here has brought along: nothing is imported."""
    kinds: list[type[Any]] = [ModelOutput]
    for kind in kinds:
        if _full_name(kind) == name:
            return kind
        kinds.extend(kind.__subclasses__())
    raise DrumlineError(
        f"{name}, which a layer on another rank takes or returns, is not known on this one; import "
        "it where the model is loaded, the same on every rank."
    )


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    raise DrumlineError(
        f"a layer on another rank was given a dict with the key {key!r}, which cannot be sent; use "
        "text for the keys."
    )


class CacheLookup:
    """How the receiving side turns numbers back into its own caches."""

    def cache(self, number: int) -> Cache:
        raise NotImplementedError

    def pair(self, own: Cache, cross: Cache) -> EncoderDecoderCache:
        raise NotImplementedError


@dataclass
class Unflattener:
    """What fills a template on the receiving side; `shared` collects what layers write to."""

    ints: Iterator[int]
    tensors: Sequence[torch.Tensor]
    caches: CacheLookup
    shared: list[KVSharingDict] = field(default_factory=list)


def unflatten(template: Any, arrived: Unflattener) -> Any:
    kind = template[0]
    if kind == "tensor":
        return arrived.tensors[template[1]]
    if kind == "value":
        return template[1]
    if kind == "int":
        return next(arrived.ints)
    if kind == "cache":
        return arrived.caches.cache(next(arrived.ints))
    if kind == "dtype":
        return getattr(torch, template[1])
    if kind == "made":
        return _output_class(template[1])(**unflatten(template[2], arrived))
    if kind in ("dict", "shared"):
        items = {key: unflatten(item, arrived) for key, item in template[1:]}
        return items if kind == "dict" else _shared(items, arrived)
    values = [unflatten(item, arrived) for item in template[1:]]
    if kind == "pair":
        return arrived.caches.pair(*values)
    return values if kind == "list" else tuple(values)


def _shared(items: dict[str, Any], arrived: Unflattener) -> KVSharingDict:
    arrived.shared.append(KVSharingDict(items))
    return arrived.shared[-1]


def flatten_output(value: Any, inputs: Sequence[torch.Tensor], new: list[torch.Tensor]) -> TreeSpec:
    """The template of a layer's output in terms of its inputs.

    "input" is one of the inputs handed through, "hidden" a new tensor like the first input, "extra"
    a new one of another shape. New tensors are appended to `new` in order.
    """
    if isinstance(value, torch.Tensor):
        for position, tensor in enumerate(inputs):
            if value is tensor:
                return ("input", position)
        if inputs and value.shape == inputs[0].shape and value.dtype == inputs[0].dtype:
            new.append(value)
            return ("hidden",)
        new.append(value)
        return ("extra",)
    if value is None or isinstance(value, (bool, int, float, str)):
        return ("value", value)
    if isinstance(value, (tuple, list)):
        kind = "list" if isinstance(value, list) else "tuple"
        return (kind, *[flatten_output(item, inputs, new) for item in value])
    if isinstance(value, dict):
        return _made(
            value, ("dict", *[(_key(k), flatten_output(v, inputs, new)) for k, v in value.items()])
        )
    if isinstance(value, Cache):
        return ("cache",)
    raise DrumlineError(
        f"a layer returned a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
        "sent back; only numbers, text, tensors, and tuples, lists and dicts of them travel."
    )


def unflatten_output(
    template: Any, inputs: list[torch.Tensor], new: Iterator[torch.Tensor], caches: list[Cache]
) -> Any:
    """A layer's output from its description."""
    kind = template[0]
    if kind in ("hidden", "extra"):
        return next(new)
    if kind == "input":
        return inputs[template[1]]
    if kind == "value":
        return template[1]
    if kind == "cache":
        return caches[0]
    if kind == "made":
        return _output_class(template[1])(**unflatten_output(template[2], inputs, new, caches))
    items = template[1:]
    if kind == "dict":
        return {key: unflatten_output(item, inputs, new, caches) for key, item in items}
    values = [unflatten_output(item, inputs, new, caches) for item in items]
    return values if kind == "list" else tuple(values)


def iter_caches(value: Any) -> Iterator[Cache]:
    """In the order in which `flatten` meets them."""
    if isinstance(value, EncoderDecoderCache):
        yield from (value.self_attention_cache, value.cross_attention_cache)
    elif isinstance(value, Cache):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from iter_caches(item)


def changed_items(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What a layer wrote into a dict that layers share."""
    return {key: value for key, value in after.items() if before.get(key) is not value}


def new_tensor_kinds(template: Any) -> list[str]:
    """ "hidden" or "extra" for each new tensor of an output, in order."""
    if template[0] == "made":
        return new_tensor_kinds(template[2])
    if template[0] == "dict":
        return [kind for _, item in template[1:] for kind in new_tensor_kinds(item)]
    if template[0] in ("tuple", "list"):
        return [kind for item in template[1:] for kind in new_tensor_kinds(item)]
    return [template[0]] if template[0] in ("hidden", "extra") else []


def has_reusable_arguments(arguments: TreeSpec) -> bool:
    """Whether a call's arguments, but for the first, can be used again for the next such call.

    The first tensor, in which the calls of a stack of layers differ, must be the first argument and
    nothing else, and there must be nothing inside that a layer could have changed.
    """
    _, args, kwargs = arguments
    rest = [*args[2:], *(item for _, item in kwargs[1:])]
    kinds = {leaf for item in rest for leaf in iter_leaves(item)}
    is_fixed = not kinds & {("list",), ("dict",), ("shared",), ("tensor", 0)}
    return args[1:2] == (("tensor", 0),) and is_fixed


def iter_leaves(template: Any) -> Iterator[tuple[Any, ...]]:
    """The kind of every node of a template, and the position of each tensor."""
    yield template[:2] if template[0] == "tensor" else template[:1]
    if template[0] in ("dict", "shared"):
        for _, item in template[1:]:
            yield from iter_leaves(item)
    elif template[0] == "made":
        yield from iter_leaves(template[2])
    elif template[0] in ("tuple", "list", "pair"):
        for item in template[1:]:
            yield from iter_leaves(item)


def as_tuples(template: Any) -> Any:
    """A template as it was before JSON made lists of its tuples."""
    return tuple(as_tuples(item) for item in template) if isinstance(template, list) else template
