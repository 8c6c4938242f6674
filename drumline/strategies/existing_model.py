"""A model that every rank has built, or has on meta, spread over the ranks.

model = dispatch(model, {"encoder": 0, "decoder": 1})
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coordinator import Coordinator
from drumline import timings
from drumline.checkpoint import model_tensors
from drumline.checkpoint.safetensors_index import read_index
from drumline.checkpoint.shard_plan import whole_tensor
from drumline.checkpoint.source import CheckpointFiles, share_index
from drumline.checkpoint.weight_map import WeightMap
from drumline.contact import safetensors_api
from drumline.core.consistency import check_same_on_all_ranks, run_on_all_ranks
from drumline.core.device_map import DeviceMap, ModelProfile, Place
from drumline.errors import PlanError, short_traceback
from drumline.offload.placement import install_device_hooks, offloaded_modules
from drumline.offload.prefetcher import DiskWeights, make_prefetcher
from drumline.planner.memory import Memory, allowed_memory
from drumline.planner.model_profile import is_inside, part_of_tensor, profile_model
from drumline.planner.plan import plan
from drumline.stages.stage_weights import LoadedStage, fill, on_disk
from drumline.strategies.pipeline_parallel import check_offload, connect_stages

Map = str | Mapping[str, Place | int | str] | DeviceMap
Reader = Callable[[str, Mapping[str, torch.Tensor]], DiskWeights]
"""Makes what reads a module's weights from disk, of its name and its tensors."""


@short_traceback
def dispatch(
    model: nn.Module,
    device_map: Map = "auto",
    coor: Coordinator | None = None,
    *,
    checkpoint: str | Path | None = None,
    max_memory: Memory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    offload_dir: str | Path | None = None,
) -> Any:
    """The model with its modules on the places of the map. Collective; ends as `load` does.

    model: any module, the same on every rank. Each rank keeps its own modules only.
    device_map: as for `load`; modules that it names are kept whole.
    checkpoint: a folder or file of safetensors to fill the model from, named as in the model; the
        values that the model has, if not given.
    no_split_module_classes: classes of modules that stay whole, see `profile_model`.
    offload_dir: where each rank writes those of its modules whose place is "disk", in safetensors
        files of its own, which are read whenever the module runs; yours to delete afterwards. With
        a checkpoint they are read from its files, and nothing is written.

    Raises PlanError or CheckpointError on every rank before serving starts.
    """
    owner = coor
    with contextlib.ExitStack() as stack:
        coor = coor or stack.enter_context(Coordinator())
        free_nbytes = allowed_memory(coor, max_memory)
        placed = run_on_all_ranks(
            coor, lambda: _planned(model, device_map, free_nbytes, no_split_module_classes)
        )
        check_same_on_all_ranks(coor, {"plan": placed.to_json(), "torch": torch.__version__})
        reader: Reader = functools.partial(_write_to_disk, offload_dir, coor.rank)
        if checkpoint is not None:
            files, reader = _fill(model, placed, coor, Path(checkpoint))
            for check in files.copy_checks:
                stack.enter_context(check)
        stage = run_on_all_ranks(
            coor, lambda: _keep_own(model, placed, coor.rank, reader), timings.TIMINGS.load_s
        )
        split = connect_stages(coor, stage, stack)
        return split if owner is None else owner.close_first(split)


def _planned(
    model: nn.Module,
    device_map: Map,
    free_nbytes: dict[Place, int],
    no_split_module_classes: Collection[str] | str | None,
) -> DeviceMap:
    if isinstance(device_map, DeviceMap):
        device_map = device_map.places
    if isinstance(device_map, Mapping):
        return plan(_parts(model, device_map), free_nbytes, device_map)
    return plan(profile_model(model, no_split_module_classes), free_nbytes, device_map)


def _parts(model: nn.Module, named: Collection[str]) -> ModelProfile:
    """The modules that a map names, and the largest ones that hold none of those."""
    modules = dict(model.named_modules())
    tensors = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    strangers = [name for name in named if name not in modules and name not in tensors]
    if strangers:
        raise PlanError(
            f"device_map names {strangers}, which are not in {type(model).__name__}, so it may be "
            "that of another model; its modules are those of named_modules()."
        )
    whole = [n for n in named if n in modules and n and not is_inside(n, named)]
    return profile_model(model, names=whole)


def _fill(
    model: nn.Module, placed: DeviceMap, coor: Coordinator, path: Path
) -> tuple[CheckpointFiles, Reader]:
    """Read the tensors of this rank; ranks that do not see the files get them from the master."""
    has_files = coor.allgather_object(os.path.exists(path))
    readers = [rank if has else 0 for rank, has in enumerate(has_files)]
    files, _ = share_index(coor, path, lambda: readers)
    run_on_all_ranks(coor, lambda: check_offload(files, placed, coor.rank))
    where = files.index, files.compared_by(coor.rank)
    pieces = run_on_all_ranks(
        coor, lambda: model_tensors.sources_by_name(model, *where), timings.TIMINGS.load_s
    )
    weight_map = WeightMap(pieces, frozenset(), frozenset())
    fill(model, weight_map, files, placed.places, None, coor, None)
    return files, on_disk(model, weight_map, files, None)


def _keep_own(model: nn.Module, placed: DeviceMap, rank: int, reader: Reader) -> LoadedStage:
    """This rank's tensors on their devices and all others on meta, whatever they were before."""
    own, runs_on, parts = placed.of(rank), placed.runs_on(rank), set(placed.places)
    readers = {
        name: reader(name, dict(model_tensors.named_tensors(model.get_submodule(name))))
        for name, device in own.items()
        if device == "disk"
    }
    filed = {f"{part}.{name}" for part, weights in readers.items() for name in weights.shapes}
    new: dict[int, torch.Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        owner = part_of_tensor(name, parts)
        device = runs_on.get(owner, "meta") if own.get(owner) == "disk" else own.get(owner, "meta")
        device = "meta" if name in filed else device
        moved = tensor if device == str(tensor.device) else _moved(name, tensor, device)
        is_weight = isinstance(tensor, nn.Parameter)
        new[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if is_weight else moved
    model_tensors.replace_tensors(model, new)
    away = {name: own[name] for name in offloaded_modules(placed, rank)}
    where = torch.device(placed.device_of(rank))
    prefetcher = make_prefetcher(model, away, where, lambda name, tensors: readers[name])
    install_device_hooks(model, placed, rank, prefetcher)
    return LoadedStage(model, placed, prefetcher)


def _moved(name: str, tensor: torch.Tensor, device: str) -> torch.Tensor:
    if tensor.is_meta:
        raise PlanError(
            f"{name} is on meta, so it has no values to put on {device}; load the weights with "
            "load_checkpoint_and_dispatch(model, checkpoint, device_map), and build the model in "
            "accelerate.init_empty_weights(), which computes buffers that no file holds."
        )
    return tensor.detach().to(device)


def _write_to_disk(
    offload_dir: str | Path | None, rank: int, name: str, tensors: Mapping[str, torch.Tensor]
) -> DiskWeights:
    """Write the weights of a module into a file; returns what reads them from there."""
    if offload_dir is None:
        raise PlanError(
            f"rank {rank}: {name} is to stay on disk, but no folder is given; give offload_dir=, "
            "or another place for it."
        )
    Path(offload_dir).mkdir(parents=True, exist_ok=True)
    file = Path(offload_dir, f"{name}.rank{rank}.safetensors")
    on_cpu = {
        key: _moved(f"{name}.{key}", tensor, "cpu").contiguous().clone()
        for key, tensor in tensors.items()
    }
    safetensors_api.write_file(on_cpu, file)
    files = CheckpointFiles(file, read_index(file), [0])
    pieces = {key: whole_tensor(key, tensor.shape) for key, tensor in tensors.items()}
    dtypes = {key: tensor.dtype for key, tensor in tensors.items()}
    return DiskWeights(files, pieces, tensors, dtypes)
