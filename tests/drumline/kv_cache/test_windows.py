"""Layers with a window keep it, and not all of a long prompt until the next token."""

from __future__ import annotations

import pytest
import torch

import drumline
import launcher
from drumline.contact.caches import held_tensors
from drumline.kv_cache.owner import CacheRegistry

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
}
IDS = torch.randint(3, 60, (2, 200), generator=torch.Generator().manual_seed(5))


def memory(caches):
    """The bytes that tensors in caches keep: those of other layers are on other ranks."""
    storages = [t.untyped_storage() for t in held_tensors(caches) if t.dim() and not t.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(
    ("nprocs", "options", "num_tokens"),
    [
        (1, {"max_memory": [1 << 30]}, 200),
        (1, {"max_memory": [1 << 30]}, 12),
        (2, {"max_memory": [1 << 30] * 2}, 200),
        (4, {"tp": 2, "device_map": "auto"}, 200),
        (2, {"tp": 2}, 200),
    ],
)
def test_a_prompt_beyond_the_windows_is_not_kept(
    checkpoints, monkeypatch, nprocs, options, num_tokens
):
    """A layer kept the keys of all 200 tokens, of which its window has 7, and later those of 12,
    as ranks that all make the same calls did of any number."""
    plain, path = checkpoints.make("windows", "MistralForCausalLM", **SIZES)
    ids, registries = IDS[:, :num_tokens], []

    def noted(self, config):
        registries.append(self)
        self.config, self.by_number, self.pairs = config, {}, {}

    monkeypatch.setattr(CacheRegistry, "__init__", noted)

    def rank():
        torch.set_num_threads(1)
        with drumline.load(path, **options) as model, torch.no_grad():
            output = model(ids, use_cache=True)
            own = [layer for layer in output.past_key_values.layers if type(layer.keys) is tensor]
            elsewhere = [[*registry.by_number.values()] for registry in registries]
            kept = memory([own, elsewhere])
            tokens = model.generate(ids, max_new_tokens=8, do_sample=False).tolist()
            return output.logits, kept, tokens

    tensor = torch.Tensor
    logits, kept, tokens = launcher.launch(rank, nprocs, launcher="threads", timeout_s=60)[0]
    torch.testing.assert_close(logits, plain(ids).logits, rtol=1e-4, atol=1e-4)
    assert tokens == plain.generate(ids, max_new_tokens=8, do_sample=False).tolist()
    share = 2 if options == {"tp": 2} else 1  # each rank has one of two heads
    assert kept == 4 * 2 * 2 * 2 * 7 * 8 * 4 / share
