"""`device_map="fastest"`: pipeline parallelism, or tensor parallelism within each node.

A token passes whole layers one after the other, whichever rank has them; ranks of a TP group work
at the same time, and sum their shards twice a layer. Measurements decide which is faster.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator import Coordinator
from drumline.checkpoint.source import Checkpoint
from drumline.core.consistency import check_same_on_all_ranks
from drumline.core.device_map import first_device
from drumline.core.group_monitor import monitored_loading
from drumline.core.mesh import Mesh
from drumline.errors import PlanError
from drumline.planner.cost_model import DeviceSpeeds, GroupSpeed, estimate, estimate_tensor_parallel
from drumline.planner.load_options import LoadOptions
from drumline.planner.measure import measure_group_speeds, measure_speeds
from drumline.strategies.pipeline_parallel import load_pipeline
from drumline.strategies.pipeline_tp import load_pipeline_tp
from drumline.strategies.plan_inputs import PlanInputs, collect_plan_inputs, has_computed
from drumline.tensor_parallel.sharded_model import own_device, shard_checkpoint

MIN_SPEEDUP = 1.1
"""Least speedup of a sharded layer: its sums are taken in another order."""

SAME_ON_ALL_RANKS = (
    *("dtype", "batch", "length", "pass_tokens", "max_memory", "backend", "cuda_graphs"),
)
"""Options that must be equal on all ranks, or these would measure and choose differently."""


def load_fastest(path: str | Path, coor: Coordinator | None, options: LoadOptions) -> Any:
    """The model as it is expected to be fastest. Collective; see `load`."""
    whole, *sharded = _candidates(path, coor, options)
    for tp_options in sharded:
        with contextlib.suppress(PlanError):  # too little memory: every rank finds the same
            return load_pipeline_tp(path, coor, tp_options)
    return load_pipeline(path, coor, whole)


def _candidates(
    path: str | Path, coor: Coordinator | None, options: LoadOptions
) -> list[LoadOptions]:
    """The options with the speeds of this cluster; then those for TP groups that can be loaded and
    are worth it, the fastest first. The same on every rank."""
    with contextlib.ExitStack() as stack:
        coor = coor or stack.enter_context(Coordinator())
        stack.enter_context(monitored_loading(coor, lambda rank: "its part of the measurements"))
        check_same_on_all_ranks(
            coor, {name: repr(getattr(options, name)) for name in SAME_ON_ALL_RANKS}
        )
        inputs = collect_plan_inputs(coor, path, options)
        speeds = measure_speeds(coor, inputs.free_nbytes, inputs.checkpoint.dtype, options.backend)
        options = replace(options, speeds=speeds)
        stays_packed = has_computed(inputs.checkpoint.files.index) and not options.dequantize
        is_whole = options.cuda_graphs or options.gguf or stays_packed
        if is_whole or not _have_own_devices(coor, inputs):
            return [options]
        groups = measure_group_speeds(coor, own_device(coor), inputs.checkpoint.dtype)
        sizes = _faster_sizes(inputs, groups, speeds)
        reader = "rank0" if inputs.checkpoint.files.blind else None
        sharded = [replace(options, device_map="auto", tp=size, reader=reader) for size in sizes]
        return [options, *(c for c in sharded if _is_loadable(coor, inputs.checkpoint, c))]


def _have_own_devices(coor: Coordinator, inputs: PlanInputs) -> bool:
    """True if each rank computes where a rank of a TP group would, and nowhere else."""
    devices = [
        d for rank, d in inputs.free_nbytes if rank == coor.rank and d not in ("cpu", "disk")
    ]
    is_own = first_device(devices) == own_device(coor) and coor.local_rank == coor.info.local_rank
    return coor.all_true(len(devices) < 2 and is_own)


def _faster_sizes(inputs: PlanInputs, groups: list[GroupSpeed], speeds: DeviceSpeeds) -> list[int]:
    """The sizes of TP groups that are worth it, the fastest first."""
    try:
        whole = inputs.plan("fastest", speeds)
        alone = estimate(inputs.parts, whole, speeds, inputs.step).tokens_a_second
    except PlanError:
        alone = 0.0  # whole layers do not fit
    rates = {}
    for group in groups:
        expected = estimate_tensor_parallel(inputs.parts, group, speeds, inputs.step)
        rates[group.size] = expected.tokens_a_second
    sizes = [size for size, rate in rates.items() if rate > MIN_SPEEDUP * alone]
    return sorted(sizes, key=lambda size: -rates[size])


def _is_loadable(coor: Coordinator, checkpoint: Checkpoint, options: LoadOptions) -> bool:
    """True if every rank can shard this model with these options. Collective."""
    mesh = Mesh({"pp": coor.world_size // (options.tp or 1), "tp": options.tp or 1})
    try:
        shard_checkpoint(coor, checkpoint, mesh, options)
    except Exception:  # which says no, whatever it is: options for from_pretrained alone, too
        return coor.all_true(False)
    return coor.all_true(True)
