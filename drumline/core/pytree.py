"""Arguments of a layer as a spec, which is sent once, and the numbers and tensors that vary.

A spec is nested tuples of text and numbers, so it can be hashed here and written as JSON for
the other side. Only plain values travel: anything else is an error that names its type, and nothing
is ever pickled.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, EnumType
from typing import Any, Protocol

import torch

from drumline.contact.caches import Cache, is_cache, pair_of
from drumline.contact.class_names import class_named, full_name
from drumline.contact.passes import Output, is_output
from drumline.errors import DrumlineError

TreeSpec = tuple[Any, ...]

NEW_HIDDEN_STATE: TreeSpec = ("list", ("hidden",))
"""Spec of the output of nearly every layer: a new hidden state, and no other change."""

CONTAINERS = (tuple, list, dict, torch.Size, OrderedDict)
"""Of other classes that derive from these, what is their own would be lost."""

FLOAT, BITS = struct.Struct("<d"), struct.Struct("<q")


@dataclass
class Leaves:
    """The varying values in the arguments of one call: a float is its bits in `ints`."""

    ints: list[int] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)
    shared: list[UserDict[Any, Any]] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)

    def add(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """The position of each tensor; the same tensor given twice has one."""
        return [self.tensor(tensor) for tensor in tensors]

    def tensor(self, tensor: torch.Tensor) -> int:
        position = self.positions.setdefault(id(tensor), len(self.tensors))
        if position == len(self.tensors):
            self.tensors.append(tensor)
        return position


def flatten(value: Any, leaves: Leaves, handle: Callable[[Cache], int]) -> TreeSpec:
    """The spec of a value; varying values are put into `leaves`. Frequent kinds come first."""
    if isinstance(value, torch.Tensor):
        return ("tensor", leaves.tensor(value))
    if isinstance(type(value), EnumType):  # many are numbers or text, too
        return _container_spec(value, lambda item: flatten(item, leaves, handle))
    if value is None or isinstance(value, (bool, str)):
        return ("value", value)
    if isinstance(value, int):
        if value.bit_length() > 63:  # a message has 64 bits for each
            return ("value", value)
        leaves.ints.append(value)
        return ("int",)
    if isinstance(value, float):
        leaves.ints.extend(BITS.unpack(FLOAT.pack(value)))
        return ("float",)
    if type(value) in CONTAINERS or (isinstance(value, dict) and is_output(value)):
        return _container_spec(value, lambda item: flatten(item, leaves, handle))
    if is_cache(value):
        return _flatten_cache(value, leaves, handle)
    if isinstance(value, UserDict):
        leaves.shared.append(value)
        keys = [key if isinstance(key, int) else _key(key) for key in value]  # names, or layers
        values = [flatten(item, leaves, handle) for item in value.values()]
        return ("shared", full_name(type(value)), *zip(keys, values, strict=True))
    if isinstance(value, torch.dtype):
        return ("dtype", str(value).removeprefix("torch."))
    if isinstance(number := getattr(value, "pool_number", None), int):
        leaves.ints.append(number)  # tables of pages, which each rank has a pool for
        return ("cache",)
    raise DrumlineError(
        f"a layer on another rank was given a {type(value).__module__}.{type(value).__qualname__}, "
        "which cannot be sent; only numbers, text, tensors, caches, and tuples, lists and dicts "
        "of them travel."
    )


def _flatten_cache(cache: Cache, leaves: Leaves, handle: Callable[[Cache], int]) -> TreeSpec:
    if pair := pair_of(cache):
        return ("pair", *[flatten(part, leaves, handle) for part in pair])
    leaves.caches.append(cache)
    leaves.ints.append(handle(cache))
    return ("cache",)


def _container_spec(value: Any, spec_of: Callable[[Any], TreeSpec]) -> TreeSpec:
    """The spec of a container; an Output, such as that of ViTMAE's decoder, keeps its class, and so
    does an Enum, of one value."""
    if isinstance(value, Enum):
        kind = "mixed" if isinstance(value, (int, str, float)) else "enum"
        return (kind, full_name(type(value)), spec_of(value.value))
    if not isinstance(value, dict):
        kind = "list" if isinstance(value, list) else "tuple"
        return (kind, *[spec_of(item) for item in value])
    items = ("dict", *[(_key(key), spec_of(item)) for key, item in value.items()])
    return ("made", full_name(type(value)), items) if is_output(value) else items


def _container(spec: Any, value_of: Callable[[Any], Any]) -> Any:
    """The container that has this spec."""
    if spec[0] == "made":
        return class_named(spec[1], Output)(**value_of(spec[2]))
    if spec[0] in ("enum", "mixed"):
        value = value_of(spec[2])
        # A number or text is equal to its member, where only the script has the class.
        kind = class_named(spec[1], Enum, is_needed=spec[0] == "enum")
        return value if kind is Enum else kind(value)
    if spec[0] == "dict":
        return {key: value_of(item) for key, item in spec[1:]}
    values = [value_of(item) for item in spec[1:]]
    return values if spec[0] == "list" else tuple(values)


def _children(spec: Any) -> Sequence[Any]:
    """The specs of the items of a container."""
    if spec[0] == "dict":
        return [item for _, item in spec[1:]]
    if spec[0] == "shared":
        return [item for _, item in spec[2:]]
    if spec[0] in ("tuple", "list", "pair"):
        return spec[1:]  # type: ignore[no-any-return]
    return spec[2:] if spec[0] in ("made", "enum", "mixed") else ()


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    raise DrumlineError(
        f"a layer on another rank was given a dict with the key {key!r}, which cannot be sent; use "
        "text for the keys."
    )


class CacheLookup(Protocol):
    """The caches of the receiving side by number."""

    def cache(self, number: int) -> Cache: ...
    def pair(self, own: Cache, cross: Cache) -> Cache: ...


@dataclass
class Unflattener:
    """The values that fill a spec on the receiving side; layers write to the dicts in `shared`.

    containers: lists and dicts that are made here, so that nobody else sees what is written there.
    """

    ints: Iterator[int]
    tensors: Sequence[torch.Tensor]
    caches: CacheLookup
    shared: list[UserDict[Any, Any]] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)


def unflatten(spec: Any, unflattener: Unflattener) -> Any:
    kind = spec[0]
    if kind == "tensor":
        return unflattener.tensors[spec[1]]
    if kind == "value":
        return spec[1]
    if kind == "int":
        return next(unflattener.ints)
    if kind == "float":
        return FLOAT.unpack(BITS.pack(next(unflattener.ints)))[0]
    if kind == "cache":
        return unflattener.caches.cache(next(unflattener.ints))
    if kind == "dtype":
        return getattr(torch, spec[1])
    if kind == "pair":
        return unflattener.caches.pair(*(unflatten(item, unflattener) for item in spec[1:]))
    if kind == "shared":
        items = {key: unflatten(item, unflattener) for key, item in spec[2:]}
        unflattener.shared.append(class_named(spec[1], UserDict)(items))
        return unflattener.shared[-1]
    made = _container(spec, lambda item: unflatten(item, unflattener))
    if kind not in ("tuple", "enum", "mixed"):
        unflattener.containers.append(made)
    return made


def flatten_output(value: Any, inputs: Sequence[torch.Tensor], new: list[torch.Tensor]) -> TreeSpec:
    """The spec of a layer's output in terms of its inputs.

    "input" is one of the inputs handed through, "hidden" a new tensor like the first input, "extra"
    a new one of another shape. New tensors are appended to `new` in order.
    """
    if isinstance(value, torch.Tensor):
        for position, tensor in enumerate(inputs):
            if value is tensor:
                return ("input", position)
        new.append(value)
        is_like_first = inputs and (value.shape, value.dtype) == (inputs[0].shape, inputs[0].dtype)
        return ("hidden",) if is_like_first else ("extra",)
    is_enum = isinstance(value, Enum)
    if not is_enum and (value is None or isinstance(value, (bool, int, float, str))):
        return ("value", value)
    if is_enum or type(value) in CONTAINERS or is_output(value):
        return _container_spec(value, lambda item: flatten_output(item, inputs, new))
    if is_cache(value):
        return ("cache",)
    raise DrumlineError(
        f"a layer returned a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
        "sent back; only numbers, text, tensors, and tuples, lists and dicts of them travel."
    )


def unflatten_output(
    spec: Any, inputs: list[torch.Tensor], new: Iterator[torch.Tensor], caches: list[Cache]
) -> Any:
    """A layer's output from its spec; what it wrote into its inputs is written into them here."""
    kind = spec[0]
    if kind in ("hidden", "extra"):
        return next(new)
    if kind == "input":
        return inputs[spec[1]]
    if kind == "value":
        return spec[1]
    if kind == "cache":
        return caches[0]
    if kind == "written":
        return inputs[spec[1]].copy_(next(new))
    return _container(spec, lambda item: unflatten_output(item, inputs, new, caches))


def is_of_form(output: Any, form: Any) -> bool:
    """True for an output of a known form: a new tensor that may have any shape, "extra", may by
    chance have that of the first input, too."""
    if form == ("extra",):
        return output in (form, ("hidden",))
    if isinstance(form, tuple) and isinstance(output, tuple):
        return len(output) == len(form) and all(map(is_of_form, output, form))
    return bool(output == form)


def written_inputs(output: Any) -> list[int]:
    """The positions of the inputs that a layer with this output writes into (RWKV's states)."""
    return [item[1] for item in output[1:] if item[0] == "written"]


def new_tensor_kinds(spec: Any) -> list[str]:
    """ "hidden" or "extra" for each new tensor of an output, in order."""
    kinds = [kind for kind, *_ in iter_nodes(spec) if kind in ("hidden", "extra", "written")]
    return ["hidden" if kind == "hidden" else "extra" for kind in kinds]


def has_reusable_arguments(arguments: TreeSpec) -> bool:
    """True if a call's arguments after the first can be used again for the next such call.

    The first tensor, in which the calls of a stack of layers differ, must be the first argument and
    nothing else, and there must be nothing inside that a layer could have changed.
    """
    _, args, kwargs = arguments
    rest = [*args[2:], *(item for _, item in kwargs[1:])]
    nodes = (node for item in rest for node in iter_nodes(item))
    changes = any(node[0] in ("list", "dict", "shared") or node == ("tensor", 0) for node in nodes)
    return args[1:2] == (("tensor", 0),) and not changes


def iter_nodes(spec: Any) -> Iterator[TreeSpec]:
    """A spec and all that are in it, of which the first item is the kind."""
    yield spec
    for item in _children(spec):
        yield from iter_nodes(item)


def integer_kinds(arguments: TreeSpec) -> list[str]:
    """The meaning of each integer of a call, in order: "int", "float" for its bits, or "cache"."""
    return [kind for kind, *_ in iter_nodes(arguments) if kind in ("int", "float", "cache")]


def as_tuples(spec: Any) -> Any:
    """A spec with tuples again, of which JSON made lists."""
    return tuple(as_tuples(item) for item in spec) if isinstance(spec, list) else spec
