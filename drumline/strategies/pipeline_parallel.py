"""One model as a chain of stages: whole layers, on the devices of every rank.

model = drumline.load("checkpoint", device_map="auto")
print(model.generate(tokens))
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from communicator import Communicator
from coordinator import Coordinator
from drumline.checkpoint.config_files import read_generation_config
from drumline.checkpoint.empty_model import empty_model, load_shard
from drumline.checkpoint.source import CheckpointSource
from drumline.checkpoint.weight_map import NotStreamable, WeightMap
from drumline.core.consistency import check_same_on_all_ranks, model_facts, run_on_all_ranks
from drumline.core.device_map import DeviceMap, abbreviate_names
from drumline.errors import CheckpointError, PlanError, WorkerExit
from drumline.liveness.stopped_ranks import on_lookout, outlast_master
from drumline.offload.placement import install_device_hooks, offloaded_modules
from drumline.offload.prefetcher import make_prefetcher
from drumline.pipeline.driver import Session
from drumline.pipeline.master_model import distribute
from drumline.planner.load_options import LoadOptions
from drumline.stages.cuda_graphs import Graphs
from drumline.stages.ring import FOREVER_S, Ring
from drumline.stages.stage import Stage
from drumline.stages.stage_weights import fill, on_disk
from drumline.strategies.plan_inputs import survey


def load_over_stages(path: str | Path, coor: Coordinator | None, asked: LoadOptions) -> Any:
    """The model of a checkpoint, its layers spread over every rank. Collective; see `load`."""
    refuse_device(asked)
    with contextlib.ExitStack() as stack:
        if coor is None:
            coor = stack.enter_context(Coordinator())
        model, chosen = _placed_and_loaded(coor, path, asked)
        return join(coor, model, chosen, stack, asked.backend, asked.cuda_graphs)


def _placed_and_loaded(
    coor: Coordinator, path: str | Path, asked: LoadOptions
) -> tuple[Any, DeviceMap]:
    """This rank's part of the model, and where the others are. Collective."""
    maps: list[DeviceMap] = []
    device_map = asked.device_map or "auto"
    with on_lookout(coor, lambda rank: maps[0].holds(rank) if maps else ""):
        found = survey(coor, path, asked)
        chosen = run_on_all_ranks(coor, lambda: found.plan(device_map, asked.speeds))
        maps.append(chosen)
        told = {"plan": chosen.to_json(), "cuda_graphs": str(asked.cuda_graphs)}
        check_same_on_all_ranks(coor, told)
        if asked.cuda_graphs:
            _refuse_graphs(chosen)
        loaded = (found.kind, found.source, chosen, found.dtype)
        return _loaded(coor, *loaded, asked.progress, asked.rest), chosen


def refuse_device(asked: LoadOptions) -> None:
    if asked.device is not None:
        raise PlanError(
            f"device={asked.device!r} is for ranks that cut layers, with tp= or mesh=; here the "
            'device_map says where each layer goes: device_map={"": (0, "cpu")}.'
        )


def _refuse_graphs(chosen: DeviceMap) -> None:
    """Raise if the layers of a rank cannot be launched together, as they are on no GPU, or two."""
    for rank in chosen.ranks:
        devices = {*chosen.of(rank).values()}
        if rank and (len(devices) > 1 or not devices.pop().startswith("cuda")):
            raise PlanError(
                f"rank {rank}: cuda_graphs=True launches all layers of a rank at once, and those "
                f"of this one are on {', '.join(sorted({*chosen.of(rank).values()}))}; give a "
                "device_map or max_memory that puts them on one GPU, or leave it out."
            )


def _loaded(
    coor: Coordinator,
    kind: type[Any],
    source: CheckpointSource,
    chosen: DeviceMap,
    dtype: torch.dtype,
    progress: bool | None,
    options: Mapping[str, Any],
) -> Any:
    """The model with this rank's part of the weights, streamed if that is possible."""
    places = {"": "meta", **chosen.runs_on(coor.rank)}
    run_on_all_ranks(coor, lambda: _refuse_offload(source, chosen, coor.rank))
    made = run_on_all_ranks(coor, lambda: _empty(kind, source, places, dtype, options))
    if made is None:
        return run_on_all_ranks(
            coor, lambda: _read(kind, source, chosen, coor.rank, dtype, options)
        )
    model, found = made
    check_same_on_all_ranks(coor, model_facts(model, dtype))
    model.loaded = fill(model, found, source, chosen.places, dtype, coor, progress)
    run_on_all_ranks(coor, lambda: _settle(model, found, source, chosen, coor.rank, dtype))
    return model


def _empty(
    kind: type[Any],
    source: CheckpointSource,
    places: Mapping[str, str],
    dtype: torch.dtype,
    options: Mapping[str, Any],
) -> Any:
    """An empty model to stream weights into; None if transformers has to compute them."""
    if getattr(source.config, "quantization_config", None) or options.get("quantization_config"):
        return None
    try:
        return empty_model(kind, source.path, source.config, source.index, places, dtype, **options)
    except NotStreamable:
        return None


def _settle(
    model: Any,
    found: WeightMap,
    source: CheckpointSource,
    chosen: DeviceMap,
    rank: int,
    dtype: torch.dtype,
) -> None:
    """Let the modules of this rank run on their devices, and find their weights there."""
    if rank == 0:
        model.config.name_or_path = str(source.path)
        if model.can_generate():
            model.generation_config = read_generation_config(source.path)
    own = chosen.of(rank)
    away = {name: own[name] for name in offloaded_modules(chosen, rank)}
    device = torch.device(chosen.device_of(rank))
    model._prefetcher = make_prefetcher(model, away, device, on_disk(model, found, source, dtype))
    install_device_hooks(model, chosen, rank, model._prefetcher)


def _refuse_offload(source: CheckpointSource, chosen: DeviceMap, rank: int) -> None:
    """Raise for what has to be read while it runs, on a rank that has nothing to read."""
    stays = [name for name, device in chosen.of(rank).items() if device == "disk"]
    if stays and rank in source.blind:
        raise CheckpointError(
            f"rank {rank}: {abbreviate_names(stays)} are to stay on disk and be read when they run "
            f"and there is no {source.path} on this rank; copy the checkpoint there, or give "
            'max_memory without "disk" for it.'
        )


def _read(
    kind: type[Any],
    source: CheckpointSource,
    chosen: DeviceMap,
    rank: int,
    dtype: torch.dtype,
    options: Mapping[str, Any],
) -> Any:
    """The model as transformers itself reads it, from files that must be here."""
    if source.blind or any(offloaded_modules(chosen, rank) for rank in chosen.ranks):
        raise CheckpointError(
            f"rank {rank}: the weights of this model are computed from what is stored, which needs "
            f"the files on every rank (missing on {source.blind}) and room for all of them; copy "
            'the checkpoint there, and give no "disk" and no "cpu" beside an accelerator.'
        )
    places = {"": "meta", **chosen.of(rank)}
    model = load_shard(kind, source.path, places, dtype, config=source.config, **options)
    model._prefetcher = None
    install_device_hooks(model, chosen, rank, None)
    return model


def join(
    coor: Coordinator,
    model: Any,
    chosen: DeviceMap,
    stack: contextlib.ExitStack,
    backend: str | None = None,
    cuda_graphs: bool = False,
) -> Any:
    """The master's model with the other ranks behind it; they serve here, and raise WorkerExit.

    stack: what to give back when the model is closed.
    """
    if coor.world_size == 1:
        return distribute(model, chosen, None)
    with on_lookout(coor, chosen.holds):
        outward, homeward = [stack.enter_context(_frames(coor, backend)) for _ in range(2)]
    holds = {rank: chosen.holds(rank) for rank in range(coor.world_size)}
    ring = Ring(outward, homeward, holds, stack.pop_all())
    device = torch.device(chosen.device_of(coor.rank))
    if coor.is_master():
        return distribute(model, chosen, Session(ring, device))
    graphs = Graphs(coor.rank, device) if cuda_graphs and coor.rank in chosen.ranks else None
    with ring:
        code = Stage(model, ring, device, graphs).serve()
    outlast_master(coor, code)
    raise WorkerExit(code)


def _frames(coor: Coordinator, backend: str | None) -> Communicator:
    """What moves the frames, which are packed in the memory of the CPU wherever layers run."""
    return Communicator(coor, backend, timeout_s=FOREVER_S, device_type="cpu")
