"""Blocks of GGUF as numbers, by operations of torch on any device, to the bit those of gguf.

numbers = dequantized(rows, "Q4_K")        # [rows, bytes] uint8 as [rows, elements] float32

The layouts are those of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
Types that are not here go through the library gguf, on one thread of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from drumline.checkpoint.headers.gguf_header import import_gguf

Parts = Sequence[torch.Tensor]
"""The fields of blocks, [blocks, bytes of the field] each."""

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Kinds of numbers that are in no blocks."""


def dequantized(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """Rows of blocks, [rows, bytes] uint8, as numbers, [rows, elements] float32."""
    if kind in PLAIN:
        return rows.contiguous().view(PLAIN[kind]).float()
    if kind not in LAYOUTS:
        gguf = import_gguf()
        numbers = gguf.dequantize(rows.cpu().numpy(), gguf.GGMLQuantizationType[kind])
        return torch.from_numpy(numbers).to(rows.device)
    sizes, numbers_of = LAYOUTS[kind]
    blocks = rows.reshape(-1, sum(sizes))
    return numbers_of(torch.split(blocks, list(sizes), 1)).view(len(rows), -1)


def _halves(field: torch.Tensor) -> torch.Tensor:
    return field.contiguous().view(torch.float16).float()


def _signed(field: torch.Tensor) -> torch.Tensor:
    return field.contiguous().view(torch.int8).float()


def _bits(field: torch.Tensor, width: int, num_bits: int) -> torch.Tensor:
    """[blocks, groups, 8 / num_bits, width]: the lowest bits of `width` bytes, then the next."""
    shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8, device=field.device)
    groups = field.reshape(len(field), -1, 1, width)
    return (groups >> shifts.view(-1, 1)).bitwise_and_((1 << num_bits) - 1)


def _q4_0(parts: Parts) -> torch.Tensor:
    d, qs = parts
    return _halves(d) * (_bits(qs, 16, 4).flatten(1).float() - 8)


def _q8_0(parts: Parts) -> torch.Tensor:
    d, qs = parts
    return _signed(qs) * _halves(d)


def _q2_k(parts: Parts) -> torch.Tensor:
    scales, qs, d, dmin = parts
    scale, low = _halves(d) * (scales & 15).float(), _halves(dmin) * (scales >> 4).float()
    values = _bits(qs, 32, 2).reshape(len(qs), 16, 16).float()
    return values.mul_(scale.unsqueeze(2)).sub_(low.unsqueeze(2))


def _q3_k(parts: Parts) -> torch.Tensor:
    hmask, qs, packed, d = parts
    low = _bits(packed[:, :8], 8, 4).flatten(1)
    scales = low | _bits(packed[:, 8:], 4, 2).flatten(1) << 4
    high = _bits(hmask, 32, 1).flatten(1) << 2
    values = (_bits(qs, 32, 2).flatten(1) | high).float() - 4
    scale = _halves(d) * (scales.float() - 32)
    return values.view(len(qs), 16, 16).mul_(scale.unsqueeze(2))


def _q4_or_q5_k(parts: Parts) -> torch.Tensor:
    """Both have scales of sub-blocks, and what is subtracted, in 6 bits each; one a fifth bit."""
    d, dmin, packed, *fifth_bits, qs = parts
    scale, low, rest = packed.contiguous().view(-1, 3, 4).unbind(1)
    scales = torch.cat([scale & 63, rest & 15 | scale >> 2 & 48], 1).float()
    lows = torch.cat([low & 63, rest >> 4 | low >> 2 & 48], 1).float()
    values = _bits(qs, 32, 4).reshape(len(qs), 8, 32)
    for qh in fifth_bits:
        values |= _bits(qh, 32, 1).squeeze(1) << 4
    values = values.float().mul_((_halves(d) * scales).unsqueeze(2))
    return values.sub_((_halves(dmin) * lows).unsqueeze(2))


def _q6_k(parts: Parts) -> torch.Tensor:
    ql, qh, scales, d = parts
    scale = _halves(d) * _signed(scales)
    values = _bits(ql, 64, 4).reshape(len(ql), -1) | _bits(qh, 32, 2).reshape(len(ql), -1) << 4
    return values.float().sub_(32).view(len(ql), 16, 16).mul_(scale.unsqueeze(2))


LAYOUTS: dict[str, tuple[Sequence[int], Callable[[Parts], torch.Tensor]]] = {
    "Q4_0": ((2, 16), _q4_0),
    "Q8_0": ((2, 32), _q8_0),
    "Q2_K": ((16, 64, 2, 2), _q2_k),
    "Q3_K": ((32, 64, 12, 2), _q3_k),
    "Q4_K": ((2, 2, 12, 128), _q4_or_q5_k),
    "Q5_K": ((2, 2, 12, 32, 128), _q4_or_q5_k),
    "Q6_K": ((128, 64, 16, 2), _q6_k),
}
"""By type: the bytes of each field of a block, and the function that makes numbers of them."""
