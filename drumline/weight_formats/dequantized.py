"""Quantized weights of a checkpoint, dequantized by us: while they are read, or in each operation.

source = read_dequantized(source, torch.bfloat16)     # described as a model of plain weights

Formats by quant_method: "fp8" (scales of blocks), "mxfp4" (OCP Microscaling Formats 1.0, section
5.3), "compressed-tensors" with packed integers, or integers and fp8 as they are, "gptq" and "awq".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from communicator import dtype_info
from drumline.checkpoint.headers.file_bounds import QUANTIZATION, FieldError
from drumline.checkpoint.safetensors_index import ComputedTensor, Index, StoredTensor, TensorReader
from drumline.checkpoint.source import CheckpointFiles
from drumline.contact.loading.configs import without_quantization
from drumline.core.shards import Region
from drumline.errors import CheckpointError
from drumline.weight_formats.native_unpack import OUT_DTYPES, can_unpack, unpack_integers
from drumline.weight_formats.packed_integers import INT32_BITS, groups_of_columns, integers_of

Derived = Iterator[tuple[str, StoredTensor, set[str]]]
"""The name of a weight, how it is computed, and the stored tensors that are used up."""

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of E2M1 by its lower three bits; the fourth is the sign."""
FP4_GROUP = 32
EXPONENT_BIAS = 127
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
ZERO_SHIFTS = {
    ("gptq", "none"): 1,
    ("gptq", "gptq"): 1,
    ("gptq", "gptq_v2"): 0,
    ("awq", "none"): 0,
    ("awq", "gemm"): 0,
}
"""What is added to each zero within its word, by the method and the variant of its format."""
TRANSPOSED_PARTS = ("qweight", "qzeros", "scales", "g_idx")
QUANTIZED = ("F8_E4M3", "F8_E5M2", "I8")
SCALE_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E8M0", "U8")
GROUP_DTYPES = ("I64", "I32")
ORDERED_COLUMNS = ("group", "dynamic")
"""Kinds of actorder with which columns are not in the order of their groups."""
FP8_BLOCK = (128, 128)
"""The default of transformers."""
BLOCK_SIZES = ("weight_block_size", "block_structure")
MAX_BLOCK_DIMS = 2
TRANSFORMS_OF_WEIGHTS = {"weight_input", "weight_output"}
"""Locations of rotations that are in the stored weights."""
OF_ACTIVATIONS = ("activation_scale", "input_scale", ".output_scale", ".k_scale", ".v_scale")
"""Endings of the names of scales that no weight has."""


def read_dequantized(source: CheckpointFiles, dtype: torch.dtype) -> CheckpointFiles:
    """The checkpoint with weights in `dtype` in place of quantized ones, as its config says too.

    Raises CheckpointError for a format that is not known.
    """
    if getattr(source.config, "quantization_config", None) is None:
        return source
    settings = _fields(source)
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise CheckpointError(
            f"{source.path}/config.json has quant_method={method!r:.60}, and what is dequantized "
            f"while it is read is {', '.join(METHODS)}; load it without dequantize=True, or save "
            "it once dequantized."
        )
    try:
        _check_settings(settings)
    except FieldError as error:
        raise CheckpointError(
            f"{source.path}/config.json: in quantization_config {error}, so the weights cannot be "
            "computed; copy it again."
        ) from error
    derived = list(METHODS[method](source.path, source.index, settings))
    used = {name for _, _, names in derived for name in names}
    name = str(dtype_info(dtype).safetensors)
    index = {key: replace(weight, dtype=name) for key, weight, _ in derived}
    index |= {
        key: stored
        for key, stored in source.index.items()
        if key not in used and not key.endswith(OF_ACTIVATIONS)
    }
    return replace(source, index=index, config=without_quantization(source.config))


def is_known(source: CheckpointFiles) -> bool:
    """True for quantized weights of a method of which most forms can be computed here."""
    method = _fields(source).get("quant_method")
    return isinstance(method, str) and method in METHODS


def _fields(source: CheckpointFiles) -> dict[str, Any]:
    """The fields of a quantization_config, which transformers may have made an object of."""
    path, quantization = source.path, source.config.quantization_config
    fields = quantization if isinstance(quantization, dict) else None
    if fields is None and callable(to_dict := getattr(quantization, "to_dict", None)):
        fields = {k: v.value if isinstance(v, Enum) else v for k, v in to_dict().items()}
    if not isinstance(fields, dict):
        raise CheckpointError(
            f"{path}/config.json has quantization_config={quantization!r:.60}, which is not an "
            "object, so the format of the weights is unknown; copy it again."
        )
    return fields


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raise FieldError unless all fields that are read have values that they can have."""
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, dict):
        raise FieldError(f"config_groups={groups!r:.60} is not an object")
    _check_scheme(settings, "")
    for name, group in groups.items():
        scheme = (group.get("weights") or {}) if isinstance(group, dict) else group
        if not isinstance(scheme, dict):
            raise FieldError(f"config_groups[{name!r:.60}] is {group!r:.60} and no scheme")
        _check_scheme(scheme, f"config_groups[{name!r:.60}]")


def _check_scheme(scheme: Mapping[str, Any], owner: str) -> None:
    for name, bound in QUANTIZATION.items():
        value = scheme.get(name)
        numbers = value if name in BLOCK_SIZES and isinstance(value, (list, tuple)) else [value]
        if len(numbers) > MAX_BLOCK_DIMS:
            raise FieldError(f"{owner} {name} has {len(numbers)} dimensions".strip())
        for number in numbers:
            if number is not None or numbers is value:
                bound.check(number, owner)
        if name in BLOCK_SIZES and value is not None and numbers is not value:
            raise FieldError(f"{owner} {name}={value!r:.60} is not a list".strip())


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A tensor with one entry for each block of a larger one, such as a scale.

    stored: of as many dimensions as the larger one. block: the elements of an entry, by dimension.
    """

    stored: StoredTensor
    block: tuple[int, ...]

    def spread(self, reader: TensorReader, region: Region) -> torch.Tensor:
        """The entry of every element of a box of the larger tensor, as float32."""
        spans = list(zip(region.start, region.size, self.block, strict=True))
        starts = tuple(start // block for start, _, block in spans)
        ends = (-(-(start + size) // block) for start, size, block in spans)
        sizes = tuple(end - start for end, start in zip(ends, starts, strict=True))
        entries = reader.box(self.stored, Region(starts, sizes))
        is_exponent = entries.dtype == torch.uint8  # of two
        entries = (entries.float() - EXPONENT_BIAS).exp2() if is_exponent else entries.float()
        for dim, (start, size, block) in enumerate(spans):
            at = torch.arange(start, start + size) // block - starts[dim]
            entries = entries.index_select(dim, at)
        return entries


class QuantizedWeight(ComputedTensor):
    """A weight that is computed from the stored tensors and grids among its fields."""

    @property
    def parts(self) -> Sequence[StoredTensor]:
        fields = vars(self).values()
        tensors = [value.stored if isinstance(value, Grid) else value for value in fields]
        return [tensor for tensor in tensors if isinstance(tensor, StoredTensor)]


@dataclass(frozen=True, kw_only=True)
class ScaledWeight(QuantizedWeight):
    """A weight whose elements are stored, with a scale for each block of them."""

    values: StoredTensor
    scales: Grid

    def compute(self, reader: TensorReader, region: Region, out: torch.Tensor) -> None:
        out.copy_(reader.box(self.values, region).float() * self.scales.spread(reader, region))


@dataclass(frozen=True, kw_only=True)
class Mxfp4Weight(QuantizedWeight):
    """Experts of [in, out] elements, stored as [out, in / 32, 16] pairs with exponents of two."""

    blocks: StoredTensor
    exponents: StoredTensor

    def compute(self, reader: TensorReader, region: Region, out: torch.Tensor) -> None:
        (expert, column, row), (experts, columns, rows) = region.start, region.size
        first, end = column // FP4_GROUP, -(-(column + columns) // FP4_GROUP)
        start, size = (expert, row, first), (experts, rows, end - first)
        blocks = reader.box(self.blocks, Region((*start, 0), (*size, FP4_GROUP // 2)))
        exponents = reader.box(self.exponents, Region(start, size)).float() - EXPONENT_BIAS
        table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
        pairs = torch.stack([table[(blocks & 15).int()], table[(blocks >> 4).int()]], -1)
        values = pairs.flatten(-2) * exponents.exp2().unsqueeze(-1)
        skipped = column - first * FP4_GROUP
        out.copy_(values.flatten(-2)[..., skipped : skipped + columns].transpose(1, 2))


@dataclass(frozen=True, kw_only=True)
class PackedWeight(QuantizedWeight):
    """Integers of a few bits in int32 words along a row, with a scale for each group of a row.

    zeros: of each group too, packed along the columns. groups: that of each column, where columns
    are not in the order of their groups.
    """

    packed: StoredTensor
    num_bits: int
    scales: Grid
    zeros: StoredTensor | None
    groups: StoredTensor | None

    def compute(self, reader: TensorReader, region: Region, out: torch.Tensor) -> None:
        (row, column), (rows, columns) = region.start, region.size
        spans = [(row, rows), (column, columns)]
        values = integers_of(reader, self.packed, self.num_bits, 1, spans).float()
        num_groups = self.scales.stored.shape[1]
        sizes = self.scales.block[1], num_groups
        at = groups_of_columns(reader, self.groups, (column, columns), *sizes)
        if self.zeros is None:
            values -= 1 << self.num_bits - 1
        else:
            spans = [(row, rows), (0, num_groups)]
            zeros = integers_of(reader, self.zeros, self.num_bits, 0, spans)
            values -= zeros.index_select(1, at).float()
        by_group = replace(self.scales, block=(self.scales.block[0], 1))
        scales = by_group.spread(reader, Region((row, 0), (rows, num_groups)))
        out.copy_(values * scales.index_select(1, at))


@dataclass(frozen=True, kw_only=True)
class TransposedWeight(QuantizedWeight):
    """A weight of [out, in], whose integers are stored as [in, out], and its scales and zeros as
    [groups, out], as GPTQ and AWQ have them.

    dim: that along which integers are packed; zeros are along the last. order: the place of each
    integer in its word. zero_shift: what is added to each word of zeros, which carries from one to
    the next. group_size: columns of a group, unless `groups` has that of each column.
    """

    packed: StoredTensor
    zeros: StoredTensor
    scales: StoredTensor
    groups: StoredTensor | None
    num_bits: int
    dim: int
    order: tuple[int, ...]
    zero_shift: int
    group_size: int

    def compute(self, reader: TensorReader, region: Region, out: torch.Tensor) -> None:
        if region.size == self.shape and can_unpack(out):
            self._unpack(reader, out, None)
            return
        (row, column), (rows, columns) = region.start, region.size
        all_groups = (0, self.scales.shape[0])
        at = groups_of_columns(
            reader, self.groups, (column, columns), self.group_size, all_groups[1]
        )
        spans = [(column, columns), (row, rows)]
        values = integers_of(reader, self.packed, self.num_bits, self.dim, spans, self.order)
        spans = [all_groups, (row, rows)]
        packing = self.num_bits, 1, spans, self.order, self.zero_shift
        zeros = integers_of(reader, self.zeros, *packing)
        scales = reader.box(self.scales, Region((0, row), (all_groups[1], rows))).float()
        out.copy_(((values - zeros[at]) * scales[at]).T)

    @property
    def is_native(self) -> bool:
        return self.torch_dtype in OUT_DTYPES

    def multiply(
        self, reader: TensorReader, inputs: torch.Tensor, entry: int | None
    ) -> torch.Tensor:
        return self._unpack(reader, inputs.new_empty(len(inputs), self.shape[0]), inputs)

    def _unpack(
        self, reader: TensorReader, out: torch.Tensor, inputs: torch.Tensor | None
    ) -> torch.Tensor:
        stored = (self.packed, self.zeros, self.scales)
        parts = [reader.box(part, Region((0, 0), part.shape)) for part in stored]
        span, num_groups = (0, self.shape[1]), len(parts[2])
        groups = groups_of_columns(reader, self.groups, span, self.group_size, num_groups)
        packing = self.num_bits, self.dim == 1, self.order, self.zero_shift
        return unpack_integers(parts, groups, packing, out, inputs, self.torch_dtype)


def _scaled(path: Path, index: Index, settings: Mapping[str, Any]) -> Derived:
    """Tensors of one byte an element, each with a scale beside it."""
    groups = [
        group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()
    ]
    sizes = [group.get("block_structure") or (1, group.get("group_size") or 0) for group in groups]
    default = FP8_BLOCK if settings["quant_method"] == "fp8" else ()
    blocks = settings.get("weight_block_size", default)
    blocks = blocks or next((s for s in sizes if min(s) > 0), ())
    for name, stored in index.items():
        if stored.dtype not in QUANTIZED:
            continue
        stem = name.removesuffix("weight")
        names = (f"{name}_scale_inv", f"{name}_scale", f"{stem}qscale_weight", f"{stem}scale")
        scale = next((other for other in names if other in index), None)
        is_bytes = stored.dtype == "I8" and settings["quant_method"] == "fp8"
        is_shifted = not index.keys().isdisjoint((f"{name}_zero_point", f"{name}_g_idx"))
        if scale is None or is_bytes or is_shifted or index[scale].dtype not in SCALE_DTYPES:
            raise _unreadable(path, name, stored)
        grid = _grid(path, name, stored, index[scale], blocks)
        yield name, ScaledWeight(**_like(stored), values=stored, scales=grid), {name, scale}


def _mxfp4(path: Path, index: Index, settings: Mapping[str, Any]) -> Derived:
    for name, stored in index.items():
        key = name.removesuffix("_blocks")
        if key == name or len(stored.shape) != 4:
            continue
        exponents = index.get(f"{key}_scales")
        experts, rows, groups, nbytes = stored.shape
        shapes = (exponents and exponents.shape, nbytes)
        is_whole = shapes == ((experts, rows, groups), FP4_GROUP // 2)
        if exponents is None or not is_whole or {stored.dtype, exponents.dtype} != {"U8"}:
            raise _unreadable(path, name, stored)
        where = {**_like(stored), "shape": (experts, groups * FP4_GROUP, rows)}
        weight = Mxfp4Weight(**where, blocks=stored, exponents=exponents)
        yield key, weight, {name, f"{key}_scales"}


def _compressed(path: Path, index: Index, settings: Mapping[str, Any]) -> Derived:
    """Packed integers; beside them, and without them, what has one byte an element."""
    transforms = json.dumps(settings.get("transform_config"))
    if online := {*re.findall(r'"location": "(\w+)"', transforms)} - TRANSFORMS_OF_WEIGHTS:
        raise CheckpointError(
            f"{path}/config.json: transform_config rotates what layers compute ({min(online)}), "
            "which is not done here, so the weights would not fit; give a checkpoint whose "
            "rotations are all in its weights."
        )
    groups = [*(settings.get("config_groups") or {}).values()]
    weights = [group.get("weights") or {} for group in groups]
    bits = {scheme.get("num_bits") or 0 for scheme in weights}
    num_bits = bits.pop() if len(bits) == 1 else 0
    group_sizes = {scheme.get("group_size") or -1 for scheme in weights}
    needed = {"scale"} | {"zero_point" for scheme in weights if scheme.get("symmetric") is False}
    needed |= {"g_idx" for scheme in weights if scheme.get("actorder") in ORDERED_COLUMNS}
    for name, stored in index.items():
        stem = name.removesuffix("_packed")
        if stem == name:
            continue
        parts = {part: index.get(f"{stem}_{part}") for part in ("scale", "zero_point", "g_idx")}
        scales = parts["scale"]
        is_known = stored.dtype == "I32" and len(stored.shape) == 2 and num_bits in (1, 2, 4, 8)
        is_known &= _has_dtypes(scales, parts["zero_point"], parts["g_idx"])
        if scales is None or not is_known or any(parts[part] is None for part in needed):
            raise _unreadable(path, name, stored)
        shape = stored.shape[0], stored.shape[1] * (INT32_BITS // num_bits)
        grid = _grid(path, name, replace(stored, shape=shape), scales, ())
        num_groups = grid.stored.shape[1]
        fits = num_groups in {shape[1] / size if size > 0 else 1 for size in group_sizes}
        num_words = -(-shape[0] * num_bits // INT32_BITS)
        shapes = {"zero_point": (num_words, num_groups), "g_idx": shape[1:]}
        if not fits or any(
            (tensor := parts[part]) is not None and tensor.shape != expected
            for part, expected in shapes.items()
        ):
            raise _unreadable(path, name, stored)
        weight = PackedWeight(
            **{**_like(stored), "shape": shape},
            packed=stored,
            num_bits=num_bits,
            scales=grid,
            zeros=parts["zero_point"],
            groups=parts["g_idx"],
        )
        yield stem, weight, {name, f"{stem}_shape", *(f"{stem}_{part}" for part in parts)}
    yield from _scaled(path, index, settings)


def _transposed(path: Path, index: Index, settings: Mapping[str, Any]) -> Derived:
    """GPTQ, packed along the inputs of a layer, and AWQ, packed along its outputs."""
    is_awq, num_bits = settings["quant_method"] == "awq", settings.get("bits") or 0
    form = settings.get("version" if is_awq else "checkpoint_format") or settings.get("format")
    dim, order = (1, AWQ_ORDER) if is_awq else (0, ())
    zero_shift = ZERO_SHIFTS.get((str(settings["quant_method"]), str(form).lower()))
    for name, stored in index.items():
        stem, _, part = name.rpartition(".")
        if part == "scales" and f"{stem}.qweight" not in index:  # of activations
            raise _unreadable(path, name, stored)
        if part != "qweight":
            continue
        zeros, scales, groups = (index.get(f"{stem}.{s}") for s in ("qzeros", "scales", "g_idx"))
        is_known = num_bits in ((4,) if is_awq else (2, 4, 8)) and stored.dtype == "I32"
        is_known &= len(stored.shape) == 2 and not (groups is None and settings.get("desc_act"))
        is_known &= _has_dtypes(scales, zeros, groups)
        if zeros is None or scales is None or zero_shift is None or not is_known:
            raise _unreadable(path, name, stored)
        sizes = [*stored.shape]
        sizes[dim] *= INT32_BITS // num_bits
        group_size = settings.get("group_size") or -1
        group_size = group_size if group_size > 0 else sizes[0]
        num_groups, num_words = -(-sizes[0] // group_size), sizes[1] * num_bits // INT32_BITS
        shapes = (num_groups, sizes[1]), (num_groups, num_words), (sizes[0],)
        order_shape = shapes[2] if groups is None else groups.shape
        # Zeros that do not fill their words would be read behind the last one.
        if sizes[1] * num_bits % INT32_BITS or (scales.shape, zeros.shape, order_shape) != shapes:
            raise _unreadable(path, name, stored)
        weight = TransposedWeight(
            **{**_like(stored), "shape": (sizes[1], sizes[0])},
            packed=stored,
            zeros=zeros,
            scales=scales,
            groups=groups,
            num_bits=num_bits,
            dim=dim,
            order=order,
            zero_shift=zero_shift * (((1 << INT32_BITS) - 1) // ((1 << num_bits) - 1)),
            group_size=group_size,
        )
        yield f"{stem}.weight", weight, {f"{stem}.{s}" for s in TRANSPOSED_PARTS}


def _has_dtypes(
    scales: StoredTensor | None, zeros: StoredTensor | None, groups: StoredTensor | None
) -> bool:
    """True if the parts of a packed weight that are there have dtypes that they can have."""
    pairs = ((scales, SCALE_DTYPES), (zeros, ("I32",)), (groups, GROUP_DTYPES))
    return all(part is None or part.dtype in dtypes for part, dtypes in pairs)


METHODS: dict[str, Callable[[Path, Index, Mapping[str, Any]], Derived]] = {
    "fp8": _scaled,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "gptq": _transposed,
    "awq": _transposed,
}


def _like(stored: StoredTensor) -> dict[str, Any]:
    """The place of a weight in the order of reading, and its shape."""
    return {name: getattr(stored, name) for name in ("file", "offset", "dtype", "shape")}


def _grid(
    path: Path, name: str, weight: StoredTensor, scales: StoredTensor, blocks: Sequence[int]
) -> Grid:
    """blocks: the sizes in the last dimensions, where the last block may be smaller."""
    num_dims = len(weight.shape)
    shape = (*scales.shape, *(num_dims - len(scales.shape)) * (1,))  # for all, or by row
    whole_blocks = [n // max(1, count) for n, count in zip(weight.shape, shape, strict=False)]
    blocks = blocks if len(blocks) <= num_dims else ()
    stated = (*whole_blocks[: num_dims - len(blocks)], *blocks)
    for sizes in (stated, tuple(whole_blocks)):
        if shape == tuple(-(-n // max(1, k)) for n, k in zip(weight.shape, sizes, strict=False)):
            return Grid(stored=replace(scales, shape=shape), block=sizes)
    raise _unreadable(path, name, weight)


def _unreadable(path: Path, name: str, stored: StoredTensor) -> CheckpointError:
    return CheckpointError(
        f"{path}: {name} in {stored.file} ({stored.dtype} {list(stored.shape)}) is quantized in a "
        "way that is not known here, or lacks its scales; where the format's own library is on "
        "every rank, load it without dequantize=True; otherwise copy it again."
    )
