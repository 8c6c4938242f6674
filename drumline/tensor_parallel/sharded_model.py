"""A transformers checkpoint whose layers are to be sharded: built empty, planned, then filled.

model = shard_checkpoint(coor, checkpoint, mesh, options)      # as open_checkpoint() found it
model.fill(coor, model.plan(grid, coor.rank))
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coordinator import Coordinator
from drumline import timings
from drumline.checkpoint.empty_model import empty_model
from drumline.checkpoint.model_tensors import (
    WeightSources,
    named_tensors,
    replace_tensors,
    wrap_like,
)
from drumline.checkpoint.plan_executor import LoadStats
from drumline.checkpoint.shard_loader import LoadRequest, load_planned, plan_files
from drumline.checkpoint.shard_plan import LoadPlan
from drumline.checkpoint.source import Checkpoint, CheckpointFiles
from drumline.checkpoint.weight_map import dtype_overrides, merge_tied_names
from drumline.core.mesh import Mesh
from drumline.core.shards import ShardSpec, local_shape
from drumline.errors import PlanError
from drumline.planner.load_options import LoadOptions
from drumline.tensor_parallel.dry_run_forward import dry_run, truncated_copy
from drumline.tensor_parallel.parallelize import shard_specs
from drumline.tensor_parallel.tp_plan import read_plan


@dataclass
class ShardedModel:
    """A model on meta, and how each tensor of it is sharded along the mesh.

    `shapes` are those of the whole, whatever becomes of the tensors on meta before they are filled.
    """

    model: Any
    styles: Mapping[str, str]
    splits: Mapping[str, tuple[ShardSpec, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    device: str
    files: CheckpointFiles
    sources: WeightSources

    def plan(
        self, mesh: Mesh, rank: int, only: Mapping[str, Mapping[str, int]] | None = None
    ) -> LoadPlan:
        """The part of `rank` in filling the model. only: see load_into."""
        options = LoadRequest(self.splits, only or {}, self.shapes, lambda index: self.sources)
        return plan_files(self.model, self.files, mesh, rank, options)

    def fill(self, coor: Coordinator, plan: LoadPlan) -> LoadStats:
        """Read this rank's part, and wait for the others. Collective."""
        stats = load_planned(self.model, plan, self.files, coor, self.device)
        coor.barrier(timeout_s=timings.TIMINGS.load_s)
        return stats


def shard_checkpoint(
    coor: Coordinator, checkpoint: Checkpoint, mesh: Mesh, options: LoadOptions
) -> ShardedModel:
    """The empty model of a checkpoint and how it is sharded; PlanError if it cannot be."""
    config, files = checkpoint.config, checkpoint.files
    _check_not_quantised(files.path, config, options)
    where = options.device or own_device(coor)
    model, weight_map = empty_model(
        checkpoint.kind,
        files.path,
        config,
        files.index,
        {"": where},
        checkpoint.dtype,
        warns=coor.rank == 0,
        **options.rest,
    )
    _widen(model, checkpoint.dtype)
    sources, files = checkpoint.with_adapter(model, merge_tied_names(model, weight_map.slices))
    size = mesh.axis_size("tp")
    styles = read_plan(model, options.tp_plan or "auto") if size > 1 else {}
    splits = shard_specs(model, styles, size)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if styles:
        whole = truncated_copy(model, styles)
        part = copy.deepcopy(whole)
        shrink(part, splits, mesh, coor.rank)
        rank_of_group = mesh.coordinate(coor.rank)["tp"]
        dry_run(whole, part, styles, rank_of_group, size, options.has_stages)
    if checkpoint.generation is not None:
        model.generation_config = checkpoint.generation
    return ShardedModel(model, styles, splits, shapes, where, files, sources)


def _widen(model: nn.Module, dtype: torch.dtype) -> None:
    """Give tensors on meta the dtype that the model wants for them in place of `dtype`."""
    tensors, wide = dict(named_tensors(model)), dtype_overrides(model, dtype)
    new = {id(tensors[n]): wrap_like(tensors[n], tensors[n].detach().to(wide[n])) for n in wide}
    replace_tensors(model, new)


def shrink(
    model: nn.Module, splits: Mapping[str, tuple[ShardSpec, ...]], mesh: Mesh, rank: int
) -> None:
    """Make every tensor of a model on meta as small as the part of `rank`."""
    sharded: dict[int, torch.Tensor] = {}
    for name, p in model.named_parameters():
        if splits[name]:
            shape = local_shape(p.shape, splits[name], mesh, rank)
            sharded[id(p)] = wrap_like(p, torch.empty(shape, dtype=p.dtype, device="meta"))
    replace_tensors(model, sharded)


def _check_not_quantised(path: str | Path, config: Any, options: LoadOptions) -> None:
    """Raise PlanError for weights in blocks with scales: no rank could read its shard of them."""
    quantization = getattr(config, "quantization_config", None) or options.rest.get(
        "quantization_config"
    )
    if quantization is None:
        return
    settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
    raise PlanError(
        f"{path} is quantised ({settings.get('quant_method')}), and no rank could run its part of "
        "such a layer; pass dequantize=True, or load whole layers with device_map= and no tp= or "
        "mesh=, or save it once in the dtype it is to run in."
    )


def own_device(coor: Coordinator) -> str:
    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{coor.local_rank % torch.cuda.device_count()}"  # a rank may see only its own
