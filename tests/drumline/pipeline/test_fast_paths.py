"""Fast paths happen with the installed transformers, and it is told where they do not."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from transformers import GenerationMixin, masking_utils
from transformers.core_model_loading import Transpose, WeightConverter

from drumline.contact import cache_layers, model_parts, transformers_api
from drumline.contact.passes import MASKS_OF_WINDOWS
from drumline.pipeline import fast_paths
from tests.conftest import ROOT


@pytest.fixture
def fresh():
    """As in a process that has not loaded a model yet."""

    def clear():
        fast_paths.check.cache_clear()
        fast_paths.warn_if_off.cache_clear()
        cache_layers.static_has_counter.cache_clear()

    clear()
    yield
    clear()


def told() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fast_paths.warn_if_off()
        fast_paths.warn_if_off()
    return [str(one.message) for one in caught if "transformers" in str(one.message)]


def test_all_fast_paths_happen_and_random_numbers_stay_as_they_were(fresh):
    before = torch.get_rng_state()
    assert told() == []
    assert fast_paths.check() == dict.fromkeys(fast_paths.FAST_PATHS, True)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_release_that_passes_something_new_is_told_once_with_what_is_off(fresh, monkeypatch):
    """transformers 5.24 passed the cache by another name: all was slower, and nothing said."""
    prepare = GenerationMixin.prepare_inputs_for_generation

    def prepare_with_more(self, *args, **kwargs):
        return {**prepare(self, *args, **kwargs), "phase": "prefill"}

    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", prepare_with_more)
    (line,) = told()
    assert line.startswith("transformers 5.") and "drumline doctor" in line
    assert "groups of rows, chunks of long prompts do not happen" in line


def test_weights_that_a_release_computes_of_stored_ones_are_told(fresh, monkeypatch):
    """They would be copied where they were mapped: loading takes the time and memory of all."""
    turned = WeightConverter(["q_proj.weight"], ["q_proj.weight"], operations=[Transpose()])
    monkeypatch.setattr(transformers_api, "get_model_conversion_mapping", lambda model: [turned])
    (line,) = told()
    assert ": mapped weights do not happen" in line


def test_a_static_layer_that_counts_in_python_is_told(fresh, monkeypatch):
    """A CUDA graph would write each token in the place of the first one."""
    start = cache_layers.StaticLayer.__init__

    def start_with_counter(self, *args, **kwargs):
        start(self, *args, **kwargs)
        self.filled = 0

    monkeypatch.setattr(cache_layers.StaticLayer, "__init__", start_with_counter)
    (line,) = told()
    assert ": static layers do not happen" in line


def test_masks_of_windows_by_another_name_are_told(fresh, monkeypatch):
    """Models with windows would have their prompts whole, and the tiny one has none."""
    (name, _) = MASKS_OF_WINDOWS
    monkeypatch.delattr(masking_utils, name)
    (line,) = told()
    assert ": chunks of long prompts do not happen" in line


def test_layers_that_no_longer_say_their_number_are_told(fresh, monkeypatch):
    """Prompts stayed whole, and memory for pages was taken to be without an end."""
    monkeypatch.setattr(model_parts, "number_attribute", lambda: "")
    (line,) = told()
    assert ": chunks of long prompts do not happen" in line


@pytest.mark.parametrize("method", ["crop", "reorder_cache", "batch_select_indices"])
def test_a_method_that_caches_no_longer_have_is_told(fresh, monkeypatch, method):
    """generate() would change placeholders by another name, and the script be blamed for it."""
    monkeypatch.delattr(transformers_api.Cache, method)
    (line,) = told()
    assert ": changes of caches do not happen" in line


def test_a_check_that_fails_does_not_keep_a_model_from_being_loaded(fresh, monkeypatch):
    monkeypatch.delattr(GenerationMixin, "generate")
    (line,) = told()
    assert "groups of rows" in line


@pytest.mark.timeout(300)
def test_a_cache_that_transformers_renames_once_more_is_found_and_all_is_as_fast(tmp_path):
    """The name changed in 5.24 and may again: nothing hangs on it, for callers and models.

    Nor on attributes of caches and layers: every generation raised AttributeError, or a static
    cache had room for one token on other ranks."""
    program = ROOT / "tests/drumline/programs/renamed_cache.py"
    done = subprocess.run(
        [sys.executable, program, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # it is not installed beside every release
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["renamed"] and answer["same"] and answer["guessed"] and answer["pair"]
    assert answer["guessed over states"] and answer["batched"] and answer["numbers"]
    batch, prompt = [2, 4, 5], [3]  # two generations, the groups of each; chunks
    passes = [8] * (len(answer["splits"]) - 4)  # beams, and a cache of the script by each name
    assert sorted(answer["splits"]) == sorted([*batch, *prompt, *passes]) and len(passes) > 2
    assert all(answer["fast_paths"].values())
