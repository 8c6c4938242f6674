"""One rank's model: empty for its weights to be streamed in, or read by transformers itself.

Keys are renamed, split and fused by transformers' own tables (a loader that matched key prefixes
would be wrong for the experts of Mixtral, for one). Where those only say where a tensor lies, the
model is made empty here and filled block by block; where they compute, transformers reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from drumline.checkpoint.model_tensors import named_tensors
from drumline.checkpoint.safetensors_index import Index
from drumline.checkpoint.shard_plan import fills_exactly
from drumline.checkpoint.weight_map import WeightMap, map_weights
from drumline.contact.loading.weights import build_unfilled, load_placed, place_buffers
from drumline.contact.safetensors_api import open_tensors
from drumline.core.meta_init import model_building
from drumline.errors import CheckpointError


def empty_model(
    cls: type[Any],
    path: str | Path,
    config: Any,
    index: Index,
    places: Mapping[str, str],
    dtype: torch.dtype,
    warns: bool = True,
    **options: Any,
) -> tuple[Any, WeightMap]:
    """A model with its weights on meta, and the stored tensors that each of them is made of.

    Tied weights are tied, and the buffers that modules compute are real where `places` has a device
    for them. Raises NotStreamable for a model whose weights cannot be streamed, and CheckpointError
    for tensors that are missing or of another shape or kind.

    warns: let transformers report tensors that the model has no place for.
    """
    weight_maps: list[WeightMap] = []

    def match(model: Any) -> tuple[Iterable[str], Iterable[str]]:
        weight_maps.append(map_weights(model, index))
        _refuse_mismatches(path, dict(named_tensors(model)), weight_maps[0], index)
        return weight_maps[0].missing, weight_maps[0].surplus if warns else ()

    with model_building(cls, _description(path)):
        model, report = build_unfilled(cls, config, dtype, match, **options)
        place_buffers(model, places)
    _check(path, report, index)
    return model, weight_maps[0]


def _description(path: str | Path) -> Path:
    """The file that says what the model of a checkpoint is."""
    return Path(path) if os.path.isfile(path) else Path(path, "config.json")


def load_shard(
    cls: type[Any],
    path: str | Path,
    index: Index,
    places: Mapping[str, str],
    dtype: torch.dtype,
    maps: bool = True,
    warns: bool = True,
    **options: Any,
) -> Any:
    """A model with the modules in `places` loaded on their devices, and all others on meta.

    Read by transformers: what it converts is in memory twice for a while. maps: as in
    CheckpointFiles. warns: as in empty_model.
    """
    stored = open_tensors({name: Path(path, tensor.file) for name, tensor in index.items()}, maps)
    with model_building(cls, _description(path)):
        model, report = load_placed(cls, path, stored, places, dtype, warns, **options)
        stored.clear()  # a class of transformers' models keeps what loads it, and the files open
        place_buffers(model, places)
    _check(path, report, index)
    if hasattr(model, "ct_decompress_hook"):
        _decompress(model)
    return model


def _decompress(model: Any) -> None:
    """Do what compressed-tensors does in the first pass of a whole model, to what is here."""
    from compressed_tensors.compressors import decompress_module

    for module in model.modules():
        if not any(tensor.is_meta for tensor in module.parameters(recurse=False)):
            decompress_module(module)
    model.hf_quantizer.compressor.remove_decompression_hook(model)


def _refuse_mismatches(
    path: str | Path, state: Mapping[str, torch.Tensor], weight_map: WeightMap, index: Index
) -> None:
    """Raise for tensors of another shape, and for numbers in place of whole ones or the reverse."""
    wrong = [
        f"{slice_.key} in {stored.file} is {stored.dtype} {list(stored.shape)} where {name} is "
        f"{str(state[name].dtype).removeprefix('torch.')} {list(state[name].shape)}"
        for name, slices in weight_map.slices.items()
        for slice_, stored in [(slice_, index[slice_.key]) for slice_ in slices]
        if not fills_exactly(slices, state[name].shape)
        or stored.torch_dtype.is_floating_point != state[name].dtype.is_floating_point
    ]
    if wrong:
        raise _other_model(path, len(wrong), "mismatched", "; ".join(wrong[:3]))


def _check(path: str | Path, report: Mapping[str, Any], index: Index) -> None:
    """Raise unless the checkpoint has the tensors of the model."""
    for kind in ("missing", "mismatched"):
        keys = [key if isinstance(key, str) else key[0] for key in report[f"{kind}_keys"] or ()]
        if keys:
            stored_keys = [(key, index.get(key)) for key in sorted(keys)[:5]]
            places = [f"{key} in {stored.file}" if stored else key for key, stored in stored_keys]
            endings = tuple(f".{key}" for key, _ in stored_keys)
            longer = [name for name in index if kind == "missing" and name.endswith(endings)]
            places += [f"but there is {name}" for name in longer[:1]]
            raise _other_model(path, len(keys), kind, ", ".join(places))


def _other_model(path: str | Path, count: int, kind: str, places: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {count} tensors are {kind} ({places}), so the model would not be the one that "
        "was saved; give the checkpoint that belongs to its config.json."
    )
