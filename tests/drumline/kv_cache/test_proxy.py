"""What the master counts in place of keys and values, without any rank that has them."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from drumline.errors import DrumlineError
from drumline.kv_cache.placeholder import HeadSizes, layer_origin
from drumline.kv_cache.proxy import (
    account_tokens,
    cache_number,
    prepare_next_token,
    show_origins,
)


class CacheOpLog:
    """Writes nothing down."""

    def record(self, name: str, *arguments: Any) -> None: ...
    def forget(self, number: int) -> None: ...

    def next_cache(self) -> int:
        return 1


def lengths(cache: DynamicCache) -> set[tuple[int, int]]:
    """Rows and tokens of its layers."""
    return {(layer.keys.shape[0], layer.get_seq_length()) for layer in cache.layers}


@pytest.fixture
def cache() -> DynamicCache:
    """Of two layers with five tokens of two rows, the last of them a token of its own."""
    cache = DynamicCache()
    cache_number(cache, CacheOpLog())
    for tokens in (4, 1):
        account_tokens(cache, (0, 1), torch.empty(2, tokens, 8))
    return cache


def test_what_stands_for_remote_keys_has_their_shape_and_says_where_they_are(cache):
    """print() of them raised, and their shape had one head of width one."""
    origins = {0: layer_origin(1, HeadSizes(4, 8), HeadSizes(4, 6)), 1: layer_origin(2)}
    show_origins(cache, origins)
    keys, values = cache.layers[0].keys, cache.layers[0].values
    assert (keys.shape, values.size(), keys.size(-1)) == ((2, 4, 5, 8), (2, 4, 5, 6), 8)
    assert keys[:, 1:3, -1:].shape == (2, 2, 1, 8)
    assert f"{keys}" == str(keys) == "<keys or values of shape (2, 4, 5, 8) on rank 1>"
    assert repr(keys[0]) == "<keys or values of shape (4, 5, 8) on rank 1>"
    assert "rank 2" in repr(cache.layers[1].keys)
    cache.crop(-2)
    account_tokens(cache, (0, 1), torch.empty(2, 1, 8), origins=origins)
    cache.batch_select_indices(torch.tensor([0, 1, 1]))
    later, twin = cache.layers[0].values, copy.deepcopy(cache).layers[0].values
    assert later.shape == twin.shape == (3, 4, 4, 6) and "rank 1" in repr(twin)
    with pytest.raises(DrumlineError, match="another rank"):
        keys.sum()


def test_layers_of_one_rank_share_what_stands_for_their_keys(cache):
    """So that a token of many layers is counted once."""
    origins = {0: layer_origin(1, HeadSizes(4, 8), HeadSizes(4, 8))}
    origins[1] = layer_origin(1, HeadSizes(4, 8), HeadSizes(4, 8))
    show_origins(cache, origins)
    account_tokens(cache, (0, 1), torch.empty(2, 1, 8), origins=origins)
    first, second = cache.layers
    assert first.keys is second.keys is first.values and first.keys.shape == (2, 4, 6, 8)


def test_the_next_token_is_counted_with_what_was_made_ahead(cache):
    prepare_next_token(cache)
    ((_, ahead),) = cache.grown.values()
    account_tokens(cache, (0, 1), torch.empty(2, 1, 8))
    assert cache.layers[0].keys is cache.layers[1].keys is ahead.keys
    assert lengths(cache) == {(2, 6)}


def test_a_log_whose_failure_holds_a_cache_is_freed():
    """The error of a lost rank holds the frames of generate(), and kept every driver alive."""
    cache, log = DynamicCache(), CacheOpLog()
    cache_number(cache, log)
    log.failure = cache
    left = weakref.ref(log)
    del cache, log
    gc.collect()
    assert left() is None


def test_a_cache_of_code_beside_transformers_is_refused():
    """What its model puts there outside of the layers would be missing on other ranks."""

    class OwnCache(DynamicCache):
        __module__ = "transformers_modules.own.modeling_own"

        def __init__(self) -> None:
            super().__init__()

    with pytest.raises(DrumlineError, match="a OwnCache cannot be kept on other ranks"):
        cache_number(OwnCache(), CacheOpLog())


def test_what_was_made_ahead_is_left_where_something_else_comes(cache):
    prepare_next_token(cache)
    account_tokens(cache, (0, 1), torch.empty(2, 3, 8))
    assert lengths(cache) == {(2, 8)}
    prepare_next_token(cache)
    cache.crop(-5)
    account_tokens(cache, (0, 1), torch.empty(2, 1, 8))
    assert lengths(cache) == {(2, 4)}
    prepare_next_token(cache)
    cache.batch_select_indices(torch.tensor([1]))
    account_tokens(cache, (0, 1), torch.empty(1, 1, 8))
    assert lengths(cache) == {(1, 5)}
