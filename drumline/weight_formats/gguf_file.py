"""A GGUF file as a checkpoint: each rank reads and dequantizes the tensors of its own layers.

source = find_gguf(coor, "model-Q4_K_M.gguf")
source = read_gguf_weights(source, model_on_meta, torch.float32)

The format is read by the library gguf, and tensors get their names and order by the tables of
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from transformers import modeling_gguf_pytorch_utils as transformers_gguf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from communicator import dtype_info
from coordinator import Coordinator
from drumline.checkpoint.json_files import check_regular_file
from drumline.checkpoint.safetensors_index import (
    ComputedTensor,
    StoredTensor,
    TensorReader,
    file_state,
)
from drumline.checkpoint.source import CheckpointFiles, share_index
from drumline.core.consistency import run_on_all_ranks
from drumline.core.shards import Region
from drumline.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class GgufTensor(StoredTensor):
    """The bytes of a tensor, and what numpy and the library make of them."""

    architecture: str
    kind: Any
    array_shape: tuple[int, ...]
    array_dtype: str

    def read(self, reader: TensorReader) -> Any:
        import gguf

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
        for name, part in self.parts.items():
            result = self.processor.process(
                weights=part.read(reader),
                name=name,
                tensor_key_mapping=self.names,
                parsed_parameters={"tensors": tensors},
            )
            if result.name in self.names:
                tensors[self.names[result.name]] = torch.from_numpy(numpy.copy(result.weights))
        if self.name not in tensors or tuple(tensors[self.name].shape) != self.shape:
            raise CheckpointError(
                f"{reader.path}: {', '.join(self.parts)} make no {self.name} {list(self.shape)}; "
                "give the model that the file was made from, or another version of gguf."
            )
        return tensors[self.name]


def gguf_path(path: str | Path, name: str | None) -> Path | None:
    """The GGUF file that is meant by a path, or by its name in a folder; None if none is."""
    if name is not None:
        return Path(path, name)
    return Path(path) if Path(path).suffix == ".gguf" else None


def find_gguf(coor: Coordinator, file: Path) -> CheckpointFiles:
    """The file, which every rank must have, its index and its config. Collective."""
    _, index = run_on_all_ranks(coor, lambda: (_library(), dict(_tensors(file))))
    readers = range(coor.world_size)
    files, _ = share_index(coor, file, lambda: readers, read_index=lambda path: index)
    config = run_on_all_ranks(coor, lambda: read_gguf_config(file))
    return replace(files, index=index, config=config)


def _library() -> Any:
    try:
        import gguf
    except ImportError as missing:
        raise CheckpointError(
            'GGUF files are read by the library gguf, which is not installed ("pip install gguf").'
        ) from missing
    return gguf


def _tensors(file: Path) -> Iterator[tuple[str, GgufTensor]]:
    try:
        check_regular_file(file)
        written = file_state(file)
        reader = _library().GGUFReader(file)
        (architecture,) = transformers_gguf.read_field(reader, "general.architecture")
        for tensor in reader.tensors:
            array = tensor.data
            yield (
                str(tensor.name),
                GgufTensor(
                    file.name,
                    int(tensor.data_offset),
                    "U8",
                    (int(tensor.n_bytes),),
                    written,
                    architecture=architecture,
                    kind=tensor.tensor_type,
                    array_shape=tuple(map(int, array.shape)),
                    array_dtype=str(array.dtype),
                ),
            )
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise CheckpointError(
            f"{file} is no whole GGUF file ({error}), so what it holds is unknown; copy it again."
        ) from error


def read_gguf_config(file: Path) -> Any:
    """The config of the model in a GGUF file."""
    _library()
    try:
        config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        if not config.architectures:
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        return config
    except Exception as error:  # each architecture is read in a way of its own
        raise CheckpointError(
            f"{file} describes no model that transformers {transformers.__version__} can make of "
            f"a GGUF file ({error}); give the checkpoint that it was made from."
        ) from error


def read_gguf_weights(source: CheckpointFiles, model: Any, dtype: torch.dtype) -> CheckpointFiles:
    """The file as a checkpoint with the tensors of a model, which is on meta, in a dtype."""
    tensors: Any = source.index
    architecture = next(iter(tensors.values())).architecture
    kind = transformers_gguf.TENSOR_PROCESSORS.get(architecture, transformers_gguf.TensorProcessor)
    processor = kind(config=source.config.to_dict())
    names = transformers_gguf.get_gguf_hf_weights_map(model, processor)
    state = model.state_dict()
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        target = names.get(name) or names.get(name.removesuffix(".weight"))
        if target in state:
            parts.setdefault(target, {})[name] = tensor
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
