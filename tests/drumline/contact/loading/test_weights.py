"""Stored weights are matched in the order and by the operations of transformers, and no others."""

import itertools
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    dot_natural_key,
)

from drumline.contact.loading import models, weights

PARTS = ["", "0", "9", "10", "010", "a", "a2", "a11", "w_1", "weight", "b.0.1"]


def test_keys_are_sorted_as_transformers_sorts_them():
    keys = [".".join(parts) for parts in itertools.product(PARTS, repeat=3)]
    random.Random(0).shuffle(keys)
    assert sorted(keys, key=weights.natural_key) == sorted(keys, key=dot_natural_key)


class OwnConcatenate(Concatenate):
    """As a later release may have it, with a `convert` of its own."""


@pytest.mark.parametrize(
    ("operation", "verb"),
    [
        (Concatenate(dim=1), "concatenate"),
        (MergeModulelist(dim=0), "stack"),
        (Chunk(dim=1), "chunk"),
        (MergeModulelist(dim=1), None),
        (Chunk(dim=0, num_shards_attribute="num_heads"), None),
        (Transpose(0, 1), None),
        (OwnConcatenate(dim=0), None),
    ],
)
def test_an_operation_that_is_not_known_computes(operation, verb):
    assert weights.operation_of(operation).verb == verb
    assert weights.operation_of(operation).dim in (0, 1)


CONFIG = LlamaConfig(
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=1,
    num_key_value_heads=1,
    vocab_size=8,
)


def test_a_model_without_weights_reports_what_is_missing_and_draws_no_number(capsys):
    state = torch.get_rng_state()
    model, report = weights.build_unfilled(
        LlamaForCausalLM, CONFIG, torch.bfloat16, lambda model: (["model.norm.weight"], ["spare"])
    )
    assert type(model) is LlamaForCausalLM
    assert report["missing_keys"] == {"model.norm.weight"}
    assert report["unexpected_keys"] == {"spare"}
    on_meta = {name for name, tensor in model.named_parameters() if tensor.is_meta}
    assert on_meta == dict(model.named_parameters()).keys() - {"model.norm.weight"}
    assert model.model.rotary_emb.inv_freq.isfinite().all()
    assert torch.equal(torch.get_rng_state(), state)
    assert "Loading weights" not in capsys.readouterr().err


def test_buffers_follow_the_innermost_module_that_has_a_device():
    model = models.build(LlamaForCausalLM, CONFIG, torch.float32)
    weights.place_buffers(model, {"": "cpu", "model": "meta"})
    assert model.model.rotary_emb.inv_freq.is_meta
    assert not model.model.norm.weight.is_meta
