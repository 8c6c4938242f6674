"""A transformers checkpoint whose layers are to be sharded: built empty, planned, then filled.

files, configs = open_checkpoint(coor, "checkpoint", mesh, options)
model = shard_checkpoint(coor, files, configs, mesh, options)
model.fill(coor, model.plan(grid, coor.rank))
"""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coordinator import Coordinator, torch_private
from drumline.checkpoint.config_files import read_config, read_generation_config
from drumline.checkpoint.json_files import read_json
from drumline.checkpoint.model_tensors import WeightSources, named_tensors, replace_tensors
from drumline.checkpoint.plan_executor import LoadStats
from drumline.checkpoint.shard_loader import LoadRequest, assign_readers, load_planned, plan_files
from drumline.checkpoint.shard_plan import LoadPlan
from drumline.checkpoint.source import (
    CheckpointFiles,
    allow_code,
    choose_config,
    config_from_json,
    read_model_class,
    share_index,
)
from drumline.checkpoint.weight_map import dtype_overrides, weight_sources
from drumline.contact.loading import models
from drumline.contact.loading.configs import generation_settings_from_fields
from drumline.core.mesh import Mesh
from drumline.core.meta_init import init_on_meta, model_building
from drumline.core.shards import ShardSpec, local_shape
from drumline.errors import DrumlineError, PlanError
from drumline.planner.load_options import LoadOptions
from drumline.planner.model_profile import model_class
from drumline.tensor_parallel.dry_run_forward import dry_run, truncated_copy
from drumline.tensor_parallel.parallelize import shard_specs
from drumline.tensor_parallel.tp_plan import read_plan
from drumline.weight_formats.dequantized import read_dequantized
from drumline.weight_formats.lora_adapter import find_adapter

FEW = 16 << 20
"""As many weights as may be made, and thrown away, for the sake of a buffer beside them."""


@dataclass
class ShardedModel:
    """A model on meta, and how each tensor of it is sharded along the mesh.

    `shapes` are those of the whole, whatever becomes of the tensors on meta before they are filled.
    """

    model: Any
    config: Any
    generation: Any
    styles: Mapping[str, str]
    splits: Mapping[str, tuple[ShardSpec, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    device: str
    files: CheckpointFiles
    sources: WeightSources

    def shrink(self, mesh: Mesh, rank: int) -> None:
        """Make every tensor on meta as small as the part of `rank`."""
        shrink(self.model, self.splits, mesh, rank)

    def plan(
        self, mesh: Mesh, rank: int, only: Mapping[str, Mapping[str, int]] | None = None
    ) -> LoadPlan:
        """The part of `rank` in filling the model. only: see load_into."""
        options = LoadRequest(self.splits, only or {}, self.shapes, lambda index: self.sources)
        return plan_files(self.model, self.files, mesh, rank, options)

    def fill(self, coor: Coordinator, plan: LoadPlan) -> LoadStats:
        """Read this rank's part. Collective."""
        return load_planned(self.model, plan, self.files, coor, self.device)


def open_checkpoint(
    coor: Coordinator, path: str | Path, mesh: Mesh, options: LoadOptions
) -> tuple[CheckpointFiles, Any]:
    """The files of a checkpoint with its configs, and its adapter, the same on every rank.

    Collective.
    """
    if options.trust_remote_code:
        allow_code(coor, Path(path))
    files, configs = share_index(
        coor,
        path,
        lambda: assign_readers(coor, mesh, options.reader or "each")[1],
        lambda: read_configs(path, options.adapter, options.trust_remote_code),
    )
    adapter, files = find_adapter(coor, options.adapter, files)
    return files, (*json.loads(configs), adapter)


def shard_checkpoint(
    coor: Coordinator, files: CheckpointFiles, configs: Any, mesh: Mesh, options: LoadOptions
) -> ShardedModel:
    """The empty model of a checkpoint and how it is sharded; PlanError if it cannot be."""
    fields, generation, adapter = configs
    if generation is not None:
        generation = generation_settings_from_fields(generation)
    kind, stored = options.cls, None
    if options.trust_remote_code:
        stored, own = read_model_class(files.path)
        kind = kind or own
    stored = stored or config_from_json(fields)
    files = replace(files, config=choose_config(stored, options.config))
    if options.dequantize:
        files = read_dequantized(files, model_dtype(files.config, options))
    config = files.config
    _check_not_quantised(files.path, config, options)
    kind = kind or model_class(config)
    options.check_rest(kind)
    model = build(kind, config, options)
    sources = weight_sources(model, files.index)
    if adapter is not None:
        dtype = model_dtype(config, options)
        sources, index = adapter.merged(model, sources, files.index, dtype)
        files = replace(files, index=index)
    where = options.device or own_device(coor)
    size = mesh.axis_size("tp")
    styles = read_plan(model, options.tp_plan or "auto") if size > 1 else {}
    splits = shard_specs(model, styles, size)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if styles:
        whole = truncated_copy(model, styles)
        part = copy.deepcopy(whole)
        shrink(part, splits, mesh, coor.rank)
        dry_run(whole, part, styles, mesh.coordinate(coor.rank)["tp"], size)
    compute_buffers(model, where)
    return ShardedModel(model, config, generation, styles, splits, shapes, where, files, sources)


def shrink(
    model: nn.Module, splits: Mapping[str, tuple[ShardSpec, ...]], mesh: Mesh, rank: int
) -> None:
    sharded = {
        id(p): empty_like(p, local_shape(p.shape, splits[name], mesh, rank))
        for name, p in model.named_parameters()
        if splits[name]
    }
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


def read_configs(
    path: str | Path, adapter: str | Path | None = None, trust_remote_code: bool = False
) -> bytes:
    """config.json and generation_config.json in one line, for ranks that may have no file."""
    folder = Path(path)
    read_config(folder, adapter, trust_remote_code)
    config, generation = read_json(folder / "config.json"), None
    if (folder / "generation_config.json").exists():
        read_generation_config(folder)
        generation = read_json(folder / "generation_config.json")
    return json.dumps([config, generation]).encode()


def model_dtype(config: Any, options: LoadOptions) -> torch.dtype:
    """The dtype that is asked for, else that of the checkpoint."""
    dtype = options.dtype
    if isinstance(dtype, str):
        dtype = None if dtype == "auto" else getattr(torch, dtype.removeprefix("torch."))
    return dtype or getattr(config, "dtype", None) or torch.float32


def build(kind: type[Any], config: Any, options: LoadOptions) -> Any:
    """The model with its weights on meta, in the dtypes it will have."""
    build_on = options.build_on or "meta"
    if build_on not in ("meta", "cpu"):
        raise PlanError(f'build_on={build_on!r}: a model is built on "meta" or on "cpu".')
    dtype = model_dtype(config, options)
    with model_building(kind), init_on_meta() if build_on == "meta" else torch.device(build_on):
        model = models.build(kind, config, dtype, **options.rest)
    wide = dtype_overrides(model, dtype)
    empty = {id(t): empty_like(t, t.shape, wide.get(name)) for name, t in named_tensors(model)}
    replace_tensors(model, empty)  # the buffers that no file holds stay as they were built
    return model


def empty_like(tensor: torch.Tensor, shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    empty = torch.empty(shape, dtype=dtype or tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def compute_buffers(model: Any, device: str) -> None:
    """Give the buffers that are in no checkpoint the values their module's code computes."""
    for name, module in model.named_modules():
        _, buffers = torch_private.own_tables(module)
        todo = [key for key in torch_private.unsaved_buffers(module) if buffers[key] is not None]
        for key in todo:
            if buffers[key].is_meta:
                buffers[key] = torch.full_like(buffers[key], _unset(buffers[key]), device=device)
            else:
                buffers[key] = buffers[key].to(device)
        if todo:
            owner = name
            while owner and not models.can_initialize(model.get_submodule(owner)):
                owner = owner.rpartition(".")[0]  # to the innermost model around it
            models.initialize(model.get_submodule(owner), module)
        for key in todo:
            if _is_unset(buffers[key]):
                buffers[key] = _constructed(module, key, device)
            if _is_unset(buffers[key]):
                raise DrumlineError(
                    f"the buffer {name}.{key} is in no checkpoint, and {type(model).__name__} "
                    'computes it in its constructor only; load with build_on="cpu".'
                )


def _constructed(module: nn.Module, key: str, device: str) -> torch.Tensor:
    """A buffer that the constructor computes, from one that is given the same config; as it is, if
    that is not how the module was made, or if it were made with more weights than are borne."""
    buffer: torch.Tensor = getattr(module, key)
    if sum(p.numel() for p in module.parameters()) > FEW:
        return buffer
    if set(inspect.signature(type(module)).parameters) - {"config", "device"}:
        return buffer  # made with more than the config, perhaps
    try:
        with torch.random.fork_rng(devices=[]):
            made = getattr(type(module)(getattr(module, "config", None)), key)
    except Exception:
        return buffer
    return buffer if made is None or made.shape != buffer.shape else made.to(device, buffer.dtype)


def _unset(buffer: torch.Tensor) -> Any:
    """A value that no module computes."""
    if buffer.is_floating_point() or buffer.is_complex():
        return math.nan
    return True if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).max


def _is_unset(buffer: torch.Tensor) -> bool:
    """Is every element still what it was filled with?"""
    if not buffer.numel():
        return False
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.isnan().any())
    return bool((buffer == _unset(buffer)).all())
