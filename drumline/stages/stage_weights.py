"""Streams the weights of a stage into its empty model, from the files or from the master.

The blocks and their order are those of `load_into`, with one axis, the stages, along which nothing
is sharded: each tensor has one owner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from coordinator import Coordinator
from drumline.checkpoint.model_tensors import named_tensors, tied_names
from drumline.checkpoint.plan_executor import LoadStats
from drumline.checkpoint.progress import LoadProgress
from drumline.checkpoint.shard_loader import load_planned, plan_on_all_ranks
from drumline.checkpoint.shard_plan import TensorRequest, plan_loading
from drumline.checkpoint.source import CheckpointFiles
from drumline.checkpoint.weight_map import WeightMap, dtype_overrides, merge_tied_names
from drumline.core.device_map import DeviceMap, Place
from drumline.core.mesh import Mesh
from drumline.offload.prefetcher import DiskWeights, WeightPrefetcher
from drumline.planner.model_profile import part_of_tensor

AXIS = "pp"


@dataclass
class LoadedStage:
    """One rank's part of a model: the modules of other ranks are on meta.

    prefetcher: reads what is offloaded; None if nothing is. stats: None if transformers loaded it.
    """

    model: Any
    device_map: DeviceMap
    prefetcher: WeightPrefetcher | None = None
    stats: LoadStats | None = None


def fill(
    model: torch.nn.Module,
    weight_map: WeightMap,
    source: CheckpointFiles,
    places: dict[str, Place],
    dtype: torch.dtype | None,
    coor: Coordinator,
    progress: bool | None = None,
) -> LoadStats:
    """Give this rank's tensors of an empty model their values. Collective.

    places: the owner and device of each part of the model, see `profile_model`; what is on "disk"
        stays on meta.
    dtype: what the model is loaded in, except tensors that it wants wider; as it is, if None.
    progress: a bar on the master; if its stderr is a terminal, if None.

    Needs the rank's share and two blocks of 2 MiB.
    """
    dtypes, parts = dtypes_of(model, dtype), set(places)
    pieces = merge_tied_names(model, weight_map.slices)
    everywhere = {name: places[part_of_tensor(name, parts)] for name in pieces}
    owners = {name: place for name, place in everywhere.items() if place[1] != "disk"}
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}
    requests = {
        name: TensorRequest(shapes[name], dtypes[name].itemsize, pieces[name], only={AXIS: rank})
        for name, (rank, _) in owners.items()
    }
    mesh = Mesh({AXIS: coor.world_size})
    plan = plan_on_all_ranks(
        coor, lambda: plan_loading(requests, source.index, mesh, source.readers, coor.rank)
    )
    devices = {name: device for name, (_, device) in owners.items()}
    total = sum(plan.nbytes_of(rank) for rank in range(coor.world_size))
    with LoadProgress(coor, total, progress) as on_progress:
        return load_planned(model, plan, source, coor, devices, dtypes, on_progress)


def dtypes_of(model: torch.nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """The dtype of each tensor of a model that is loaded in `dtype`."""
    wide = dtype_overrides(model, dtype) if dtype is not None else {}
    return {name: wide.get(name, tensor.dtype) for name, tensor in named_tensors(model)}


def on_disk(
    model: torch.nn.Module,
    weight_map: WeightMap,
    source: CheckpointFiles,
    dtype: torch.dtype | None,
) -> Callable[[str, Mapping[str, torch.Tensor]], DiskWeights]:
    """A function that makes the readers of modules that stay on disk."""
    dtypes = dtypes_of(model, dtype)
    pieces = merge_tied_names(model, weight_map.slices)
    groups = tied_names(model)
    source_by_name = {name: pieces[first] for first in pieces for name in groups[first]}

    def reader(module: str, tensors: Mapping[str, torch.Tensor]) -> DiskWeights:
        full = {
            name: f"{module}.{name}" for name in tensors if f"{module}.{name}" in source_by_name
        }
        return DiskWeights(
            source,
            {name: source_by_name[full[name]] for name in full},
            {name: tensors[name] for name in full},
            {name: dtypes[full[name]] for name in full},
        )

    return reader
