"""Weights in few bits by loops in C++, on the CPU: their numbers, or their product with few inputs.

unpack_rows(kind, blocks, order, out)                   # rows of GGUF, by their numbers
unpack_rows(kind, blocks, order, out, inputs)           # inputs @ rows.T

Numbers are the same to the bit as those of torch's operations; sums of products are in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drumline.weight_formats import _packed

KINDS = {"Q4_0": 2, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
"""The numbers of ggml's types."""


OUT_DTYPES = (torch.float32, torch.bfloat16)


def can_unpack(out: torch.Tensor) -> bool:
    """True if numbers can be written into a tensor: the rest is done by torch."""
    return out.device.type == "cpu" and out.dtype in OUT_DTYPES and out.is_contiguous()


def unpack_rows(
    kind: str,
    blocks: torch.Tensor,
    order: torch.Tensor,
    out: torch.Tensor,
    inputs: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Numbers of rows of blocks, [rows, bytes] uint8, of which `order` (int64) takes some.

    out: [len(order), columns]. With inputs, [n, columns] float32, n at most 8, their products with
    the rows, which are rounded to `dtype` first: out is [n, len(order)] float32.
    """
    order, blocks = order.contiguous(), blocks.contiguous()
    weight = KINDS[kind], blocks.data_ptr(), blocks.shape[1], order.data_ptr()
    columns = (out if inputs is None else inputs).shape[1]
    result = _result(len(order), columns, out, inputs, dtype)
    _packed.unpack_rows(weight, result, torch.get_num_threads())


def unpack_integers(
    parts: Sequence[torch.Tensor],
    groups: torch.Tensor,
    packing: tuple[int, bool, Sequence[int], int],
    out: torch.Tensor,
    inputs: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Numbers of the integers of GPTQ and AWQ, or their products with inputs, as above. Gives out.

    parts: words of [columns, rows] integers; zeros and scales, [groups, rows]. groups: of columns.
    packing: bits, True for words along the rows, the place of each integer in its word, and what
    is added to each word of zeros.
    """
    words, zeros, scales, groups = (part.contiguous() for part in (*parts, groups))
    scales = scales.float()
    num_bits, is_by_rows, order, zero_shift = packing
    shifts = bytes(place * num_bits for place in order or range(32 // num_bits))
    where = words.data_ptr(), zeros.data_ptr(), scales.data_ptr(), groups.data_ptr()
    weight = *where, len(scales), num_bits, is_by_rows, shifts, zero_shift
    result = _result(scales.shape[1], len(groups), out, inputs, dtype)
    _packed.unpack_integers(weight, result, torch.get_num_threads())
    return out


def _result(
    rows: int,
    columns: int,
    out: torch.Tensor,
    inputs: torch.Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[int, int, int, bool, int, int]:
    address, num_inputs = (0, 0) if inputs is None else (inputs.data_ptr(), len(inputs))
    is_bfloat16 = (dtype or out.dtype) == torch.bfloat16
    return rows, columns, out.data_ptr(), is_bfloat16, address, num_inputs
