"""One model as a pipeline of stages: whole layers, on the devices of every rank.

model = drumline.load("checkpoint", device_map="auto")
print(model.generate(tokens))
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coordinator import Coordinator
from drumline import timings
from drumline.checkpoint.config_files import read_generation_config
from drumline.checkpoint.empty_model import empty_model, load_shard
from drumline.checkpoint.json_files import MERGE_ADAPTER
from drumline.checkpoint.safetensors_index import check_unchanged, is_local, written_files
from drumline.checkpoint.source import Checkpoint, CheckpointFiles
from drumline.checkpoint.weight_map import NotStreamable, WeightMap
from drumline.core.consistency import check_same, model_facts, run_and_share, run_on_all_ranks
from drumline.core.cpu.experts import use_fast_experts
from drumline.core.cpu.products import use_fast_products
from drumline.core.device_map import DeviceMap, abbreviate_names
from drumline.core.group_monitor import monitored_loading
from drumline.core.packed_tensor import is_unpacked_by_torch
from drumline.errors import CheckpointError, PlanError
from drumline.kv_cache.windows import give_back_prompts
from drumline.offload.placement import install_device_hooks, offloaded_modules
from drumline.offload.prefetcher import make_prefetcher
from drumline.pipeline.driver import PipelineDriver
from drumline.pipeline.master_model import distribute
from drumline.planner.load_options import LoadOptions
from drumline.planner.measure import measure_machines
from drumline.stages.cuda_graphs import CudaGraphs
from drumline.stages.ring import Ring
from drumline.stages.stage import Stage
from drumline.stages.stage_weights import LoadedStage, fill, on_disk
from drumline.strategies.plan_inputs import collect_plan_inputs, keep_packed
from drumline.strategies.serve_stage import open_ring_communicators, serve_and_exit
from launcher import linux

log = logging.getLogger("drumline")


def load_pipeline(
    path: str | Path, coor: Coordinator | None, options: LoadOptions, model: Any = None
) -> Any:
    """The model of a checkpoint, its layers spread over every rank. Collective; see `load`.

    model: an object on the master that is to become it.
    """
    with contextlib.ExitStack() as stack:
        coor = coor or stack.enter_context(Coordinator())
        stage = _load_stage(coor, path, options, stack)
        if model is not None:
            stage.model = _become(model, stage.model)
        return connect_stages(coor, stage, stack, options.backend, options.cuda_graphs)


def _load_stage(
    coor: Coordinator, path: str | Path, options: LoadOptions, stack: contextlib.ExitStack
) -> LoadedStage:
    """This rank's part of the model. Collective. stack: what goes on while it is in use."""
    planned: list[DeviceMap] = []
    with monitored_loading(coor, lambda rank: planned[0].holds(rank) if planned else ""):
        inputs = collect_plan_inputs(coor, path, options)
        mode = "auto" if options.device_map is None else options.device_map
        speeds = options.speeds
        if mode == "auto":
            speeds = measure_machines(coor, inputs.free_nbytes, inputs.checkpoint.dtype)
        device_map, facts = run_and_share(
            coor,
            lambda: inputs.plan(mode, speeds),
            lambda plan: {"plan": plan.to_json(), "cuda_graphs": str(options.cuda_graphs)},
        )
        planned.append(device_map)
        log.info("rank %d: %s of %s", coor.rank, device_map.of(coor.rank), path)
        check_same(coor, facts)
        if options.cuda_graphs:
            _check_graphs(device_map)
        stage = _load_weights(coor, inputs.checkpoint, device_map, options)
        for check in inputs.checkpoint.files.copy_checks:
            stack.enter_context(check)
        return stage


def _become(model: Any, other: Any) -> Any:
    """The model, with the class and all that the other one holds, which is no longer used."""
    model.__class__ = type(other)
    model.__dict__.clear()
    model.__dict__.update(other.__dict__)
    return model


def _check_graphs(device_map: DeviceMap) -> None:
    """Raise if the layers of a rank cannot be launched together, as they are on no GPU, or two."""
    for rank in device_map.ranks:
        devices = {*device_map.of(rank).values()}
        if rank and (len(devices) > 1 or not devices.pop().startswith("cuda")):
            raise PlanError(
                f"rank {rank}: cuda_graphs=True launches all layers of a rank at once, and those "
                f"of this one are on {', '.join(sorted({*device_map.of(rank).values()}))}; give a "
                "device_map or max_memory that puts them on one GPU, or leave it out."
            )


def _load_weights(
    coor: Coordinator, checkpoint: Checkpoint, device_map: DeviceMap, options: LoadOptions
) -> LoadedStage:
    """The model with this rank's part of the weights, streamed if that is possible."""
    dtype = checkpoint.dtype
    empty, facts = run_and_share(
        coor,
        lambda: _build_empty(checkpoint, device_map, coor.rank, options),
        lambda empty: model_facts(empty[0], dtype) if empty else {},
    )
    check_same(coor, facts)
    if empty is None:
        stage: LoadedStage = run_on_all_ranks(
            coor,
            lambda: _read(checkpoint, device_map, coor.rank, options.rest),
            timings.TIMINGS.load_s,
        )
        return stage
    model, weight_map, kept = empty
    slow = [name for name, weight in model.named_parameters() if is_unpacked_by_torch(weight)]
    if slow and coor.is_master():
        log.warning(
            "rank 0: %d weights of %s stay in the few bits that are stored, in a form (that of %s) "
            "that each operation unpacks anew, which takes most of the time of a token on a "
            "CPU; dequantize=True computes them once, where there is memory for it.",
            len(slow),
            kept.path,
            slow[0],
        )
    checkpoint = replace(checkpoint, files=kept)
    stats = fill(model, weight_map, kept, device_map.places, dtype, coor, options.progress)
    stage = LoadedStage(model, device_map, stats=stats)
    place = functools.partial(_place, stage, weight_map, checkpoint, coor.rank)
    run_on_all_ranks(coor, place, timings.TIMINGS.load_s)
    return stage


def _build_empty(
    checkpoint: Checkpoint, device_map: DeviceMap, rank: int, options: LoadOptions
) -> tuple[Any, WeightMap, CheckpointFiles] | None:
    """An empty model, which of the files' weights to stream into it, and the files, the adapter's
    among them; None if transformers has to compute the weights."""
    kind, dtype, source, rest = checkpoint.kind, checkpoint.dtype, checkpoint.files, options.rest
    check_offload(source, device_map, rank)
    if getattr(source.config, "quantization_config", None) or rest.get("quantization_config"):
        return None
    places = {"": "meta", **device_map.runs_on(rank)}
    try:
        where = (kind, source.path, source.config, source.index, places, dtype)
        model, weight_map = empty_model(*where, warns=rank == 0, **rest)
    except NotStreamable:
        return None
    slices, files = checkpoint.with_adapter(model, weight_map.slices)
    return model, *keep_packed(model, replace(weight_map, slices=slices), files, dtype, options)


def _place(stage: LoadedStage, weight_map: WeightMap, checkpoint: Checkpoint, rank: int) -> None:
    """Let the modules of this rank run on their devices, and find their weights there."""
    model, device_map, source = stage.model, stage.device_map, checkpoint.files
    if rank == 0:
        model.config.name_or_path = model.name_or_path = str(source.path)
        if model.can_generate() and source.path.is_dir():  # a GGUF file says it in the config
            settings = checkpoint.generation or read_generation_config(source.path)
            model.generation_config = settings
    own = device_map.of(rank)
    away = {name: own[name] for name in offloaded_modules(device_map, rank)}
    device = torch.device(device_map.device_of(rank))
    readers = on_disk(model, weight_map, source, checkpoint.dtype)
    stage.prefetcher = make_prefetcher(model, away, device, readers)
    install_device_hooks(model, device_map, rank, stage.prefetcher)


def check_offload(source: CheckpointFiles, device_map: DeviceMap, rank: int) -> None:
    """Raise for weights that have to be read while they run, on a rank without the files."""
    stays = [name for name, device in device_map.of(rank).items() if device == "disk"]
    if stays and rank in source.blind:
        raise CheckpointError(
            f"rank {rank}: {abbreviate_names(stays)} are to stay on disk and be read when they run "
            f"and there is no {source.path} on this rank; copy the checkpoint there, or give "
            'max_memory without "disk" for it.'
        )


def _read(
    checkpoint: Checkpoint, device_map: DeviceMap, rank: int, rest: Mapping[str, Any]
) -> LoadedStage:
    """The model as transformers itself reads it, from files that must be here."""
    source = checkpoint.files
    if checkpoint.adapter is not None:
        raise CheckpointError(
            f"rank {rank}: the weights of this model are computed from what is stored, so no "
            f"adapter can be merged while they are read; {MERGE_ADAPTER}."
        )
    if source.blind or any(offloaded_modules(device_map, rank) for rank in device_map.ranks):
        raise CheckpointError(
            f"rank {rank}: the weights of this model are computed from what is stored, which needs "
            f"the files on every rank (missing on {source.blind}) and memory for all of them; copy "
            'the checkpoint there, and give no "disk" and no "cpu" next to an accelerator.'
        )
    places, options = {"": "meta", **device_map.of(rank)}, {"config": source.config, **rest}
    where = (checkpoint.kind, source.path, source.index, places, checkpoint.dtype)
    files = written_files(source.path, source.index)
    maps = source.maps and all(map(is_local, files))
    model = load_shard(*where, maps=maps, warns=rank == 0, **options)
    check_unchanged(source.path, source.index)
    pages = linux.read_proc("self/maps") if maps else ""
    mapped = {file: state for file, state in files.items() if os.path.realpath(file) in pages}
    source.copy_checks[0].mapped.update(mapped)
    install_device_hooks(model, device_map, rank, None)
    return LoadedStage(model, device_map)


def connect_stages(
    coor: Coordinator,
    stage: LoadedStage,
    stack: contextlib.ExitStack,
    backend: str | None = None,
    cuda_graphs: bool = False,
) -> Any:
    """The master's model with the other ranks behind it; these serve here, and raise WorkerExit.

    On all of them it is in evaluation mode: a later change of the mode would reach the master only.
    stack: what to give back when the model is closed.
    """
    give_back_prompts(stage.model)
    use_fast_products(stage.model)
    use_fast_experts(stage.model)
    if coor.world_size == 1:
        return distribute(stage, None)
    stage.model.eval()
    device_map = stage.device_map
    with monitored_loading(coor, device_map.holds):
        device = torch.device(device_map.device_of(coor.rank))
        forward, back, *on_device = open_ring_communicators(coor, device, backend, stack)
    layers_by_rank = {rank: device_map.holds(rank) for rank in range(coor.world_size)}
    ring = Ring(forward, back, layers_by_rank, stack.pop_all(), on_device=on_device)
    if coor.is_master():
        return distribute(stage, PipelineDriver(ring, device))
    has_layers = coor.rank in device_map.ranks
    graphs = CudaGraphs(coor.rank, device) if cuda_graphs and has_layers else None
    serve_and_exit(Stage(stage.model, ring, device, graphs), coor)
