"""What transformers does to stored tensors is done to their descriptions, with the same result."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Transpose

import drumline
from coordinator import Coordinator
from drumline.checkpoint import empty_model
from drumline.checkpoint.safetensors_index import StoredTensor
from drumline.checkpoint.shard_plan import fills_exactly
from drumline.checkpoint.weight_map import NotStreamable, _convert
from drumline.contact.loading.weights import Conversion, operation_of
from launcher import linux

shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


def assembled(pieces, shape, stored):
    """A tensor filled as its pieces say, each element once."""
    assert fills_exactly(pieces, shape)
    out = torch.full(shape, -1)
    for piece in pieces:
        lead, at = piece.lead, piece.at
        whole = stored[piece.key]
        place = (*at.start[:lead], *at.slices()[lead:])
        out[place] = whole[piece.in_file(at).slices()]
    return out


def converted(operations, sources, targets, tensors):
    """By name, what our tables and what transformers make of tensors named by their pattern."""
    index = {
        key: StoredTensor("a.safetensors", 0, "I64", tuple(tensor.shape))
        for keys in tensors.values()
        for key, tensor in keys.items()
    }
    conversion = Conversion(sources, targets, [*map(operation_of, operations)])
    name = f"layer.{targets[0]}.weight"
    found = _convert(name, {p: list(keys) for p, keys in tensors.items()}, conversion, index)
    value = {pattern: list(keys.values()) for pattern, keys in tensors.items()}
    for operation in operations:
        value = operation.convert(value, source_patterns=sources, target_patterns=targets)
    return found, {f"layer.{target}.weight": whole for target, whole in value.items()}


def check(operations, sources, targets, tensors):
    found, expected = converted(operations, sources, targets, tensors)
    stored = {key: tensor for keys in tensors.values() for key, tensor in keys.items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        whole = value[0] if isinstance(value, list) else value
        assert torch.equal(assembled(found[name], tuple(whole.shape), stored), whole), name


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(2, 3), st.data())
def test_a_tensor_is_split_into_chunks(shape, count, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape = (*shape[:dim], shape[dim] * count, *shape[dim + 1 :])
    whole = torch.arange(torch.tensor(shape).prod()).reshape(shape)
    targets = [f"part{n}" for n in range(count)]
    check([Chunk(dim)], ["joint"], targets, {"joint": {"layer.joint.weight": whole}})


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 3), st.data())
def test_lists_of_tensors_are_stacked_and_joined(shape, count, data):
    dim = data.draw(st.integers(0, len(shape)))
    tensors = {
        pattern: {
            f"{pattern}.{n}": 1000 * n
            + at
            + torch.arange(torch.tensor(shape).prod()).reshape(shape)
            for n in range(count)
        }
        for at, pattern in ((0, "gate"), (100_000, "up"))
    }
    check([MergeModulelist(dim=0), Concatenate(dim=dim)], ["gate", "up"], ["both"], tensors)


def test_conversions_that_compute_are_not_streamable():
    tensors = {"joint": {"a": torch.zeros(2, 3)}}
    with pytest.raises(NotStreamable, match=r"Transpose.*without a mesh or dequantize=True"):
        converted([Transpose(0, 1)], ["joint"], ["turned"], tensors)


@pytest.fixture
def computed(monkeypatch):
    """As if the weights of every model were computed from what is stored."""

    def refuse(model, index):
        raise NotStreamable("all of it is made by Reverse")

    monkeypatch.setattr(empty_model, "map_weights", refuse)


def test_a_model_that_is_computed_is_read_by_transformers_on_every_rank(
    checkpoints, on_master, computed
):
    plain, path = checkpoints.llama()
    ids = torch.arange(3, 12)[None]

    def work(model):
        return model.generate(ids, max_new_tokens=6, do_sample=False).tolist()

    assert on_master(path, 3, work) == work(plain)


def test_transformers_maps_no_file_either_where_that_is_disabled(
    checkpoints, on_master, computed, tmp_path
):
    _, path = checkpoints.llama()
    shutil.copytree(path, tmp_path / "copy")

    def is_mapped(model):
        return str(tmp_path) in linux.read_proc("self/maps")

    assert on_master(tmp_path / "copy", 1, is_mapped)
    assert not on_master(tmp_path / "copy", 1, is_mapped, disable_mmap=True)


def test_a_model_that_is_computed_needs_its_files_on_every_rank(
    checkpoints, ranks_or_errors, computed
):
    def rank(info):
        path = "nowhere" if info.rank == 1 else checkpoints.llama()[1]
        with Coordinator(info, timeout_s=20) as coor:
            drumline.load(path, coor=coor, max_memory=[1 << 30] * 2)

    texts = [str(error) for error in ranks_or_errors(rank, 2)]
    assert all("computed" in text and "[1]" in text for text in texts), texts
