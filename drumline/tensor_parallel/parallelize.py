"""Tensor parallelism for a model that every rank has whole, and the shards of its parameters.

specs = parallelize(model, "auto", comm)       # in place

A checkpoint that fits no rank goes the same way in steps:

styles = read_plan(model, "auto")              # module or parameter -> style
specs = shard_specs(model, styles, size=2)     # parameter -> ShardSpec along "tp", checked
...                                            # every rank loads its shards
insert_collectives(model, styles, comm)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from communicator import Communicator
from drumline.checkpoint.model_tensors import replace_tensors
from drumline.core.mesh import Mesh
from drumline.core.shards import Region, ShardSpec, local_shape, owned_regions
from drumline.errors import PlanError, short_traceback
from drumline.tensor_parallel.tp_checks import check_plan, check_specs
from drumline.tensor_parallel.tp_layers import insert_collectives
from drumline.tensor_parallel.tp_plan import MODULE_STYLES, ROW, UNSHARDED, Styles, read_plan


@short_traceback
def parallelize(model: nn.Module, plan: str | Styles, comm: Communicator) -> dict[str, Any]:
    """Shard a model that every rank has whole, in place; returns the specs of each parameter.

    plan: see `read_plan`; the same on every rank. For models that fit a rank: `load_into` and
    `insert_collectives` never hold the whole.
    """
    styles = read_plan(model, plan)
    splits = shard_specs(model, styles, comm.world_size)
    mesh = Mesh({"tp": comm.world_size})
    shards: dict[int, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        shard = local_shard(parameter.detach(), splits[name], mesh, comm.rank)
        shards[id(parameter)] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
    insert_collectives(model, styles, comm)
    replace_tensors(model, shards)
    return splits


def shard_specs(model: nn.Module, styles: Styles, size: int) -> dict[str, tuple[ShardSpec, ...]]:
    """The sharding of each parameter along "tp". Raises PlanError where that would not compute."""
    if not styles:
        return {name: () for name, _ in model.named_parameters(remove_duplicate=False)}
    check_plan(model, styles, size)
    specs: dict[str, tuple[ShardSpec, ...]] = {}
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        spec = _spec_of(model, name, parameter, styles)
        first = owners.setdefault(id(parameter), name)
        if specs.setdefault(first, spec) != spec:
            raise PlanError(
                f"{first} and {name} are one tensor, and the plan shards it in two ways; give both "
                "styles for the same dimension (embedding_rowwise and colwise_gather_output)."
            )
        specs[name] = spec
    check_specs(model, styles, specs, size)
    return specs


def _spec_of(
    model: nn.Module, name: str, parameter: torch.Tensor, styles: Styles
) -> tuple[ShardSpec, ...]:
    """The sharding of one parameter by its own style, or that of its module."""
    owner, _, last = name.rpartition(".")
    style = styles.get(name) or styles.get(owner, "replicate")
    is_bias = last.endswith("bias")
    if name not in styles and style in MODULE_STYLES and last not in ("weight", "bias"):
        return ()  # a parameter that only this kind of module has
    if style in UNSHARDED or style == "ep_dispatch_experts":
        return ()
    if style == "grouped_gemm":
        return (ShardSpec("tp", 0),)
    if style in ROW or style in ("packed_rowwise", "embedding_colwise"):
        factor = 2 if style == "packed_rowwise" else 1
        return () if is_bias else (ShardSpec("tp", parameter.dim() - 1, factor),)
    outputs = parameter.dim() - 1 if is_bias else max(parameter.dim() - 2, 0)
    return (ShardSpec("tp", outputs, 2 if style == "packed_colwise" else 1),)


def local_shard(
    whole: torch.Tensor, splits: Sequence[ShardSpec], mesh: Mesh, rank: int
) -> torch.Tensor:
    """The shard of a tensor that `rank` holds, as a new tensor."""
    out = whole.new_empty(local_shape(whole.shape, splits, mesh, rank))
    for own in owned_regions(whole.shape, splits, mesh, rank):
        out[Region(own.at, own.region.size).slices()] = whole[own.region.slices()]
    return out
