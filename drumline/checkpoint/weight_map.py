"""The map from a transformers model's parameters to the stored tensors that they are made of.

transformers renames, stacks and joins tensors while it loads (the experts of Mixtral are one stored
tensor each). Here its own tables are read, and what they would do to tensors is done to boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from drumline.checkpoint.model_tensors import named_tensors, tied_names
from drumline.checkpoint.safetensors_index import Index
from drumline.checkpoint.shard_plan import SourceSlice, whole_tensor
from drumline.contact.loading.models import dtype_plan
from drumline.contact.loading.weights import Conversion, KeyMapping, Operation, natural_key
from drumline.core.packed_tensor import PART_MARK
from drumline.core.shards import Region
from drumline.errors import CheckpointError

DescribedTensor = tuple[tuple[int, ...], tuple[SourceSlice, ...]]
"""A tensor that is only described: its shape, and what fills it."""


class NotStreamable(CheckpointError):
    """A parameter is computed from what is stored, so no part of it can be read alone."""


@dataclass(frozen=True)
class WeightMap:
    """The stored pieces of a model's tensors, by every name they have, before they are tied."""

    slices: Mapping[str, tuple[SourceSlice, ...]]
    missing: frozenset[str]
    surplus: frozenset[str]


def map_weights(model: Any, index: Index) -> WeightMap:
    """Map each parameter and persistent buffer to stored pieces; name what is surplus or missing.

    Raises NotStreamable for conversions that change more than where a tensor lies.
    """
    state = dict(named_tensors(model))
    mapping = KeyMapping(model, state)
    plain: dict[str, Sequence[SourceSlice]] = {}
    joined: dict[str, dict[str, list[str]]] = {}
    surplus: set[str] = set()
    for key in sorted(index, key=natural_key):
        name, pattern = mapping.rename(key)
        if pattern is None and name in plain:  # of two, transformers takes the first
            surplus.add(key)
        elif pattern is None:
            plain[name] = whole_tensor(key, index[key].shape)
        else:
            joined.setdefault(name, {}).setdefault(pattern, []).append(key)
    for name, keys in joined.items():
        plain.update(_convert(name, keys, mapping.conversion(keys), index))
    slices = {name: tuple(pieces) for name, pieces in plain.items() if name in state}
    missing, surplus = state.keys() - plain.keys(), surplus | plain.keys() - state.keys()
    return WeightMap(slices, frozenset(missing), frozenset(surplus))


def stored_ties(model: Any, index: Index) -> dict[str, str]:
    """The stored keys of tensors that transformers ties, by their names in the model."""
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    if not ties:
        return {}
    mapping, names = KeyMapping(model, dict(named_tensors(model))), {*ties, *ties.values()}
    renamed: dict[str, str] = {}
    for key in sorted(index, key=natural_key):  # of two, the first, as above
        renamed.setdefault(mapping.rename(key)[0], key)
    return {name: renamed[name] for name in names & renamed.keys()}


def merge_tied_names(model: Any, slices: Mapping[str, tuple[SourceSlice, ...]]) -> dict[str, Any]:
    """The pieces of tied tensors once, under their first name, from any of their names."""
    names = tied_names(model)
    stored = {first: [name for name in names[first] if name in slices] for first in names}
    return {first: slices[tied[0]] for first, tied in stored.items() if tied}


def dtype_overrides(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The tensors that the model wants in another dtype than the one it is loaded in."""
    dtype_of = dtype_plan(model, dtype)
    dtypes = {name: dtype_of(name) for name, _ in named_tensors(model) if PART_MARK not in name}
    return {name: other for name, other in dtypes.items() if other is not None}


def _convert(
    name: str, keys: dict[str, list[str]], conversion: Conversion, index: Index
) -> dict[str, Sequence[SourceSlice]]:
    """Apply a chain of operations to stored tensors, which come by the pattern they matched.

    `name` is that of the first result; the others follow from the target patterns.
    """
    parts = {
        pattern: [(index[key].shape, whole_tensor(key, index[key].shape)) for key in keys[pattern]]
        for pattern in conversion.sources
        if pattern in keys
    }
    for operation in conversion.operations:
        parts = _operate(name, operation, parts, conversion.targets)
    if len(parts) == 1:
        (((_, slices),),) = parts.values()
        return {name: slices}
    before, _, after = next(name.partition(target) for target in parts if target in name)
    return {f"{before}{target}{after}": part[0][1] for target, part in parts.items()}


def _operate(
    name: str, operation: Operation, parts: dict[str, list[DescribedTensor]], targets: Sequence[str]
) -> dict[str, list[DescribedTensor]]:
    """One operation of transformers, done to tensors that are only described."""
    tensors = [tensor for tensors in parts.values() for tensor in tensors]
    if operation.verb == "stack":
        return {pattern: [_stack(name, tensors)] for pattern, tensors in parts.items()}
    if operation.verb == "concatenate":
        return {name: [_concatenate(name, tensors, operation.dim)]}
    if operation.verb == "chunk" and len(tensors) == 1:
        chunks = _chunks(tensors[0], operation.dim, len(targets))
        return {target: [chunk] for target, chunk in zip(targets, chunks, strict=True)}
    raise NotStreamable(
        f"{name} is made by {operation.kind}, which computes what it loads, so no rank could read "
        "its own part only; load this model with device_map, without a mesh or dequantize=True, "
        "from files on every rank and, if it is quantized, with the library of its format."
    )


def _chunks(tensor: DescribedTensor, dim: int, count: int) -> list[DescribedTensor]:
    """The chunks of torch.chunk: fewer than `count` if there is too little."""
    shape, slices = tensor
    step = -(-shape[dim] // count)
    chunks = []
    for start in range(0, shape[dim], step):
        size = min(step, shape[dim] - start)
        at = (*(0 for _ in shape[:dim]), start, *(0 for _ in shape[dim + 1 :]))
        region = Region(at, (*shape[:dim], size, *shape[dim + 1 :]))
        chunks.append((region.size, tuple(_within(region, slices))))
    return chunks


def _within(region: Region, slices: Sequence[SourceSlice]) -> Iterator[SourceSlice]:
    """The parts of the pieces that lie in a box, seen from the box."""
    zeros = (0,) * len(region.start)
    for slice_ in slices:
        common = region.overlap(slice_.at)
        if common is not None:
            origin = slice_.in_file(common).start
            yield replace(slice_, at=common.moved(region.start, zeros), origin=origin)


def _stack(name: str, tensors: Sequence[DescribedTensor]) -> DescribedTensor:
    """Tensors of one shape as rows of a new first dimension."""
    (shape,) = _same(name, {shape for shape, _ in tensors})
    slices = [
        replace(
            slice_, at=Region((row, *slice_.at.start), (1, *slice_.at.size)), lead=slice_.lead + 1
        )
        for row, (_, filled) in enumerate(tensors)
        for slice_ in filled
    ]
    return (len(tensors), *shape), tuple(slices)


def _concatenate(name: str, tensors: Sequence[DescribedTensor], dim: int) -> DescribedTensor:
    """Tensors one behind the other in an existing dimension."""
    _same(name, {shape[:dim] + shape[dim + 1 :] for shape, _ in tensors})
    slices, passed = [], 0
    for shape, filled in tensors:
        for slice_ in filled:
            start = list(slice_.at.start)
            start[dim] += passed
            slices.append(replace(slice_, at=replace(slice_.at, start=tuple(start))))
        passed += shape[dim]
    first = tensors[0][0]
    return (*first[:dim], passed, *first[dim + 1 :]), tuple(slices)


def _same(name: str, shapes: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    if len(shapes) > 1:
        raise CheckpointError(
            f"{name} is joined from tensors of the shapes {sorted(shapes)}, which do not fit "
            "together; load the checkpoint that belongs to its config.json."
        )
    return shapes
