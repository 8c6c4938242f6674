"""A GGUF file as a checkpoint: each rank reads and dequantizes the tensors of its own layers.

source = find_gguf(coor, "model-Q4_K_M.gguf")
source = read_gguf_weights(source, model_on_meta, torch.float32)

The format is read by the library gguf, and tensors get their names and order by the tables of
transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from communicator import dtype_info
from coordinator import Coordinator
from drumline.checkpoint.headers.gguf_header import GgufHeader, import_gguf, read_gguf_header
from drumline.checkpoint.safetensors_index import (
    ComputedTensor,
    StoredTensor,
    TensorReader,
)
from drumline.checkpoint.source import CheckpointFiles, share_index
from drumline.contact.loading.configs import read_config
from drumline.contact.loading.gguf_tables import (
    names_by_stored,
    weight_processor,
)
from drumline.contact.releases import installed
from drumline.core.consistency import run_on_all_ranks
from drumline.core.shards import Region
from drumline.errors import CheckpointError, blamed_on_file

COMPUTED = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
    "attn_rot_embd.weight",
)
"""Tensors of tables that transformers computes from the config."""


@dataclass(frozen=True, kw_only=True)
class GgufTensor(StoredTensor):
    """The bytes of a tensor, and what numpy and the library make of them."""

    architecture: str
    kind: Any
    shape_of_elements: tuple[int, ...]
    array_shape: tuple[int, ...]
    array_dtype: str

    def read(self, reader: TensorReader) -> Any:
        gguf = import_gguf()
        stored = StoredTensor(self.file, self.offset, self.dtype, self.shape, self.written)
        array = reader.box(stored, Region((0,), self.shape)).numpy()
        return gguf.dequantize(array.view(self.array_dtype).reshape(self.array_shape), self.kind)


@dataclass(frozen=True, kw_only=True)
class GgufWeight(ComputedTensor):
    """A tensor of a transformers model, made of some of the file's as transformers makes it.

    parts: by their names in the file. names: of transformers, by those of the file.
    """

    name: str
    parts: dict[str, GgufTensor]
    processor: Any
    names: dict[str, str]

    def compute(self, reader: TensorReader, region: Region, out: torch.Tensor) -> None:
        key = f"{self.file} {self.name}"
        if key not in reader.computed:  # the boxes of a tensor follow each other
            reader.computed = {key: self._whole(reader)}
        out.copy_(reader.computed[key][region.slices()])

    def _whole(self, reader: TensorReader) -> torch.Tensor:
        tensors: dict[str, torch.Tensor] = {}
        for name in self.parts:
            result = self._processed(reader, name, tensors)
            if result.name in self.names:
                tensors[self.names[result.name]] = torch.from_numpy(numpy.copy(result.weights))
        if self.name not in tensors or tuple(tensors[self.name].shape) != self.shape:
            raise self._error(reader, "they have other shapes")
        return tensors[self.name]

    def _processed(self, reader: TensorReader, name: str, tensors: dict[str, torch.Tensor]) -> Any:
        """A part as transformers lays it out, which it may put into `tensors` by itself."""
        try:
            return self.processor.process(
                weights=self.parts[name].read(reader),
                name=name,
                tensor_key_mapping=self.names,
                parsed_parameters={"tensors": tensors},
            )
        except (ValueError, RuntimeError) as error:  # of numpy and torch, for shapes
            raise self._error(reader, error) from error

    def _error(self, reader: TensorReader, reason: object) -> CheckpointError:
        return CheckpointError(
            f"{reader.path}: {', '.join(self.parts)} make no {self.name} {list(self.shape)} "
            f"({reason}); give the model that the file was made from, or another version of gguf."
        )


def find_gguf(coor: Coordinator, file: Path) -> CheckpointFiles:
    """The file, which every rank must have, its index and its config. Collective."""
    header = run_on_all_ranks(coor, lambda: read_gguf_header(file))
    readers = range(coor.world_size)
    index = run_on_all_ranks(coor, lambda: _tensors(file, header))
    files, _ = share_index(coor, file, lambda: readers, read_index=lambda path: index)
    config = run_on_all_ranks(coor, lambda: _config(file))
    return replace(files, index=index, config=config)


def _tensors(file: Path, header: GgufHeader) -> dict[str, GgufTensor]:
    """The index of a file. Raises CheckpointError for a type that the library cannot dequantize."""
    gguf = import_gguf()
    index = {}
    for name, info in header.tensors.items():
        kind = gguf.GGMLQuantizationType(info.type)
        dtype = numpy.dtype({"F32": "float32", "F16": "float16"}.get(kind.name, "uint8"))
        index[name] = GgufTensor(
            file.name,
            info.offset,
            "U8",
            (info.nbytes,),
            header.written,
            architecture=header.architecture,
            kind=kind,
            shape_of_elements=info.shape,
            array_shape=(*info.shape[:-1], info.row_nbytes // dtype.itemsize),
            array_dtype=str(dtype),
        )
    for kind, name in {tensor.kind: name for name, tensor in index.items()}.items():
        _check_dequantizes(file, name, kind)
    return index


def _check_dequantizes(file: Path, name: str, kind: Any) -> None:
    gguf = import_gguf()
    _, nbytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(numpy.zeros((1, nbytes), numpy.uint8), kind)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{file}: {name} is of type {kind.name}, which the library gguf cannot make numbers "
            "of; give a file of another type, or install another version of gguf."
        ) from error


def read_gguf_config(file: Path) -> Any:
    """The config of the model in a GGUF file."""
    read_gguf_header(file)
    return _config(file)


def _config(file: Path) -> Any:
    """The config of a file whose header is known to be whole."""

    def describe(error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{file} describes no model that transformers {installed('transformers')} can make of "
            f"a GGUF file ({error}); give the checkpoint that it was made from."
        )

    with blamed_on_file(describe):
        return read_config(file.parent, gguf_file=file.name)


def read_gguf_weights(source: CheckpointFiles, model: Any, dtype: torch.dtype) -> CheckpointFiles:
    """The file as a checkpoint with the tensors of a model, which is on meta, in a dtype."""
    tensors: Any = source.index
    architecture = next(iter(tensors.values())).architecture
    processor = weight_processor(architecture, source.config.to_dict())
    names = _names(source.path, model, processor)
    state = model.state_dict()
    parts: dict[str, dict[str, GgufTensor]] = {}
    for name, tensor in tensors.items():
        target = names.get(name) or names.get(name.removesuffix(".weight"), "")
        if target in state:
            parts.setdefault(target, {})[name] = tensor
        elif not name.endswith(COMPUTED):
            raise CheckpointError(
                f"{source.path} holds {name}, for which {type(model).__name__} has no place, so "
                "the model would be another one; give the checkpoint that it was made from."
            )
    for name, own in parts.items():
        _check_shapes(source.path, name, tuple(state[name].shape), own)
    index = {}
    for name, own in parts.items():
        first = next(iter(own.values()))
        index[name] = GgufWeight(
            first.file,
            first.offset,
            str(dtype_info(dtype).safetensors),
            tuple(state[name].shape),
            name=name,
            parts=own,
            processor=processor,
            names=names,
        )
    return replace(source, index=index)


def _names(file: Path, model: Any, processor: Any) -> dict[str, str]:
    """The names of a model's tensors, by those that a GGUF file has for them."""
    try:
        return names_by_stored(model, processor)
    except NotImplementedError as error:  # the library has no table for this kind
        raise CheckpointError(
            f"{file}: the names of its tensors are unknown ({error}); give the checkpoint that it "
            "was made from."
        ) from error


def _check_shapes(
    file: Path, name: str, shape: tuple[int, ...], parts: Mapping[str, GgufTensor]
) -> None:
    """Raise unless the parts have as many elements as the tensor, one of them the same sizes."""
    shapes = {part: tensor.shape_of_elements for part, tensor in parts.items()}
    fits = sum(map(math.prod, shapes.values())) == math.prod(shape)
    if len(shapes) == 1:  # it may be transposed, or have a dimension of 1 less
        fits &= all(_sizes(part) == _sizes(shape) for part in shapes.values())
    if not fits:
        listed = ", ".join(f"{part} {list(sizes)}" for part, sizes in shapes.items())
        raise CheckpointError(
            f"{file} has {listed} where {name} {list(shape)} is made of it, so the model would be "
            "another one; give the file that belongs to its fields."
        )


def _sizes(shape: tuple[int, ...]) -> list[int]:
    return sorted(size for size in shape if size != 1)
