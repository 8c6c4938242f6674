"""Weights that stay as a checkpoint has them, in blocks of few bits, and are unpacked by each call.

weight_map, files = keep_packed(model, weight_map, files)     # the model is on meta

What a rank reads, gets from another one and keeps are the stored tensors themselves; the weight
is computed from them as it would be while it is read, so that its values are the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from drumline.checkpoint.model_tensors import named_tensors, replace_tensors, tied_names
from drumline.checkpoint.safetensors_index import ComputedTensor, Index, StoredTensor, TensorReader
from drumline.checkpoint.shard_plan import SourceSlice, parts_of, read_slices, whole_tensor
from drumline.checkpoint.source import CheckpointFiles
from drumline.checkpoint.weight_map import WeightMap, dtype_overrides
from drumline.contact.loading.models import run_experts_singly
from drumline.core.packed_tensor import PART_MARK, PackedTensor, Parts
from drumline.core.shards import Region, split_into_blocks

BLOCK_ELEMENTS = 1 << 18
"""As many are computed at a time: the steps on the way to them stay in the caches of a CPU."""


class KeptReader(TensorReader):
    """Reads boxes of tensors that are kept in memory, as those of files are read."""

    def __init__(self, kept: Mapping[tuple[str, int], torch.Tensor]):
        super().__init__("")
        self._kept = kept

    def read(self, stored: StoredTensor, region: Region, out: torch.Tensor) -> None:
        if isinstance(stored, ComputedTensor):
            stored.compute(self, region, out)
        else:
            out.copy_(self.box(stored, region))

    def box(self, stored: StoredTensor, region: Region) -> torch.Tensor:
        """A view, where the tensor is a stored one."""
        if isinstance(stored, ComputedTensor):
            return super().box(stored, region)
        return self._kept[_place(stored)].view(stored.shape)[region.slices()]


def _place(stored: StoredTensor) -> tuple[str, int]:
    return stored.file, stored.offset


@dataclass(frozen=True)
class Unpacking:
    """The computation of a weight from its parts: the one by which it is read from files.

    slices, index: what it is made of. stored: the parts.
    """

    slices: Sequence[SourceSlice]
    index: Index
    stored: Mapping[str, StoredTensor]

    def _reader(self, parts: Parts) -> KeptReader:
        return KeptReader({_place(self.stored[key]): part for key, part in parts.items()})

    def multiply(
        self, parts: Parts, inputs: torch.Tensor, entry: int | None
    ) -> torch.Tensor | None:
        """inputs @ weight.T, or with one entry of a stack; None if it is made in another way."""
        rows = [piece for piece in self.slices if not piece.lead or piece.at.start[0] == entry]
        rows.sort(key=lambda piece: piece.at.start[-2])
        if not self.is_native or not all(self._has_whole_rows(piece, inputs) for piece in rows):
            return None
        reader = self._reader(parts)
        weights = [(self.index[piece.key], piece.lead) for piece in rows]
        products = [
            weight.multiply(reader, inputs, None if lead else entry)
            for weight, lead in weights
            if isinstance(weight, ComputedTensor)
        ]
        return products[0] if len(products) == 1 else torch.cat(products, 1)

    @property
    def is_native(self) -> bool:
        weights = (self.index[piece.key] for piece in self.slices)
        return all(isinstance(weight, ComputedTensor) and weight.is_native for weight in weights)

    def _has_whole_rows(self, piece: SourceSlice, inputs: torch.Tensor) -> bool:
        size = piece.at.size
        is_whole = self.index[piece.key].shape == size[piece.lead :]
        return is_whole and piece.lead <= 1 and size[-1] == inputs.shape[1]

    def __call__(self, parts: Parts, region: Region) -> torch.Tensor:
        reader, device = self._reader(parts), next(iter(parts.values())).device
        step = region.numel if self.is_native and device.type == "cpu" else BLOCK_ELEMENTS
        with torch.device(device):
            out = torch.empty(region.size, dtype=self.index[self.slices[0].key].torch_dtype)
            for block in split_into_blocks(region.size, step):
                at = block.moved((0,) * len(region.start), region.start)
                read_slices(reader, self.index, self.slices, at, out[block.slices()])
        return out


def keep_packed(
    model: nn.Module, weight_map: WeightMap, files: CheckpointFiles, dtype: torch.dtype
) -> tuple[WeightMap, CheckpointFiles]:
    """Put packed tensors into a model on meta, in the place of weights that would take more memory.

    Returns where their parts are read from.
    """
    slices, index = dict(weight_map.slices), dict(files.index)
    tensors, wide = dict(named_tensors(model)), dtype_overrides(model, dtype)
    new: dict[int, Any] = {}
    for first, names in tied_names(model).items():
        pieces = next((slices[name] for name in names if name in slices), ())
        distinct = {_place(part): part for part in parts_of(pieces, files.index)}.values()
        parts = {str(number): part for number, part in enumerate(distinct)}
        weight, own = tensors[first], {piece.key: files.index[piece.key] for piece in pieces}
        if not parts or not _is_worth_it(weight, own.values(), parts.values()):
            continue
        empty = {
            k: torch.empty(p.shape, dtype=p.torch_dtype, device="meta") for k, p in parts.items()
        }
        packed: Any = PackedTensor.of(
            empty, Unpacking(pieces, own, parts), weight.shape, wide.get(first, weight.dtype)
        )
        new[id(weight)] = nn.Parameter(packed, requires_grad=False)
        for key, part in parts.items():
            stored_as = f"{first}{PART_MARK}{key}"
            index[stored_as] = part
            slices |= {
                f"{name}{PART_MARK}{key}": whole_tensor(stored_as, part.shape) for name in names
            }
        for name in names:
            slices.pop(name, None)
    replace_tensors(model, new)
    if any(weight.dim() == 3 for weight in new.values()):
        run_experts_singly(model)
    return replace(weight_map, slices=slices), replace(files, index=index)


def _is_worth_it(
    weight: torch.Tensor, pieces: Collection[StoredTensor], parts: Collection[StoredTensor]
) -> bool:
    """True for a matrix that is all of its pieces, and takes less memory as its parts."""
    num_elements = sum(math.prod(piece.shape) for piece in pieces)
    is_smaller = sum(part.nbytes for part in parts) < weight.nbytes
    return weight.dim() > 1 and num_elements == weight.numel() and is_smaller
