"""Pages of continuous batches take the memory that ranks have for them, and give it back."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from threading import Event

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import drumline
from drumline.contact.batching.batch_settings import Workload
from drumline.kv_cache.paged_pool import _zeros
from drumline.pipeline.paged_generation import tried_manager
from tests.drumline.conftest import LLAMA
from tests.drumline.test_families import CAUSAL

GREEDY = GenerationConfig(do_sample=False, max_new_tokens=12, eos_token_id=2, pad_token_id=0)
SIZED = {"page_size": 8, "max_memory_percent": 1.0, "max_requests_per_batch": 1 << 20}
FREE_NBYTES = 1 << 22


def limit_memory(model):
    """Leave every place of a model this much for pages."""
    device_map = model.device_map
    for place in device_map.free_nbytes:
        device_map.free_nbytes[place] = device_map.used(place) + FREE_NBYTES


@pytest.mark.parametrize("family", ["llama_tied", "deepseek_v3"])
def test_blocks_have_the_bytes_that_pools_take_and_a_copy_of_the_largest_layer(
    checkpoints, on_master, family
):
    """A pool that filled all that was left had none for what each layer reads back from it; and
    keys of DeepSeek are wider than its config's head_dim says."""
    cls, config = CAUSAL[family]
    plain, path = checkpoints.make(family, cls, **config)
    page_size = 8

    def work(model):
        ranks = model._batched_ranks
        nbytes = ranks._nbytes([0] * model.config.num_hidden_layers, [page_size])
        return sum(nbytes.values())

    cache = plain(torch.tensor([list(range(page_size))])).past_key_values
    layers = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    assert on_master(path, 2, work) == sum(layers) + 2 * max(layers)


def test_pages_take_memory_as_they_are_written():
    """A server of a small model filled 12 GiB with zeros before its first answer."""

    def resident_nbytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_nbytes()
    pages = _zeros(torch.empty(0, dtype=torch.bfloat16), 1 << 20, 8, 16)  # 256 MiB
    pages[5] = 1
    assert pages[5].eq(1).all() and not pages[6].any() and pages.dtype == torch.bfloat16
    assert resident_nbytes() - before < 64 << 20


def test_a_manager_that_was_stopped_keeps_no_pages_on_any_rank(checkpoints, on_master):
    """They stayed until the manager was dropped, and a next one had no memory beside them."""

    def work(model):
        manager = model.init_continuous_batching(GREEDY)
        manager.start()
        manager.add_request([5])
        manager.get_result(timeout=30)
        pools = weakref.ref(manager.tables.pools)
        manager.stop()
        assert pools() is None and all(m.tables is None for m in model._batched_ranks._sized)

    on_master(checkpoints.llama()[1], 2, work)


def test_a_manager_keeps_no_pages_though_no_thread_had_them_when_it_was_stopped(
    checkpoints, on_master
):
    """Another one was told to stop those that had been stopped."""

    def work(model):
        manager = model.init_continuous_batching(GREEDY)
        manager.warmup()
        manager.stop()
        assert manager.tables is None
        make, is_made, may_go_on = manager._create_batch_processor, Event(), Event()

        def make_and_wait():
            processor = make()
            is_made.set()
            may_go_on.wait(20)
            return processor

        manager._create_batch_processor = make_and_wait
        manager.start()
        assert is_made.wait(20)
        thread = manager._generation_thread
        manager.stop(block=False)
        may_go_on.set()
        thread.join(20)
        assert manager.tables is None

    on_master(checkpoints.llama()[1], 2, work)


@pytest.mark.parametrize("num_managers", [1, 2, 3, 7])
def test_managers_have_the_memory_that_others_leave_them(checkpoints, on_master, num_managers):
    """Each was given all of it, or its share, however many pages there were already."""

    def work(model):
        ranks = model._batched_ranks
        limit_memory(model)
        managers = []
        for _ in range(num_managers):
            share = 1 / num_managers
            managers.append(tried_manager(model, None, 1 << 10, share, 0, **SIZED))
        sizes = [manager.tables.num_blocks for manager in managers]
        assert {*sizes} == {sizes[0]} and sizes[0] > 100
        more = ContinuousBatchingConfig(**SIZED, num_blocks=num_managers)
        with pytest.raises(drumline.PlanError, match=r"stop\(\) other managers"):
            ranks.num_blocks(more, None)
        managers[0].batch_processor = None
        managers[0].release()
        return ranks.num_blocks(ContinuousBatchingConfig(**SIZED), Workload()) >= sizes[0]

    assert on_master(checkpoints.llama()[1], 2, work)


@pytest.mark.parametrize("num_full", [0, 1, 2])
def test_the_pages_of_layers_with_short_windows_fit_into_the_memory_for_them(
    checkpoints, on_master, num_full
):
    """Of a block as many tokens were counted as the window has; the pools have whole pages."""
    types = ["full_attention"] * num_full + ["sliding_attention"] * (6 - num_full)
    config = {"use_sliding_window": True, "sliding_window": 4, "layer_types": types}
    name = f"short-windows-{num_full}"
    _, path = checkpoints.make(name, "Qwen2ForCausalLM", **{**LLAMA, **config})

    def work(model):
        limit_memory(model)
        manager = model.init_continuous_batching(GREEDY, ContinuousBatchingConfig(**SIZED))
        manager.warmup()
        own, num_sectors = manager.tables.pools.own, manager.tables.num_sectors
        manager.start()
        manager.add_request([5, 6, 7])
        manager.get_result(timeout=30)
        pages = [sum(page.nbytes for page in pair) for pair in own.layers.values()]
        manager.stop()
        # Two sectors are no request's, and a host gives no memory for what is not written.
        return (sum(pages) + max(pages)) * num_sectors / (num_sectors + 2)

    assert FREE_NBYTES * 0.9 < on_master(path, 2, work) <= FREE_NBYTES
