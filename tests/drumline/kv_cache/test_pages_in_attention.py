"""Keys and values come into pages from a model's code, or from its attention, as before 5.24."""

import pytest
import torch
from torch import nn

from drumline.contact import transformers_api
from drumline.contact.batching.paged_attention import register_attention
from drumline.contact.model_parts import number_attribute
from drumline.kv_cache.paged_pool import PagedPool

QUERIES, KEYS = 5, 7
"""Tokens of a pass, of two sequences, and with the two that one of them had before."""


def pool_in_step():
    pool = PagedPool([0], [16], [0])
    before = torch.ones(1, 2, 2, 4)
    tokens = torch.tensor([2, 3])
    ends = torch.tensor([0, 2])
    pool.begin_step(ends, tokens, tokens, ends)
    pool.update(before, before, 0, {})
    read, write = torch.tensor([2, 3, 4, 5, 6, 7, 8]), torch.tensor([4, 5, 6, 7, 8])
    pool.begin_step(torch.tensor([0, 3, QUERIES]), read, write, torch.tensor([0, 5, KEYS]))
    return pool


@pytest.mark.parametrize("name", ["paged_sdpa", "paged_eager"])
def test_attention_that_is_given_the_pages_fills_them_itself(name):
    """Every continuous batch was refused with transformers 5.21 to 5.23, for other logits."""
    register_attention()
    attend = transformers_api.continuous_batching().AttentionInterface()[name]
    module = nn.Module()
    setattr(module, number_attribute(), 0)
    draw = torch.Generator().manual_seed(3)
    query, keys, values = (torch.randn(1, 2, QUERIES, 4, generator=draw) for _ in range(3))
    by_model = {"scaling": 0.5}
    both = pool_in_step().update(keys, values, 0, by_model)
    expected = attend(module, query, *both, None, **by_model)[0]
    pages = {"zebra": pool_in_step()}  # called cache, until it may have another name
    in_pages = attend(module, query, keys, values, None, scaling=0.5, **pages)[0]
    assert torch.equal(in_pages, expected)


def test_pages_take_arguments_by_whatever_names():
    """Models call some of them by name, and the names are transformers' own."""
    keys = torch.arange(40.0).view(1, 2, QUERIES, 4)
    by_place, by_name = {}, {}
    expected = pool_in_step().update(keys, -keys, 0, by_place)
    kept = pool_in_step().update(key_states=keys, value_states=-keys, number=0, options=by_name)
    assert all(map(torch.equal, kept, expected)) and by_name.keys() == by_place.keys()
