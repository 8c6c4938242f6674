"""The inputs of a plan of whole layers: the model's sizes, and the memory of every place.

inputs = collect_plan_inputs(coor, "checkpoint", options)     # the same answer on every rank
device_map = inputs.plan("auto")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from coordinator import Coordinator
from drumline.checkpoint.config_files import read_config, remote_class
from drumline.checkpoint.source import CheckpointFiles, choose_config, find_checkpoint
from drumline.core.consistency import check_same_on_all_ranks, run_on_all_ranks
from drumline.core.device_map import DeviceMap, ModelProfile, Place
from drumline.errors import CheckpointError, DrumlineError, PlanError
from drumline.planner import model_profile
from drumline.planner.cost_model import DeviceSpeeds, PassShape
from drumline.planner.load_options import LoadOptions
from drumline.planner.memory import cluster_memory, limit_memory
from drumline.planner.plan import plan
from drumline.weight_formats.dequantized import read_dequantized, without_quantization
from drumline.weight_formats.gguf_file import (
    find_gguf,
    gguf_path,
    read_gguf_config,
    read_gguf_weights,
)
from drumline.weight_formats.lora_adapter import LoraAdapter, find_adapter


@dataclass(frozen=True)
class PlanInputs:
    """A model's parts, cache included, and the free memory of every place that is to hold them."""

    source: CheckpointFiles
    adapter: LoraAdapter | None
    kind: type[Any]
    dtype: torch.dtype
    parts: ModelProfile
    free_nbytes: dict[Place, int]
    step: PassShape

    def plan(
        self, device_map: str | Mapping[str, Place | int], speeds: DeviceSpeeds | None = None
    ) -> DeviceMap:
        return plan(self.parts, self.free_nbytes, device_map, speeds=speeds, step=self.step)


def collect_plan_inputs(coor: Coordinator, path: str | Path, options: LoadOptions) -> PlanInputs:
    """Look at the checkpoint and at every rank's memory. Collective."""
    gguf = gguf_path(path, options.gguf_file)
    if gguf is not None:
        source = find_gguf(coor, gguf)
    else:
        source = find_checkpoint(coor, path, options.adapter, options.trust_remote_code)
    config = choose_config(source.config, options.config)
    source = replace(source, config=config, maps=not options.disable_mmap)
    adapter, source = find_adapter(coor, options.adapter, source)
    kind = run_on_all_ranks(coor, lambda: _model_class(source, options))
    dtype = checkpoint_dtype(options.dtype, source.config)
    if options.dequantize:
        check_same_on_all_ranks(coor, {"config": source.config.to_json_string()})
        source = run_on_all_ranks(coor, lambda: read_dequantized(source, dtype))
    model, parts = run_on_all_ranks(
        coor, lambda: model_on_meta(kind, source.config, dtype, options)
    )
    if gguf is not None:
        source = run_on_all_ranks(coor, lambda: read_gguf_weights(source, model, dtype))
    parts = model_profile.with_tokens(parts, source.config, dtype, options.batch, options.length)
    step = PassShape(options.batch, model_profile.hidden_width(source.config), dtype.itemsize)
    free_nbytes = limit_memory(cluster_memory(coor), options.max_memory)
    return PlanInputs(source, adapter, kind, dtype, parts, free_nbytes, step)


def model_on_meta(
    kind: type[Any], config: Any, dtype: torch.dtype, options: LoadOptions
) -> tuple[Any, ModelProfile]:
    """The model on meta, and its profile with the sizes that its weights have in memory."""
    if options.dequantize:
        config = without_quantization(config)
    quantization = options.rest.get("quantization_config")
    model, tensor_nbytes = model_profile.build_as_kept(kind, config, dtype, quantization)
    return model, model_profile.profile_model(model, tensor_nbytes=tensor_nbytes)


def _model_class(source: CheckpointFiles, options: LoadOptions) -> type[Any]:
    kind = options.cls or _stored_class(source.path, source.config, options)
    options.check_rest(kind)
    return kind


def _stored_class(path: Path, config: Any, options: LoadOptions) -> type[Any]:
    own = remote_class(path, config) if options.trust_remote_code else None
    return own or model_profile.model_class(config)


def describe_model(path: str | Path, options: LoadOptions) -> tuple[Any, type[Any]]:
    """The config and the class of a checkpoint, as `load` with these options reads them."""
    if file := gguf_path(path, options.gguf_file):
        config = read_gguf_config(file)
    else:
        config = read_config(path, options.adapter, options.trust_remote_code)
    return config, _stored_class(Path(path), config, options)


def checkpoint_dtype(dtype: torch.dtype | str | None, config: Any) -> torch.dtype:
    """The dtype that is asked for, else that of the checkpoint."""
    kind: type[DrumlineError] = PlanError
    source = ""
    if dtype in (None, "auto"):
        dtype = getattr(config, "dtype", None) or torch.float32
        kind, source = CheckpointError, "config.json has "
    resolved = getattr(torch, str(dtype).removeprefix("torch."), None)
    usual = resolved in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    if not isinstance(resolved, torch.dtype) or not usual:
        raise kind(
            f"{source}dtype={dtype!r} is none that the weights of a model can have, so nothing was "
            "loaded; give float32, bfloat16 or float16."
        )
    return resolved
