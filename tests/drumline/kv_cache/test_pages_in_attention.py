"""Keys and values come into pages from a model's code, or from its attention, as before 5.24."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from drumline.contact import transformers_api
from drumline.contact.batching.paged_attention import register_attention
from drumline.contact.batching.paged_batches import NEW_TOKEN
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


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("seed", range(6))
def test_sequences_attend_to_their_own_keys_in_groups_as_alone(seed, window):
    """Of several lengths, with one query or more: in one read of the pages, in whatever order."""
    register_attention()
    attend = transformers_api.continuous_batching().AttentionInterface()["paged_sdpa"]
    draw = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 5, (9,), generator=draw)
    counts[torch.rand(9, generator=draw) < 0.7] = 1  # as most have in a step
    lengths = counts + torch.randint(0, 40, (9,), generator=draw)
    whole = [torch.randn(2, 2, length, 4, generator=draw) for length in lengths.tolist()]
    pool = PagedPool([0], [2 + int(lengths.sum())], [window], True)
    places = torch.split(2 + torch.randperm(int(lengths.sum()), generator=draw), lengths.tolist())
    ends = functional.pad(counts.cumsum(0), (1, 0))
    before = [
        length - count for length, count in zip(lengths.tolist(), counts.tolist(), strict=True)
    ]

    old = torch.cat([pair[:, :, :n] for pair, n in zip(whole, before, strict=True)], 2)
    write = torch.cat([place[:n] for place, n in zip(places, before, strict=True)])
    nothing = torch.tensor([], dtype=torch.long)
    pool.begin_step(torch.tensor([0, len(write)]), nothing, write, torch.tensor([0, len(write)]))
    pool.update(old[0][None], old[1][None], 0, {})

    new = torch.cat([pair[:, :, n:] for pair, n in zip(whole, before, strict=True)], 2)
    reads, num_keys = [], []
    for place, n, count in zip(places, before, counts.tolist(), strict=True):
        first = max(0, n - window + 1) if window else 0
        brought = torch.full((count,), NEW_TOKEN) if window else place[n:]
        reads.append(torch.cat([place[first:n], brought]))
        num_keys.append(len(reads[-1]))
    write = torch.cat([place[n:] for place, n in zip(places, before, strict=True)])
    key_ends = functional.pad(torch.tensor(num_keys).cumsum(0), (1, 0))
    pool.begin_step(ends, torch.cat(reads), write, key_ends)
    arguments = {}
    both = pool.update(new[0][None], new[1][None], 0, arguments)
    query = torch.randn(1, 4, int(counts.sum()), 4, generator=draw)
    module = nn.Module()
    module.num_key_value_groups = 2
    output, _ = attend(module, query, *both, None, **arguments)

    for i, (keys, values) in enumerate(whole):
        own, num_all, num_own = query[0, :, ends[i] : ends[i + 1]], int(lengths[i]), int(counts[i])
        is_seen = torch.ones(num_own, num_all, dtype=torch.bool).tril(num_all - num_own)
        if window:
            is_seen = is_seen.triu(num_all - num_own - window + 1)
        pair = [tensor.repeat_interleave(2, 0) for tensor in (keys, values)]
        alone = functional.scaled_dot_product_attention(own, *pair, attn_mask=is_seen)
        torch.testing.assert_close(output[0, ends[i] : ends[i + 1]].transpose(0, 1), alone)
