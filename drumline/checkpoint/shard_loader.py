"""Loading of this rank's shards of a checkpoint into a model that was built on meta.

stats = load_into(model, "checkpoint", coor, mesh={"dp_shard": 2, "tp": 2}, reader="rank0")
print(stats.share, stats.nbytes_read, stats.nbytes_sent)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coordinator import Coordinator
from drumline import timings
from drumline.checkpoint import model_tensors
from drumline.checkpoint.model_tensors import WeightSources
from drumline.checkpoint.plan_executor import LoadStats, OnProgress, abort_peers_on_error, execute
from drumline.checkpoint.safetensors_index import Index, TensorReader
from drumline.checkpoint.shard_plan import (
    LoadPlan,
    TensorRequest,
    Transfer,
    plan_loading,
    reader_ranks,
)
from drumline.checkpoint.source import CheckpointFiles, share_index
from drumline.core.consistency import run_and_share
from drumline.core.cpu.hugepages import TensorSpec, allocate_hugepages
from drumline.core.mesh import Mesh, read_mesh
from drumline.core.shards import ShardSpec
from drumline.errors import DrumlineError, PlanError, short_traceback

Device = torch.device | str


@short_traceback
def load_into(
    model: nn.Module,
    path: str | Path,
    coor: Coordinator,
    *,
    mesh: Any = None,
    reader: str = "each",
    splits: Mapping[str, tuple[ShardSpec, ...]] | None = None,
    only: Mapping[str, Mapping[str, int]] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    sources: Callable[[Index], WeightSources] | None = None,
    device: torch.device | str = "cpu",
) -> LoadStats:
    """Load this rank's shard of every parameter and persistent buffer on meta. Collective.

    A plain tensor is split as `splits` says by name, and whole otherwise. A DTensor on meta (from
    parallelize_module, distribute_tensor or fully_shard) becomes a DTensor, split by its placements
    after `splits`. Tensors tied on meta are loaded once and stay tied. The dtype is the model's.

    mesh: the ranks as a grid: {"dp_shard": 2, "tp": 2}, or a torch DeviceMesh; one axis over all
        ranks if None. It must cover the launch and have every axis that splits a tensor.
    reader: "each" rank reads its own regions; the first rank of each "node" reads for it; or
        "rank0" for all. Ranks that do not read need no file.
    only: by name, coordinates such as {"pp": 1}: other ranks leave the tensor on meta.
    shapes: whole shapes, for tensors that are on meta in the shape that `splits` leaves.
    sources: makes the slices of each tensor from the index of the files; None takes equal names.
    device: of plain tensors, and of DTensors of a mesh on no accelerator.

    Needs the share plus a few blocks of 2 MiB. Raises PlanError or CheckpointError on every rank
    before a tensor is read. Ranks that do not open the very same files compare all their bytes.
    """
    files, _ = share_index(coor, path, lambda: reader_ranks(reader, coor.nodes))
    request = LoadRequest(splits or {}, only or {}, shapes or {}, sources)

    def plan_own_part() -> LoadPlan:
        axes = {"dp_replicate": coor.world_size} if mesh is None else mesh
        grid = read_mesh(axes, coor.world_size)
        return plan_files(model, files, grid, coor.rank, request)

    plan = plan_on_all_ranks(coor, plan_own_part)
    (check,) = files.copy_checks
    with check:
        return load_planned(model, plan, files, coor, device)


@dataclass(frozen=True)
class LoadRequest:
    """The arguments of load_into, by name of tensor."""

    splits: Mapping[str, tuple[ShardSpec, ...]]
    only: Mapping[str, Mapping[str, int]]
    shapes: Mapping[str, tuple[int, ...]]
    sources: Callable[[Index], WeightSources] | None


def plan_files(
    model: nn.Module, files: CheckpointFiles, grid: Mesh, rank: int, request: LoadRequest
) -> LoadPlan:
    """The part of this rank in loading a model that is on meta."""
    by_name = partial(model_tensors.sources_by_name, model, path=files.compared_by(rank))
    sources = (request.sources or by_name)(files.index)
    requests = {
        name: _tensor_request(name, tensor, sources, grid, request)
        for name, tensor in model_tensors.distinct_meta_tensors(model).items()
    }
    return plan_loading(requests, files.index, grid, files.readers, rank)


def _tensor_request(
    name: str, tensor: torch.Tensor, sources: WeightSources, mesh: Mesh, request: LoadRequest
) -> TensorRequest:
    splits = request.splits.get(name, ())
    if model_tensors.is_dtensor(tensor):
        splits = (*splits, *model_tensors.dtensor_splits(name, tensor, mesh))
    shape = request.shapes.get(name, tuple(tensor.shape))
    only = dict(request.only.get(name, {}))
    return TensorRequest(shape, tensor.element_size(), sources.get(name, ()), tuple(splits), only)


def plan_on_all_ranks(coor: Coordinator, make: Callable[[], LoadPlan]) -> LoadPlan:
    """The plan that `make` makes; raise unless it is equal on every rank. Collective.

    Ranks with other models or meshes would wait for each other for ever.
    """

    def digest(plan: LoadPlan) -> str:
        return hashlib.sha256(plan.canonical_text().encode()).hexdigest()

    plan, digests = run_and_share(coor, make, digest, timings.TIMINGS.load_s)
    differ = [coor.ranks[n] for n, other in enumerate(digests) if other != digests[coor.rank]]
    if differ:
        raise DrumlineError(
            f"{coor.rank_name()}: ranks {differ} plan to load other parts than this one, so "
            "they would wait for each other; give every rank the same model, mesh and reader."
        )
    return plan


def load_planned(
    model: nn.Module,
    plan: LoadPlan,
    files: CheckpointFiles,
    coor: Coordinator,
    device: Device | Mapping[str, Device] = "cpu",
    dtypes: Mapping[str, torch.dtype] | None = None,
    on_progress: OnProgress = lambda nbytes: None,
) -> LoadStats:
    """Load this rank's shards by a plan that all ranks share. Collective.

    device, dtypes: by name of tensor, or one device for all, and the dtypes of the model.
    """
    tensors = dict(model_tensors.named_tensors(model))
    names = [name for name, r in plan.requests.items() if r.is_held_by(plan.mesh, coor.rank)]
    dtypes = dtypes or {name: tensor.dtype for name, tensor in tensors.items()}
    devices = device if isinstance(device, Mapping) else dict.fromkeys(names, device)
    with abort_peers_on_error(coor), TensorReader(files.path) as reader:
        specs = {}
        for name in names:
            shape, place = _shape_and_device(tensors[name], name, plan, coor, devices[name])
            specs[name] = shape, dtypes[name], place
        mapped = _map_shards(plan, files.index, reader, coor.rank, specs) if files.maps else {}
        if mapped:
            files.copy_checks[0].mapped.update(reader.mapped_files())
        shards = mapped | allocate_hugepages({n: specs[n] for n in specs if n not in mapped})
        stats = execute(plan, files.index, reader, coor, shards, dtypes, on_progress, mapped)
        with torch.no_grad():
            pairs = [(tensors[name], shards.pop(name)) for name in names]
            new = {id(old): model_tensors.wrap_like(old, shard) for old, shard in pairs}
        model_tensors.replace_tensors(model, new)
    return stats


def _map_shards(
    plan: LoadPlan, index: Index, reader: TensorReader, rank: int, specs: Mapping[str, TensorSpec]
) -> dict[str, torch.Tensor]:
    """The shards of this rank, by name, that lie in a file here as the CPU will use them."""
    transfers: dict[str, list[Transfer]] = {}
    for transfer in plan.transfers:
        if rank in dict(transfer.owners):
            transfers.setdefault(transfer.name, []).append(transfer)
    mapped = {}
    for name, (shape, dtype, device) in specs.items():
        if torch.device(device).type != "cpu" or len(transfers.get(name, ())) != 1:
            continue
        (transfer,) = transfers[name]
        stored = index[transfer.key]
        as_stored = (shape, dtype) == (transfer.source.size, stored.torch_dtype)
        if as_stored and transfer.reader == rank:
            view = reader.map(stored, transfer.source)
            if view is not None:
                mapped[name] = view
    return mapped


def _shape_and_device(
    tensor: Any, name: str, plan: LoadPlan, coor: Coordinator, device: Device
) -> tuple[tuple[int, ...], Device]:
    """The shape and device of this rank's shard."""
    shape = plan.shape_of(name, coor.rank)
    if model_tensors.is_dtensor(tensor):
        local_shape = tuple(tensor.to_local().shape)
        if local_shape != shape:
            raise PlanError(
                f"{coor.rank_name()}: {name} has a shard of shape {local_shape}, and its "
                f"placements give {shape}; use sizes that the mesh divides."
            )
        if tensor.device_mesh.device_type != "cpu":
            device = f"{tensor.device_mesh.device_type}:{coor.local_rank}"
    return shape, device
