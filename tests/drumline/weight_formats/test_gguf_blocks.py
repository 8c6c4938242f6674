"""Blocks of GGUF as numbers: those of the library gguf, and of the formulas of ggml without it."""

from __future__ import annotations

import struct

import pytest
import torch

from drumline.weight_formats.gguf_blocks import LAYOUTS, dequantized
from drumline.weight_formats.native_unpack import OUT_DTYPES, unpack_rows
from tests.drumline.weight_formats.test_gguf_file import random_blocks, random_bytes


@pytest.mark.parametrize("kind", [*LAYOUTS, "Q4_1", "IQ4_XS"])
def test_numbers_are_those_of_the_library_to_the_bit(kind):
    gguf = pytest.importorskip("gguf", reason="runs after `pip install gguf`")
    generator = torch.Generator().manual_seed(4)
    blocks = random_blocks(gguf, gguf.GGMLQuantizationType[kind], 3, 512, generator)
    expected = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
    assert torch.equal(dequantized(torch.from_numpy(blocks), kind), expected)


@pytest.mark.parametrize("dtype", OUT_DTYPES)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_loops_in_c_make_the_same_numbers_and_their_products(kind, dtype):
    """Operations of torch made a token of packed weights take twenty times as long."""
    generator = torch.Generator().manual_seed(4)
    num_rows, num_columns, nbytes = 331, 1280, sum(LAYOUTS[kind][0])
    num_blocks = num_rows * num_columns // (32 if kind in ("Q4_0", "Q8_0") else 256)
    blocks = random_bytes(kind, (num_blocks, nbytes), generator).view(num_rows, -1)
    order = torch.randperm(num_rows, generator=generator)[:-1]
    expected = dequantized(blocks, kind)[order].to(dtype)
    numbers = torch.empty_like(expected)
    unpack_rows(kind, blocks, order, numbers)
    assert torch.equal(numbers, expected)
    inputs = torch.randn(3, num_columns, generator=generator)
    products = torch.empty(3, len(order))
    unpack_rows(kind, blocks, order, products, inputs, dtype)
    exact = inputs.double() @ expected.double().T
    bound = inputs.abs().double() @ expected.abs().double().T
    assert ((products - exact).abs() <= 1e-6 * bound).all()


def test_a_block_of_q4_k_is_that_of_the_formula():
    """get_scale_min_k4 and dequantize_row_q4_K of ggml, one number at a time."""
    generator = torch.Generator().manual_seed(4)
    block = torch.randint(256, (144,), generator=generator).tolist()
    block[:4] = struct.pack("<ee", 0.25, 0.125)
    scales, quants, numbers = block[4:16], block[16:], []
    for sub in range(8):
        if sub < 4:
            scale, low = scales[sub] & 63, scales[sub + 4] & 63
        else:
            scale = scales[sub + 4] & 15 | (scales[sub - 4] >> 6) << 4
            low = scales[sub + 4] >> 4 | (scales[sub] >> 6) << 4
        words = quants[sub // 2 * 32 : sub // 2 * 32 + 32]
        nibbles = [word >> 4 if sub % 2 else word & 15 for word in words]
        numbers += [0.25 * scale * nibble - 0.125 * low for nibble in nibbles]
    rows = torch.tensor([block], dtype=torch.uint8)
    assert dequantized(rows, "Q4_K")[0].tolist() == numbers
