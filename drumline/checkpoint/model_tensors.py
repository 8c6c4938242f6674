"""The tensors of a model by name: ties, DTensors, and replacement of those that are on meta."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coordinator import torch_private
from drumline.checkpoint.copy_check import are_equal
from drumline.checkpoint.safetensors_index import Index, TensorReader
from drumline.checkpoint.shard_plan import SourceSlice, whole_tensor
from drumline.core.mesh import ALIASES, Mesh, axis_names
from drumline.core.packed_tensor import PackedTensor, named_parts
from drumline.core.shards import ShardSpec
from drumline.errors import CheckpointError, PlanError

WeightSources = Mapping[str, tuple[SourceSlice, ...]]
"""By name of a tensor in the model, the stored slices that it is made of."""


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under every name they have; of packed ones, the parts."""
    named: list[tuple[str, torch.Tensor]] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        parameters, buffers = torch_private.own_tables(module)
        unsaved = torch_private.unsaved_buffers(module)
        for name, tensor in (*parameters.items(), *buffers.items()):
            if tensor is not None and name not in unsaved:
                named += named_parts(f"{prefix}.{name}" if prefix else name, tensor)
    return named


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """By the first name of a tensor, all its names."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return names


def distinct_meta_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers on meta, by their first name; ties appear once."""
    tensors = dict(named_tensors(model))
    return {name: tensors[name] for name in tied_names(model) if tensors[name].is_meta}


def sources_by_name(model: nn.Module, index: Index, path: Path | None = None) -> WeightSources:
    """The stored tensor of each name in the model; for tied ones, of any of their names.

    path: of the files, on a rank that compares the tied ones that are stored under several names.
    """
    tensors = dict(named_tensors(model))
    groups = tied_names(model)
    surplus = sorted(index.keys() - tensors.keys())
    if surplus:
        raise CheckpointError(
            f"{len(surplus)} tensors of the checkpoint are not in the model "
            f"({', '.join(surplus[:5])}), so this is another model; load its own checkpoint."
        )
    keys = {name: [n for n in names if n in index] or [name] for name, names in groups.items()}
    if path is not None:
        _check_copies(path, index, keys.values())
    return {n: whole_tensor(key, index.get(key, tensors[n]).shape) for n, (key, *_) in keys.items()}


def _check_copies(path: Path, index: Index, groups: Iterable[Sequence[str]]) -> None:
    """Raise CheckpointError for tensors that are to be one and are stored with other values."""
    with TensorReader(path) as reader:
        for first, *others in groups:
            for other in others:
                if not are_equal(reader, index[first], index[other]):
                    raise CheckpointError(
                        f"{path}: {first} and {other} are one tensor of the model and differ in "
                        "the files, so one of them would be lost; build the model without the "
                        "tie, or leave out the wrong one."
                    )


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def dtensor_splits(name: str, tensor: Any, mesh: Mesh) -> tuple[ShardSpec, ...]:
    """The splits that a DTensor's placements describe, along the axes of our mesh."""
    device_mesh = tensor.device_mesh
    if device_mesh.mesh_dim_names is None and device_mesh.ndim == len(mesh.axes):
        axes = list(mesh.axes)
    else:
        axes = [ALIASES.get(axis, axis) for axis in axis_names(device_mesh)]
    splits: list[ShardSpec] = []
    for axis, size, placement in reversed(
        list(zip(axes, device_mesh.shape, tensor.placements, strict=True))
    ):
        _check_placement(name, axis, size, placement, mesh)
        if placement.is_replicate():
            continue
        factor = getattr(placement, "split_factor", 1)
        inner = math.prod(mesh.axis_size(s.axis) for s in splits if s.dim == placement.dim)
        if factor > 1 and factor == inner:  # as FSDP2 shards what another axis has split
            splits.append(ShardSpec(axis, placement.dim))
        else:
            splits.insert(0, ShardSpec(axis, placement.dim, factor))
    return tuple(splits)


def _check_placement(name: str, axis: str, size: int, placement: Any, mesh: Mesh) -> None:
    if mesh.axis_size(axis) != size:
        raise PlanError(
            f"{name} lies on a mesh with {size} ranks along {axis!r}, and the mesh given has "
            f"{dict(mesh.axes)}; give load_into the mesh on which the model was built."
        )
    if placement.is_partial():
        raise PlanError(f"{name} is partial along {axis!r}, and no checkpoint holds a part.")
    if not placement.is_replicate() and axis in mesh.descending_axes:
        raise PlanError(
            f"{name} is split along {axis!r}, along which the ranks {mesh.ranks} do not ascend, "
            "and torch counts those of a process group in ascending order, so their parts "
            "would be exchanged; give a DeviceMesh whose ranks ascend along every axis."
        )


def wrap_like(old: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """The shard as the kind that it replaces: parameter or buffer, DTensor or plain."""
    new = shard
    if is_dtensor(old):  # as DTensor.from_local, which would compute the spec anew
        new = torch_private.dtensor_like(old, shard)
    if isinstance(old, nn.Parameter):
        return nn.Parameter(new, requires_grad=old.requires_grad)
    return new


def replace_tensors(model: nn.Module, new: Mapping[int, torch.Tensor]) -> None:
    """Replace tensors, and parts of packed ones, by their identity, wherever the model has them.

    Ties stay ties.
    """
    replaced: dict[int, Any] = dict(new)
    for module in model.modules():
        for table in torch_private.own_tables(module):
            for name, tensor in table.items():
                if id(tensor) not in replaced and isinstance(tensor, PackedTensor):
                    parts = {
                        key: replaced.get(id(part), part) for key, part in tensor.parts.items()
                    }
                    packed: Any = tensor.with_parts(parts)
                    replaced[id(tensor)] = nn.Parameter(packed, requires_grad=False)
                table[name] = replaced.get(id(tensor), tensor)
