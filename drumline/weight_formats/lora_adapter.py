"""A LoRA adapter, merged into each weight while that is read: W + B A alpha/r.

adapter = find_adapter(coor, "adapter", readers)              # as peft saves it
pieces, index = adapter.merged(model, pieces, files.index, dtype)

Low-Rank Adaptation: arXiv 2106.09685, equation 3. The sums are those of peft's merge.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from communicator import dtype_info
from coordinator import Coordinator
from drumline.checkpoint.json_files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    MERGE_ADAPTER,
    read_json,
)
from drumline.checkpoint.model_tensors import WeightSources, tied_names
from drumline.checkpoint.safetensors_index import ComputedTensor, Index, StoredTensor, TensorReader
from drumline.checkpoint.shard_plan import SourceSlice, whole_tensor
from drumline.checkpoint.source import CheckpointFiles, share_index
from drumline.core.shards import Region
from drumline.errors import CheckpointError

PREFIX = "base_model.model."
FACTORS = re.compile(r"(.*)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
UNSUPPORTED = (
    "use_dora",
    "alora_invocation_tokens",
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "use_qalora",
    "arrow_config",
)
"""Fields of adapter_config.json that change what a weight becomes, or which there are."""


@dataclass(frozen=True, kw_only=True)
class MergedWeight(ComputedTensor):
    """A weight with its low-rank update. factors: B and A, which lie in the adapter's file.

    is_transposed: whether the product is, as where a layer multiplies from the right.
    """

    base: tuple[SourceSlice, ...]
    index: Index
    factors: tuple[StoredTensor, StoredTensor]
    scaling: float
    is_transposed: bool

    def compute(self, reader: TensorReader, region: Region, out: torch.Tensor) -> None:
        for slice_ in self.base:
            if common := region.overlap(slice_.at):
                stored = self.index[slice_.key]
                at = common.moved(region.start, (0,) * len(region.start)).slices()
                out[at] = reader.box(stored, slice_.in_file(common)).view(common.size)
        rows, columns = zip(region.start, region.size, strict=True)
        if self.is_transposed:
            rows, columns = columns, rows
        b, a = self.factors
        b_box = Region((rows[0], 0), (rows[1], b.shape[1]))
        a_box = Region((0, columns[0]), (a.shape[0], columns[1]))
        update = reader.box(b, b_box).float() @ reader.box(a, a_box).float()
        out += (update.T if self.is_transposed else update) * self.scaling


@dataclass(frozen=True)
class LoraAdapter:
    """The file and the settings of an adapter, as all ranks know them."""

    files: CheckpointFiles
    settings: Mapping[str, Any]

    def merged(
        self, model: nn.Module, sources: WeightSources, index: Index, dtype: torch.dtype
    ) -> tuple[dict[str, tuple[SourceSlice, ...]], dict[str, StoredTensor]]:
        """The pieces of the model's tensors, and the index that they refer to, with the adapter.

        dtype: of the model. Raises CheckpointError for what has no place in the model, or is no
        update of one weight.
        """
        pieces, extended = dict(sources), dict(index)
        tied = {name: names for names in tied_names(model).values() for name in names}
        factors: dict[str, dict[str, StoredTensor]] = {}
        for key, stored in self.files.index.items():
            inside = replace(stored, file=str(self.files.path.resolve()))
            name = key.removeprefix(PREFIX)
            if match := FACTORS.fullmatch(name):
                factors.setdefault(f"{match[1]}.weight", {})[match[2]] = inside
            else:  # trained as it is, and saved whole
                extended[key], pieces[name] = inside, whole_tensor(key, stored.shape)
        for name in [*factors, *(pieces.keys() - sources.keys())]:
            if name not in sources:
                raise self._error(f"has {name}, for which the model has no place")
        for name in [
            name for name in pieces if pieces[name] is not sources[name] or name in factors
        ]:
            if len(tied[name]) > 1:
                raise self._error(f"changes one of {tied[name]}, which are tied")
        for name, pair in factors.items():
            weight = self._merged_weight(model, name, pair, sources[name], index)
            key = f"{name} with its adapter"
            extended[key] = replace(weight, dtype=str(dtype_info(dtype).safetensors))
            pieces[name] = whole_tensor(key, weight.shape)
        return pieces, extended

    def _merged_weight(
        self,
        model: nn.Module,
        name: str,
        pair: Mapping[str, StoredTensor],
        base: tuple[SourceSlice, ...],
        index: Index,
    ) -> MergedWeight:
        module_name = name.removesuffix(".weight")
        module = model.get_submodule(module_name)
        shape = tuple(model.get_parameter(name).shape)
        # transformers' Conv1D multiplies from the right; so does an embedding, for peft.
        is_transposed = type(module).__name__ == "Conv1D" or isinstance(module, nn.Embedding)
        b, a = pair.get("B"), pair.get("A")
        product = (*b.shape[:-1], *a.shape[1:]) if a and b else ()
        if not a or not b or product != (shape[::-1] if is_transposed else shape):
            raise self._error(f"has no A and B whose product is an update of {name} {list(shape)}")
        first = index[base[0].key]
        return MergedWeight(
            first.file,
            first.offset,
            first.dtype,
            shape,
            base=base,
            index=index,
            factors=(b, a),
            scaling=self._scaling(module_name, a.shape[0]),
            is_transposed=is_transposed,
        )

    def _scaling(self, module: str, r: int) -> float:
        """alpha/r, or alpha/sqrt(r) of rsLoRA (arXiv 2312.03732)."""
        by_module: Mapping[str, float] = self.settings.get("alpha_pattern") or {}
        patterns = [p for p in by_module if re.fullmatch(rf"(.*\.)?({p})", module)]
        alpha = by_module[patterns[0]] if patterns else self.settings.get("lora_alpha", 8)
        return float(alpha) / (math.sqrt(r) if self.settings.get("use_rslora") else r)

    def check_settings(self) -> None:
        """Raise CheckpointError for an adapter that is more than low-rank updates of weights."""
        kind = self.settings.get("peft_type")
        surplus = [name for name in UNSUPPORTED if self.settings.get(name)]
        if kind != "LORA" or surplus:
            raise self._error(f"is an adapter of the kind {' '.join([str(kind), *surplus])}")

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.files.path} {problem}, so it cannot be merged while the weights are read; "
            f"{MERGE_ADAPTER}."
        )


def find_adapter(
    coor: Coordinator, path: str | Path | None, base: CheckpointFiles
) -> tuple[LoraAdapter | None, CheckpointFiles]:
    """The adapter in a folder, and the checkpoint that it belongs to. Collective.

    It is the same on all ranks that read: both are compared, as long as the model is in use.
    """
    if path is None:
        return None, base
    folder = Path(path)
    files, text = share_index(
        coor,
        folder / ADAPTER_FILE,
        lambda: base.readers,
        lambda: json.dumps(read_json(folder / ADAPTER_CONFIG)),
    )
    adapter = LoraAdapter(files, json.loads(text))
    adapter.check_settings()
    return adapter, replace(base, copy_checks=(*base.copy_checks, *files.copy_checks))
