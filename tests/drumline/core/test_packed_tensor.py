"""Weights that are kept in few bits: what an operation gets of them, and what stays packed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from drumline.checkpoint.model_tensors import named_tensors, replace_tensors, tied_names
from drumline.core.packed_tensor import PackedTensor
from drumline.errors import RefusedUse


class Bytes:
    """Eighths, kept as one byte each; notes which boxes were unpacked."""

    is_native = False

    def __init__(self):
        self.regions = []

    def __call__(self, parts, region):
        self.regions.append(region)
        return parts["0"][region.slices()].float() / 8

    def multiply(self, parts, inputs, entry):
        return None

    def packed(self, *shape):
        values = torch.randint(-128, 128, shape, dtype=torch.int8)
        return PackedTensor.of({"0": values}, self, shape, torch.bfloat16), values.bfloat16() / 8


def test_an_operation_gets_the_values_and_the_bytes_stay_few():
    packed, plain = Bytes().packed(7, 5)
    hidden = torch.rand(3, 5, dtype=torch.bfloat16)
    assert torch.equal(functional.linear(hidden, packed), functional.linear(hidden, plain))
    assert torch.equal(hidden @ packed.T, hidden @ plain.T)
    assert torch.equal(torch.cat([packed, packed]), torch.cat([plain, plain]))
    assert (packed.nbytes, packed.shape, packed.dtype) == (35, plain.shape, plain.dtype)
    assert (packed.device, packed.is_meta) == (plain.device, False)


def test_rows_that_are_looked_up_are_unpacked_alone():
    unpack = Bytes()
    packed, plain = unpack.packed(100, 5)
    ids = torch.tensor([[7, 99, 8], [7, 0, 9]])
    assert torch.equal(functional.embedding(ids, packed), functional.embedding(ids, plain))
    assert [region.size[0] for region in unpack.regions] == [1, 3, 1]
    empty = ids[:0]
    assert functional.embedding(empty, packed).shape == functional.embedding(empty, plain).shape


@pytest.mark.parametrize("ids", [[3, 7], [-1, 0], [1 << 40]])
def test_an_id_outside_of_the_table_is_refused(ids):
    packed, _ = Bytes().packed(7, 5)
    with pytest.raises(IndexError, match=r"are not in 0 to 6"):
        functional.embedding(torch.tensor(ids), packed)


@pytest.mark.parametrize("number", [1, -1, torch.tensor(2)])
def test_one_matrix_of_a_stack_is_unpacked_alone(number):
    unpack = Bytes()
    packed, plain = unpack.packed(3, 4, 5)
    assert torch.equal(packed[number], plain[number])
    assert [region.size for region in unpack.regions] == [(1, 4, 5)]
    assert torch.equal(packed[1:, :2], plain[1:, :2])


def test_no_value_is_lost_by_writing_into_a_weight():
    """The copy that an operation gets would have taken the values, and nobody would have seen."""
    packed, plain = Bytes().packed(7, 5)
    writes = packed.mul_, packed.copy_, packed.data.add_, nn.Parameter(packed, False).data.add_
    others = (
        lambda value: packed.__setitem__(0, value[0]),
        lambda value: nn.init.normal_(packed),
        lambda value: nn.init.constant_(packed, 1.0),
        lambda value: torch.relu_(input=packed),
        lambda value: functional.relu(packed, inplace=True),
        lambda value: torch._foreach_copy_([value.clone(), packed], [value, value]),
        lambda value: torch.max(value, 0, out=(packed, torch.ones(5, dtype=torch.long))),
    )
    for write in (*writes, *others):
        with pytest.raises(RefusedUse, match="dequantize=True"):
            write(plain)
    torch._foreach_add_([plain], [packed])


def test_tied_weights_stay_one_when_their_parts_are_read():
    packed, plain = Bytes().packed(7, 5)
    model = nn.ModuleDict({"table": nn.Embedding(7, 5), "head": nn.Linear(5, 7, bias=False)})
    empty = packed.with_parts({"0": torch.empty(7, 5, dtype=torch.int8, device="meta")})
    model["table"].weight = model["head"].weight = nn.Parameter(empty, requires_grad=False)
    assert tied_names(model) == {"table.weight:0": ["table.weight:0", "head.weight:0"]}
    replace_tensors(model, {id(dict(named_tensors(model))["head.weight:0"]): packed.parts["0"]})
    assert model["table"].weight is model["head"].weight
    hidden = torch.rand(3, 5, dtype=torch.bfloat16)
    assert torch.equal(model["head"](hidden), functional.linear(hidden, plain))
    assert not model["head"].weight.requires_grad


def test_weights_may_be_given_by_the_names_that_torch_has():
    packed, plain = Bytes().packed(7, 5)
    hidden, ids = torch.rand(3, 5, dtype=torch.bfloat16), torch.tensor([6, 2])
    for weight in (packed, plain):
        products = functional.linear(input=hidden, weight=weight, bias=None)
        assert torch.equal(products, functional.linear(hidden, plain))
        assert torch.equal(functional.embedding(input=ids, weight=weight), plain[ids])
