"""The inputs of a plan of whole layers: the model's sizes, and the memory of every place.

inputs = collect_plan_inputs(coor, "checkpoint", options)     # the same answer on every rank
device_map = inputs.plan("auto")
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from coordinator import Coordinator
from drumline.checkpoint.json_files import gguf_path
from drumline.checkpoint.safetensors_index import ComputedTensor, Index
from drumline.checkpoint.source import Checkpoint, CheckpointFiles
from drumline.checkpoint.weight_map import WeightMap, map_weights, stored_ties
from drumline.contact.loading.configs import (
    attention_of,
    with_implementations,
    without_quantization,
)
from drumline.core.consistency import run_on_all_ranks
from drumline.core.device_map import DeviceMap, ModelProfile, Place, offload_level
from drumline.errors import CheckpointError
from drumline.pipeline import microbatch
from drumline.planner import model_profile
from drumline.planner.cost_model import DeviceSpeeds, PassShape
from drumline.planner.load_options import LoadOptions
from drumline.planner.memory import allowed_memory
from drumline.planner.outside_reads import read_outside
from drumline.planner.plan import plan
from drumline.planner.token_memory import (
    TokenMemory,
    shared_token_memory,
    token_memory,
    with_tokens,
)
from drumline.strategies.opening import open_checkpoint, weight_format

BITS_OF_A_BYTE = 8


@dataclass(frozen=True)
class PlanInputs:
    """A model's parts, cache included, and the free memory of every place that is to hold them."""

    checkpoint: Checkpoint
    parts: ModelProfile
    free_nbytes: dict[Place, int]
    step: PassShape

    def plan(
        self, device_map: str | Mapping[str, Place | int], speeds: DeviceSpeeds | None = None
    ) -> DeviceMap:
        """The device map, in which what the model reads or changes by itself stays on rank 0."""
        make = functools.partial(
            plan, free_nbytes=self.free_nbytes, device_map=device_map, speeds=speeds, step=self.step
        )
        planned, parts, checkpoint = make(self.parts), self.parts, self.checkpoint
        if all(planned.places[part.name][0] == 0 for part in parts.others):
            return planned
        names = read_outside(checkpoint.kind, checkpoint.config, checkpoint.dtype, parts)
        if not names:
            return planned
        layers = tuple(part for part in parts.layers if part.name not in names)
        changed = (part for part in parts.layers if part.name in names)
        others, root_tensors = (*parts.others, *changed), (*parts.root_tensors, *names)
        return make(replace(parts, layers=layers, others=others, root_tensors=root_tensors))


def collect_plan_inputs(coor: Coordinator, path: str | Path, options: LoadOptions) -> PlanInputs:
    """Look at the checkpoint and at every rank's memory. Collective."""
    checkpoint = open_checkpoint(coor, path, options)
    dtype = checkpoint.dtype
    files, model, parts = run_on_all_ranks(coor, lambda: sized_model(checkpoint, options))
    checkpoint = replace(checkpoint, files=files)
    _check_is_stored(checkpoint, model)
    implementations, free_nbytes = dict(options.rest), allowed_memory(coor, options.max_memory)
    whole_on = where_prompts_are_whole(checkpoint.config, options, free_nbytes, coor.world_size)
    if not (whole_on or options.pass_tokens):
        # Of the scores of a prompt in chunks no attention has many at once.
        implementations["attn_implementation"] = attention_of(checkpoint.config)
    config = with_implementations(checkpoint.config, implementations)

    def measure() -> TokenMemory:
        sizes = dtype, parts, options.pass_batch, options.length, whole_on
        memory = token_memory(checkpoint.kind, config, *sizes)
        # Some kernels do not run without values; what they keep is what others keep.
        return token_memory(checkpoint.kind, checkpoint.config, *sizes) if memory.error else memory

    memory = shared_token_memory(coor, checkpoint.kind, measure)
    memory = memory.of_batch(options.batch, options.pass_batch)
    parts = with_tokens(parts, memory)
    step = PassShape(options.batch, model_profile.hidden_width(config), dtype.itemsize)
    return PlanInputs(checkpoint, parts, free_nbytes, step)


def where_prompts_are_whole(
    config: Any, options: LoadOptions, places: Collection[Place], num_stages: int
) -> str:
    """The kind of device on which a prompt is one pass, the CPU if it is for any of the stages;
    none where a prompt is several passes over parts of it."""
    devices = {device for _, device in places}
    scale = 1 if devices == {"cpu"} else microbatch.ACCELERATED
    is_chunked = "disk" not in devices and microbatch.is_chunked(
        config, options.length, num_stages, scale
    )
    if is_chunked or options.pass_tokens:
        return ""
    running = {place[1] for place in places if not offload_level(place, places)}
    return "cpu" if "cpu" in running else "accelerator"


def _check_is_stored(checkpoint: Checkpoint, model: Any) -> None:
    """Raise CheckpointError for a model of more parameters than its files have bits."""
    files = checkpoint.files
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    nbytes = sum(stored.nbytes for stored in files.index.values())
    if num_parameters > BITS_OF_A_BYTE * nbytes:
        raise CheckpointError(
            f"{files.path}/config.json describes a model of {num_parameters} parameters, and the "
            f"files hold {nbytes} bytes, less than a bit for each. Take the config.json that was "
            "saved with these files."
        )


def sized_model(
    checkpoint: Checkpoint, options: LoadOptions
) -> tuple[CheckpointFiles, Any, ModelProfile]:
    """The files with the tensors of the model, it on meta, and the sizes that it has in memory."""
    config, dtype, files = checkpoint.config, checkpoint.dtype, checkpoint.files
    if options.dequantize:
        config = without_quantization(config)
    quantization = options.rest.get("quantization_config")
    model, tensor_nbytes = model_profile.build_as_kept(checkpoint.kind, config, dtype, quantization)
    if options.gguf_file or gguf_path(files.path, None):
        files = weight_format("gguf_file").read_gguf_weights(files, model, dtype)
    if has_computed(files.index):
        keep_packed(model, map_weights(model, files.index), files, dtype, options)
    stored = stored_ties(model, files.index)
    classes = options.no_split_module_classes
    parts = model_profile.profile_model(model, classes, None, tensor_nbytes, stored)
    return files, model, parts


def keep_packed(
    model: Any,
    weight_map: WeightMap,
    files: CheckpointFiles,
    dtype: torch.dtype,
    options: LoadOptions,
) -> tuple[WeightMap, CheckpointFiles]:
    """Let an empty model keep quantized weights as they are, unless dequantize=True says not to."""
    if options.dequantize or not has_computed(files.index):
        return weight_map, files
    packed: tuple[WeightMap, CheckpointFiles] = weight_format("packed_weights").keep_packed(
        model, weight_map, files, dtype
    )
    return packed


def has_computed(index: Index) -> bool:
    return any(isinstance(stored, ComputedTensor) for stored in index.values())
