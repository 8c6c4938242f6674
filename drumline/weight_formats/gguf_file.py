"""A GGUF file as a checkpoint: each rank reads the tensors of its own layers.

source = find_gguf(coor, "model-Q4_K_M.gguf")
source = read_gguf_weights(source, model_on_meta, torch.float32)

The library gguf makes numbers of blocks, and tensors get their names and order by the tables of
transformers.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from communicator import dtype_info
from coordinator import Coordinator
from drumline.checkpoint.headers.gguf_header import GgufHeader, import_gguf, read_gguf_header
from drumline.checkpoint.safetensors_index import ComputedTensor, Index, StoredTensor, TensorReader
from drumline.checkpoint.source import CheckpointFiles, config_from_json, share_index
from drumline.contact.loading.configs import config_of_gguf
from drumline.contact.loading.gguf_tables import names_by_stored, weight_processor
from drumline.contact.releases import installed
from drumline.core.consistency import run_on_all_ranks
from drumline.core.shards import Region
from drumline.errors import CheckpointError, blamed_on_file
from drumline.weight_formats.gguf_blocks import dequantized
from drumline.weight_formats.native_unpack import KINDS, OUT_DTYPES, can_unpack, unpack_rows

log = logging.getLogger("drumline")

COMPUTED = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
    "attn_rot_embd.weight",
)
"""Tensors in whose place transformers computes tables from the config."""


@dataclass(frozen=True, kw_only=True)
class GgufTensor(StoredTensor):
    """The bytes of a tensor, [rows, bytes of a row], and what the library makes of them."""

    architecture: str
    kind: Any
    shape_of_elements: tuple[int, ...]

    @property
    def is_quantized(self) -> bool:
        return self.kind.name not in ("F32", "F16", "BF16", "F64")

    def blocks(
        self, reader: TensorReader, numbers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of bytes from the first of some numbers to the last, and their places there."""
        first, end = int(numbers.min()), int(numbers.max()) + 1
        box = Region((first, 0), (end - first, self.shape[1]))
        return reader.box(self, box), numbers - first

    def fill(
        self, reader: TensorReader, numbers: torch.Tensor, columns: slice, out: torch.Tensor
    ) -> None:
        """Make numbers of some columns of some rows."""
        blocks, places = self.blocks(reader, numbers)
        name, is_whole = self.kind.name, out.shape[1] == self.shape_of_elements[-1]
        if is_whole and name in KINDS and can_unpack(out):
            unpack_rows(name, blocks, places, out)
        else:
            out.copy_(dequantized(blocks[places], name)[:, columns])

    def read(self, reader: TensorReader) -> Any:
        rows = torch.empty(self.shape[0], self.shape_of_elements[-1], dtype=torch.float32)
        self.fill(reader, torch.arange(self.shape[0]), slice(None), rows)
        return rows.view(self.shape_of_elements).numpy()


@dataclass(frozen=True, kw_only=True)
class GgufRows(ComputedTensor):
    """A tensor of a transformers model whose rows are those of tensors of the file.

    order: for each row of the model, in turn, its number among those of all tensors together.
    """

    tensors: Sequence[GgufTensor]
    order: torch.Tensor = field(compare=False)

    @property
    def parts(self) -> Sequence[StoredTensor]:
        return self.tensors if any(tensor.is_quantized for tensor in self.tensors) else ()

    def compute(self, reader: TensorReader, region: Region, out: torch.Tensor) -> None:
        *at, columns = region.slices()
        numbers = self.order.view(self.shape[:-1])[tuple(at)].flatten()
        rows = out.view(len(numbers), -1)
        for tensor, own, is_here in self._shares(numbers):
            part = rows if is_here is None else rows.new_empty(len(own), rows.shape[1])
            tensor.fill(reader, own, columns, part)
            if is_here is not None:
                rows[is_here] = part

    @property
    def is_native(self) -> bool:
        kinds = {tensor.kind.name for tensor in self.tensors}
        return self.torch_dtype in OUT_DTYPES and kinds <= KINDS.keys()

    def multiply(
        self, reader: TensorReader, inputs: torch.Tensor, entry: int | None
    ) -> torch.Tensor:
        order = self.order.view(self.shape[:-1])
        numbers = order if entry is None else order[entry]
        product = inputs.new_empty(len(inputs), len(numbers))
        for tensor, own, is_here in self._shares(numbers):
            part = product if is_here is None else inputs.new_empty(len(inputs), len(own))
            blocks, places = tensor.blocks(reader, own)
            unpack_rows(tensor.kind.name, blocks, places, part, inputs, self.torch_dtype)
            if is_here is not None:
                product[:, is_here] = part
        return product

    def _shares(
        self, numbers: torch.Tensor
    ) -> Iterator[tuple[GgufTensor, torch.Tensor, torch.Tensor | None]]:
        """Each tensor with some of the rows: their numbers there, and which they are if not all."""
        first = 0
        for tensor in self.tensors:
            is_here = (numbers >= first) & (numbers < first + tensor.shape[0])
            if is_here.all():
                yield tensor, numbers - first, None
            elif is_here.any():
                yield tensor, numbers[is_here] - first, is_here
            first += tensor.shape[0]


@dataclass(frozen=True, kw_only=True)
class GgufWeight(ComputedTensor):
    """A tensor of a transformers model, made of some of the file's as transformers makes it.

    tensors: by their names in the file. names: of transformers, by those of the file.
    """

    name: str
    tensors: Mapping[str, GgufTensor]
    processor: Any
    names: dict[str, str]

    def compute(self, reader: TensorReader, region: Region, out: torch.Tensor) -> None:
        key = f"{self.file} {self.name}"
        if key not in reader.computed:  # the boxes of a tensor follow each other
            reader.computed = {key: self._whole(reader)}
        out.copy_(reader.computed[key][region.slices()])

    def _whole(self, reader: TensorReader) -> torch.Tensor:
        try:
            tensor = self._processed({n: part.read(reader) for n, part in self.tensors.items()})
        except (ValueError, RuntimeError) as error:  # of numpy and torch, for shapes
            raise self._error(reader, error) from error
        if tensor is None or tuple(tensor.shape) != self.shape:
            raise self._error(reader, "they have other shapes")
        return tensor

    def _processed(self, arrays: dict[str, Any]) -> torch.Tensor | None:
        """The tensor that transformers makes of arrays in the place of the parts."""
        made: dict[str, torch.Tensor] = {}
        for name, array in arrays.items():
            result = self.processor.process(
                weights=array,
                name=name,
                tensor_key_mapping=self.names,
                parsed_parameters={"tensors": made},
            )
            if result.name in self.names:
                made[self.names[result.name]] = torch.from_numpy(numpy.copy(result.weights))
        return made.get(self.name)

    def row_order(self) -> torch.Tensor | None:
        """For each row, its number among those of the parts, if transformers only orders them anew.

        It is given numbers in place of rows, two columns of them, and what it does to them is seen.
        """
        arrays, first = {}, 1
        for name, part in self.tensors.items():
            numbers = numpy.arange(first, first + part.shape[0], dtype=numpy.float64)
            shape = (*part.shape_of_elements[:-1], 2)
            arrays[name] = numpy.stack([numbers, -numbers], -1).reshape(shape)
            first += part.shape[0]
        try:
            ordered = self._processed(arrays)
        except (ValueError, RuntimeError):  # it needs all columns
            return None
        if ordered is None or tuple(ordered.shape) != (*self.shape[:-1], 2):
            return None
        order = ordered[..., 0].flatten()
        is_order = torch.equal(order.sort().values, torch.arange(1, first, dtype=order.dtype))
        is_order &= torch.equal(ordered[..., 1].flatten(), -order)
        return order.long() - 1 if is_order else None

    def _error(self, reader: TensorReader, reason: object) -> CheckpointError:
        return CheckpointError(
            f"{reader.path}: {', '.join(self.tensors)} make no {self.name} {list(self.shape)} "
            f"({reason}); give the model that the file was made from, or another version of gguf."
        )


def find_gguf(coor: Coordinator, file: Path, readers: Sequence[int]) -> CheckpointFiles:
    """The file, its index and its config. Collective.

    readers: by rank, the rank that reads for it; one without the file is sent its blocks.
    """
    own: list[CheckpointFiles] = []

    def read(path: Path) -> Index:
        own.append(open_gguf(path))
        return own[0].index

    files, text = share_index(coor, file, lambda: readers, lambda: _descriptions(own[0]), read)
    opened: CheckpointFiles = run_on_all_ranks(
        coor, lambda: own[0] if own else _described(files, json.loads(text))
    )
    return replace(files, index=opened.index, config=opened.config)


def _descriptions(files: CheckpointFiles) -> str:
    """The config and the kinds of tensors, for ranks without the file."""
    tensors: Any = files.index
    facts = {
        name: (t.architecture, int(t.kind), t.shape_of_elements) for name, t in tensors.items()
    }
    return json.dumps([json.loads(files.config.to_json_string()), facts])


def _described(files: CheckpointFiles, descriptions: Any) -> CheckpointFiles:
    """The file as rank 0 has described it."""
    fields, facts = descriptions
    kinds = _kinds(files.path, {name: number for name, (_, number, _) in facts.items()})
    index = {
        name: GgufTensor(
            *(stored.file, stored.offset, stored.dtype, stored.shape),
            architecture=facts[name][0],
            kind=kinds[facts[name][1]],
            shape_of_elements=tuple(facts[name][2]),
        )
        for name, stored in files.index.items()
    }
    return replace(files, index=index, config=config_from_json(fields))


def _tensors(file: Path, header: GgufHeader) -> dict[str, GgufTensor]:
    """The index of a file. Raises CheckpointError for a type that the library cannot dequantize."""
    kinds = _kinds(file, {name: info.type for name, info in header.tensors.items()})
    return {
        name: GgufTensor(
            *(file.name, info.offset, "U8", (math.prod(info.shape[:-1]), info.row_nbytes)),
            header.written,
            architecture=header.architecture,
            kind=kinds[info.type],
            shape_of_elements=info.shape,
        )
        for name, info in header.tensors.items()
    }


def _kinds(file: Path, numbers: Mapping[str, int]) -> dict[int, Any]:
    """The types of tensors, by their numbers; see _tensors(). numbers: by the tensors' names."""
    gguf, kinds = import_gguf(), dict[int, Any]()
    for number, name in {number: name for name, number in numbers.items()}.items():
        kind = number
        try:
            kind = kinds[number] = gguf.GGMLQuantizationType(number)
            _, nbytes = gguf.GGML_QUANT_SIZES[kind]
            gguf.dequantize(numpy.zeros((1, nbytes), numpy.uint8), kind)
        except (ValueError, NotImplementedError) as error:
            raise CheckpointError(
                f"{file}: {name} is of type {getattr(kind, 'name', kind)}, which the library gguf "
                "of this rank cannot make numbers of; give a file of another type, or install "
                "another version of gguf."
            ) from error
    return kinds


def open_gguf(file: Path) -> CheckpointFiles:
    """The file, its index and its config, for one process alone."""
    header = read_gguf_header(file)
    return CheckpointFiles(file, _tensors(file, header), (0,), _config(file, header))


def _config(file: Path, header: GgufHeader) -> Any:
    """The config of a file, made of a summary in memory."""

    def describe(error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{file} describes no model that transformers {installed('transformers')} can make of "
            f"a GGUF file ({error}); give the checkpoint that it was made from."
        )

    with blamed_on_file(describe):
        return config_of_gguf(header.summary, file.parent)


def warn_of_factors(files: CheckpointFiles) -> None:
    """Say that positions are others, where factors in the file are not those of the config."""
    rope = getattr(files.config, "rope_parameters", None) or {}
    by_kind = [of_kind for of_kind in rope.values() if isinstance(of_kind, dict)] or [rope]
    is_default = all(of_kind.get("rope_type", "default") == "default" for of_kind in by_kind)
    factors = next((name for name in files.index if name.startswith("rope_f")), None)
    if factors is not None and is_default:
        log.warning(
            "rank 0: %s holds %s, factors of positions, which transformers does not read in a GGUF "
            "file, so the model is another one, the more so the longer a text is; give config= "
            "of the checkpoint that the file was made from.",
            files.path,
            factors,
        )


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
    index, stored_dtype = {}, str(dtype_info(dtype).safetensors)
    for name, own in parts.items():
        shape = tuple(state[name].shape)
        _check_shapes(source.path, name, shape, own)
        index[name] = _weight(name, shape, own, stored_dtype, processor, names)
    return replace(source, index=index)


def _weight(
    name: str,
    shape: tuple[int, ...],
    parts: dict[str, GgufTensor],
    dtype: str,
    processor: Any,
    names: dict[str, str],
) -> ComputedTensor:
    """A tensor of a model, by its rows if these are as they are in the file."""
    first = next(iter(parts.values()))
    place = first.file, first.offset, dtype, shape
    weight = GgufWeight(*place, name=name, tensors=parts, processor=processor, names=names)
    sizes = {part.shape_of_elements[-1] for part in parts.values()}
    has_rows = len(shape) > 1 and sizes == {shape[-1]}
    order = weight.row_order() if has_rows else None
    return weight if order is None else GgufRows(*place, tensors=[*parts.values()], order=order)


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
