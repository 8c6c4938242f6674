"""Streams a rank's own weights into its empty model, from the files or from the master.

The blocks and their order are those of loading over a mesh (`nd_load`), with one axis, the stages,
along which nothing is cut: each tensor has one owner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from coordinator import Coordinator
from drumline.checkpoint.hugepages import rooms
from drumline.checkpoint.progress import Progress
from drumline.checkpoint.shard_loader import (
    PATIENCE_S,
    Loaded,
    aliases,
    carry_out,
    leaving_aloud,
    like,
    named_tensors,
    plan_together,
    replace,
)
from drumline.checkpoint.shard_plan import LoadPlan, Wanted, plan_loading
from drumline.checkpoint.source import Source
from drumline.checkpoint.weight_map import Description, by_first_name, kept_wide
from drumline.core.mesh import Mesh
from drumline.offload.prefetcher import OnDisk
from drumline.planner.model_profile import owner_of
from drumline.planner.plan import Place

AXIS = "pp"


def fill(
    model: torch.nn.Module,
    found: Description,
    source: Source,
    places: dict[str, Place],
    dtype: torch.dtype | None,
    coor: Coordinator,
    progress: bool | None = None,
) -> Loaded:
    """Give this rank's tensors of an empty model their values. Collective.

    places: the owner and device of each part of the model, see `layout`; what is on "disk" stays on
        meta.
    dtype: what the model is loaded in, but for tensors that it wants wider; as it is, if None.
    progress: a bar on the master; if its stderr is a terminal, if None.

    Needs the rank's share and two blocks of 8 MiB.
    """
    tensors = dict(named_tensors(model))
    dtypes = dtypes_of(model, dtype)
    plan, owners = _planned(model, found, source, places, dtypes, coor)
    mine = {name: device for name, (rank, device) in owners.items() if rank == coor.rank}
    total = sum(plan.nbytes_of(rank) for rank in range(coor.world_size))
    with leaving_aloud(coor), Progress(coor, total, progress) as landed:
        shards = rooms(
            {name: (tensors[name].shape, dtypes[name], device) for name, device in mine.items()}
        )
        coor.barrier()
        done = carry_out(plan, source.index, source.path, coor, shards, dtypes, landed)
        landed.tell()
        coor.barrier(timeout_s=PATIENCE_S)
    replace(model, {id(tensors[name]): like(tensors[name], shards.pop(name)) for name in mine})
    return done


def dtypes_of(model: torch.nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """What each tensor of a model that is loaded in `dtype` is to be."""
    wide = kept_wide(model, dtype) if dtype is not None else {}
    return {name: wide.get(name, tensor.dtype) for name, tensor in named_tensors(model)}


def on_disk(
    model: torch.nn.Module, found: Description, source: Source, dtype: torch.dtype
) -> Callable[[str, Mapping[str, torch.Tensor]], OnDisk]:
    """What makes the readers of modules that stay on disk."""
    dtypes = dtypes_of(model, dtype)
    pieces = by_first_name(model, found.pieces)
    groups = aliases(model)
    known = {name: pieces[first] for first in pieces for name in groups[first]}

    def reader(module: str, tensors: Mapping[str, torch.Tensor]) -> OnDisk:
        full = {name: f"{module}.{name}" for name in tensors if f"{module}.{name}" in known}
        return OnDisk(
            source.path,
            source.index,
            {name: known[full[name]] for name in full},
            {name: tensors[name] for name in full},
            {name: dtypes[full[name]] for name in full},
        )

    return reader


def _planned(
    model: torch.nn.Module,
    found: Description,
    source: Source,
    places: dict[str, Place],
    dtypes: dict[str, torch.dtype],
    coor: Coordinator,
) -> tuple[LoadPlan, dict[str, Place]]:
    """Who reads and who gets each tensor, the same on every rank, and where it is to lie."""
    tensors, parts = dict(named_tensors(model)), set(places)
    pieces = by_first_name(model, found.pieces)
    everywhere = {name: places[owner_of(name, parts)] for name in pieces}
    owners = {name: place for name, place in everywhere.items() if place[1] != "disk"}
    wanted = {
        name: Wanted(
            tuple(tensors[name].shape),
            dtypes[name].itemsize,
            pieces[name],
            only={AXIS: rank},
        )
        for name, (rank, _) in owners.items()
    }
    mesh = Mesh({AXIS: coor.world_size})
    plan = plan_together(
        coor, lambda: plan_loading(wanted, source.index, mesh, source.readers, coor.rank)
    )
    return plan, owners
