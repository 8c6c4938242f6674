"""The first pass takes a trip round the ring for each kind of layers, where it took one for each.

The first token of 18 layers over links of 80 ms came after 5.6 s, and those of later calls in 0.4.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.minimax.modeling_minimax import MiniMaxAttention

import drumline
import launcher
from drumline import DrumlineError
from drumline.contact.caches import is_cache
from drumline.core.layer_kinds import kinds_of
from drumline.errors import StageError
from drumline.planner.model_profile import layer_names
from tests.drumline.conftest import LLAMA
from tests.drumline.test_families import CAUSAL, ENCODER_DECODERS, HEADS

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])
DEEP: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("LlamaForCausalLM", {**LLAMA, "num_hidden_layers": 12}, 1),
    "gemma2": ("Gemma2ForCausalLM", {**HEADS, "num_hidden_layers": 12, "sliding_window": 6}, 2),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {**CAUSAL["deepseek_v3"][1], "num_hidden_layers": 12, "first_k_dense_replace": 2},
        2,
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            **CAUSAL["qwen3_next"][1],
            "num_hidden_layers": 12,
            "layer_types": ["linear_attention", "full_attention"] * 6,
        },
        2,
    ),
    "bart": (
        "BartForConditionalGeneration",
        {**ENCODER_DECODERS["bart"][1], "encoder_layers": 6, "decoder_layers": 6},
        2,
    ),
}
"""By family: a model with twelve layers of how many kinds."""


def all_layers_away(model: Any) -> dict[str, int]:
    """The layers on ranks 1 and 2, all else on rank 0."""
    names = [*layer_names(model)]
    return {"": 0, **{name: 1 + (at >= len(names) // 2) for at, name in enumerate(names)}}


def generated(model: Any) -> list[list[int]]:
    return model.generate(IDS, max_new_tokens=4, do_sample=False).tolist()


@pytest.mark.parametrize("family", DEEP)
def test_the_first_generation_asks_one_layer_of_each_kind(checkpoints, on_master, family):
    cls, config, num_kinds = DEEP[family]
    plain, path = checkpoints.make(f"deep_{family}", cls, **config)

    def work(model: Any) -> Any:
        trips, tokens = [], []
        for _ in range(2):
            before = model.traffic[0]
            tokens.append(generated(model))
            trips.append(model.traffic[0] - before)
        return tokens, trips

    tokens, (first, second) = on_master(path, 3, work, device_map=all_layers_away(plain))
    assert tokens == [generated(plain)] * 2
    assert first - second <= num_kinds


def test_a_layer_that_returns_other_than_its_kind_is_asked_itself(
    checkpoints, on_master, monkeypatch
):
    """It would be a wrong result if nobody compared."""
    forward = LlamaDecoderLayer.forward

    def idle(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, hidden_states, *args, **kwargs)
        return hidden_states if self.self_attn.layer_idx == 4 else output

    plain, path = checkpoints.llama()
    monkeypatch.setattr(LlamaDecoderLayer, "forward", idle)

    def work(model: Any) -> Any:
        with pytest.raises(StageError, match=r"layers\.4 returned .* where layers like it have"):
            generated(model)
        return generated(model)

    assert on_master(path, 3, work, device_map=all_layers_away(plain)) == generated(plain)


def test_a_layer_that_fills_less_of_the_cache_than_its_kind_is_asked_itself(
    checkpoints, on_master, monkeypatch
):
    """Rank 0 counts its tokens before the reply, and masks are made of the counts."""
    forward = MiniMaxAttention.forward

    def forgetful(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self.layer_idx >= 2:
            kwargs = {name: None if is_cache(each) else each for name, each in kwargs.items()}
        return forward(self, hidden_states, *args, **kwargs)

    plain, path = checkpoints.make("minimax", CAUSAL["minimax"][0], **CAUSAL["minimax"][1])
    monkeypatch.setattr(MiniMaxAttention, "forward", forgetful)

    def work(model: Any) -> Any:
        with pytest.raises(DrumlineError, match=r"layers \[\] of the cache, where .*kind"):
            generated(model)
        return generated(model)

    assert on_master(path, 3, work, device_map=all_layers_away(plain)) == generated(plain)


def test_layers_with_other_settings_are_of_another_kind(checkpoints):
    plain, _ = checkpoints.llama()
    layers = {name: plain.get_submodule(name) for name in layer_names(plain)}
    assert len(set(kinds_of(layers).values())) == 1
    attention: Any = layers["model.layers.2"].self_attn
    attention.is_causal = not attention.is_causal
    try:
        assert len(set(kinds_of(layers).values())) == 2
    finally:
        attention.is_causal = not attention.is_causal


class Pool(nn.Linear):
    """Puts out one token, which has the shape of its input where that is one token too."""

    def forward(self, hidden: Any) -> Any:
        return super().forward(hidden).mean(1, keepdim=True)


@pytest.mark.parametrize("first", [5, 1])
def test_an_output_may_have_the_shape_of_the_input_by_chance(first):
    """Every call with the other number of tokens was an error from then on."""

    def work(model: Any) -> Any:
        def pooled(tokens: int) -> list[int]:
            return [*model(torch.ones(1, tokens, 4)).shape]

        shapes = [pooled(first)]
        if first == 1:
            with pytest.raises(StageError, match=r"1 returned .* call the model again"):
                pooled(5)
        return shapes + [pooled(tokens) for tokens in (5, 1, 7)]

    def rank() -> Any:
        model = nn.Sequential(nn.Linear(4, 4), Pool(4, 4)).requires_grad_(False)
        with drumline.dispatch(model, {"0": 0, "1": 1}) as split, torch.no_grad():
            return work(split)

    assert launcher.launch(rank, nprocs=2, launcher="threads", timeout_s=60)[0] == [[1, 1, 4]] * 4
