"""No code knows a family of models, so each of these is a test of the general rule."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from drumline import DrumlineError
from drumline.contact import caches
from drumline.contact.releases import installed, minor
from drumline.kv_cache.owner import change_layers
from drumline.kv_cache.placeholder import counting_tokens, make_placeholders
from drumline.planner.model_profile import layer_names
from drumline.strategies import pipeline_parallel
from launcher import LaunchError

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SIZES = {name: size for name, size in BASE.items() if name != "num_hidden_layers"}
KV = {**BASE, "num_key_value_heads": 2}
HEADS = {**KV, "head_dim": 8}
WINDOW = {"sliding_window": 6}

CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_tied": ("LlamaForCausalLM", {**KV, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {**KV, **WINDOW}),
    "qwen2": ("Qwen2ForCausalLM", KV),
    "qwen3": ("Qwen3ForCausalLM", HEADS),
    "gemma2": ("Gemma2ForCausalLM", {**HEADS, **WINDOW}),
    "gemma3": ("Gemma3ForCausalLM", {**HEADS, **WINDOW, "sliding_window_pattern": 2}),
    "phi3": ("Phi3ForCausalLM", KV),
    "phi": ("PhiForCausalLM", BASE),
    "gpt_neox": ("GPTNeoXForCausalLM", BASE),
    "gptj": (
        "GPTJForCausalLM",
        {**BASE, "n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    ),
    "opt": ("OPTForCausalLM", {**BASE, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": ("BloomForCausalLM", {**BASE, "n_layer": 4, "n_head": 4}),
    "falcon": ("FalconForCausalLM", {**BASE, "new_decoder_architecture": False}),
    "mpt": (
        "MptForCausalLM",
        {**BASE, "d_model": 32, "n_heads": 4, "n_layers": 4, "expansion_ratio": 2},
    ),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", {**BASE, "n_embd": 32, "n_layer": 4, "n_head": 4}),
    "cohere": ("CohereForCausalLM", KV),
    "olmo2": ("Olmo2ForCausalLM", KV),
    "mixtral": (
        "MixtralForCausalLM",
        {**KV, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        {
            **SIZES,
            "num_layers": 4,
            "num_hidden_layers": 8,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "ffn_hidden_size": 48,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 16,
            "moe_topk": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **BASE,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 4},
    ),
    "mamba": ("MambaForCausalLM", {**BASE, "state_size": 8}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            **HEADS,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        {
            **HEADS,
            **WINDOW,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "laurel_rank": 4,
            "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
}

STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "Lfm2ForCausalLM",
        {**KV, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    ),
}

UNUSUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "zamba2": (
        "Zamba2ForCausalLM",
        {
            **BASE,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "num_mem_blocks": 1,
            "mamba_d_state": 8,
            "mamba_headdim": 16,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "adapter_rank": 4,
        },
    ),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            **BASE,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 6,
        },
    ),
    "hrm_text": (
        "HrmTextForCausalLM",
        {**BASE, "head_dim": 8, "num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 2},
    ),
}

STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "prophetnet": (
        "ProphetNetForConditionalGeneration",
        {
            **SIZES,
            **dict.fromkeys(["num_encoder_layers", "num_decoder_layers"], 4),
            **dict.fromkeys(["num_encoder_attention_heads", "num_decoder_attention_heads"], 4),
            **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 48),
            "max_position_embeddings": 64,
            "init_std": 0.4,
            "decoder_start_token_id": 2,
        },
    ),
}
"""Hidden states in which a token is several times, one stream behind the other."""

T5GEMMA = {**HEADS, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}

ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5gemma": (
        "T5GemmaForConditionalGeneration",
        {"encoder": T5GEMMA, "decoder": {**T5GEMMA, "cross_attention_hidden_size": 32}},
    ),
    "fsmt": (
        "FSMTForConditionalGeneration",
        {
            "src_vocab_size": 64,
            "tgt_vocab_size": 64,
            "d_model": 32,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
            "init_std": 0.4,
            "forced_eos_token_id": None,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            **BASE,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 4,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "initializer_factor": 5.0,
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            **BASE,
            "d_model": 32,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
            "init_std": 0.4,
            "decoder_start_token_id": 2,
            "forced_eos_token_id": None,
        },
    ),
}


def second_halves(model: Any) -> dict[str, int]:
    """Rank 1 gets the second half of every stack of layers: encoders and towers too."""
    stacks: dict[str, list[str]] = {}
    for name in layer_names(model):
        if not name.rpartition(".")[2].isdigit():
            continue
        stacks.setdefault(name.rpartition(".")[0], []).append(name)
    remote = [name for names in stacks.values() for name in names[len(names) // 2 :]]
    return {"": 0, **dict.fromkeys(remote, 1)}


def prompt() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def outcomes(model: Any, static: bool = True) -> Iterator[Any]:
    """Greedy over a padded batch, beams, a static cache, and the bare logits."""
    common = {"max_new_tokens": 8, "do_sample": False}
    yield "greedy", model.generate(**prompt(), **common).tolist()
    yield "beams", model.generate(**prompt(), **common, num_beams=3).tolist()
    if static:
        found = model.generate(**prompt(), **common, cache_implementation="static")
        yield "static", found.tolist()


def skip_unless_it_runs(family: str) -> None:
    """With the installed transformers, over several ranks."""
    if family == "gemma3n" and minor(installed("transformers")) < (5, 23):
        pytest.skip("Gemma 3n over several ranks needs transformers 5.23: docs/quickstart.md")


@pytest.mark.parametrize("family", [*CAUSAL, *ENCODER_DECODERS])
def test_the_tokens_of_a_family_equal_those_of_one_process(checkpoints, on_master, family):
    skip_unless_it_runs(family)
    cls, config = {**CAUSAL, **ENCODER_DECODERS}[family]
    plain, path = checkpoints.make(family, cls, **config)
    static = family != "mpt"

    def work(model: Any) -> list[Any]:
        return list(outcomes(model, static))

    assert on_master(path, 2, work, device_map=second_halves(plain)) == work(plain)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "lfm2"])
def test_tokens_that_were_guessed_wrong_are_taken_back_from_windows(checkpoints, on_master, family):
    """A rank's cache has empty layers too, those of other ranks, which transformers cannot crop."""
    cls, config = {**CAUSAL, **STATES}[family]
    plain, path = checkpoints.make(family, cls, **config)
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])

    def work(model: Any) -> Any:
        options = {"max_new_tokens": 12, "do_sample": False, "prompt_lookup_num_tokens": 3}
        return model.generate(ids, **options).tolist()

    device_map = {"": 0, "model.layers.1": 1, "model.layers.2": 2, "model.layers.3": 2}
    assert on_master(path, 3, work, device_map=device_map) == work(plain)


def test_tokens_are_taken_back_from_a_layer_that_has_a_window_and_a_state_elsewhere():
    """Inkling's layers have both, and what stands for them on the master has no state to crop."""
    layer, cache = LinearAttentionAndSlidingWindowAttentionLayer(sliding_window=6), DynamicCache()
    cache.layers = [layer]
    layer.activate_past_recording()
    with counting_tokens():
        layer.update(*make_placeholders(2, 9))
        change_layers(cache, "crop", -2)
    assert layer.get_seq_length() == 7 and layer.keys.shape[-2] == 5


@pytest.mark.parametrize("family", [*UNUSUAL, *STREAMS])
def test_layers_that_do_not_say_which_part_of_the_cache_they_fill_are_counted(
    checkpoints, on_master, family
):
    """The master took the length of the first layer for 0, or for that of all turns together."""
    cls, config = {**UNUSUAL, **STREAMS}[family]
    plain, path = checkpoints.make(family, cls, **config)
    everything = {name: int(bool(name)) for name in ["", *layer_names(plain)]}

    def work(model: Any) -> list[Any]:
        return list(outcomes(model, static=family not in STREAMS))

    assert on_master(path, 2, work, device_map=everything) == work(plain)


def test_turns_of_a_recurrence_here_leave_a_cache_empty_for_turns_elsewhere(checkpoints, on_master):
    """It was refused as filled, which it still is if it came with tokens: each time."""
    cls, config = UNUSUAL["hrm_text"]
    plain, path = checkpoints.make("hrm_text", cls, **config)
    ids = prompt()["input_ids"]

    def work(model: Any) -> list[Any]:
        return list(outcomes(model, static=False))

    def refused(model: Any) -> list[Any]:
        cache = plain(ids).past_key_values
        for _ in range(2):
            with pytest.raises(DrumlineError, match="came with"):
                model(ids[:, :1], past_key_values=cache)
        return work(model)

    device_map = {"": 0, "model.H_module.layers": 1}
    assert on_master(path, 2, refused, device_map=device_map) == work(plain)


def test_layers_that_a_model_adds_to_its_cache_are_added_elsewhere(checkpoints, on_master):
    """Dory has them for later turns of its recurrence: IndexError, on the rank of the layers."""
    if not hasattr(transformers, "DoryForCausalLM"):
        pytest.skip("this transformers has no Dory")
    kinds = ["sliding_attention", "mlp", "full_attention", "mlp"] * 2
    turns = {"n_input_layers": 2, "n_recurrent_layers": 4, "n_output_layers": 2}
    config = {**HEADS, **WINDOW, **turns, "num_hidden_layers": 8, "layer_types": kinds}
    plain, path = checkpoints.make("dory", "DoryForCausalLM", **config)

    def work(model: Any) -> list[Any]:
        output = model(torch.arange(3, 53)[None], use_cache=True)
        cache = next(caches.iter_caches(dict(output)))
        here = [t for t in caches.held_tensors(cache) if type(t) is torch.Tensor and t.dim()]
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in here if model is not plain)
        return [output.logits.argmax(-1).tolist(), *outcomes(model)]

    for device_map in ({"": 0, "model.layers.3": 1}, {"": 1, "model.layers.0": 0}):
        assert on_master(path, 2, work, device_map=device_map) == work(plain)


def test_a_layer_that_fills_another_part_of_the_cache_than_it_says_is_refused(
    checkpoints, on_master, monkeypatch
):
    settle = pipeline_parallel.install_device_hooks

    def mix_up(model: Any, chosen: Any, rank: int, prefetcher: Any) -> None:
        if rank == 1:
            model.model.layers[5].self_attn.layer_idx = 2
        settle(model, chosen, rank, prefetcher)

    monkeypatch.setattr(pipeline_parallel, "install_device_hooks", mix_up)
    plain, path = checkpoints.llama()

    def work(model: Any) -> None:
        said = (
            r"model.layers.5 on rank 1 put keys into the layers \[2\] of the cache, where .* \[5\]"
        )
        with pytest.raises(DrumlineError, match=said):
            model.generate(**prompt(), max_new_tokens=2)

    on_master(path, 2, work, device_map=second_halves(plain))


def test_a_layer_that_counts_other_tokens_than_its_rank_is_refused(
    checkpoints, on_master, monkeypatch
):
    """The masks made here would be of other lengths than the keys over there."""
    update = DynamicLayer.update

    def twice(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        new = [
            torch.cat([each, each], dim=-2) if each.shape[1] > 1 else each
            for each in (keys, values)
        ]
        found = update(self, *new, *args, **kwargs)
        return tuple(each[..., : -keys.shape[-2], :] for each in found)

    plain, path = checkpoints.llama()

    def work(model: Any) -> None:
        with pytest.raises(DrumlineError, match=r"has 18 tokens in layer 3 .* hidden states had 9"):
            model(**prompt())

    monkeypatch.setattr(DynamicLayer, "update", twice)
    on_master(path, 2, work, device_map=second_halves(plain))


def test_one_cache_for_the_tokens_of_a_decoder_and_its_encoder_is_refused_by_name(
    checkpoints, on_master
):
    """The error told of a layer alone, which was as it should be."""
    kind, config = ENCODER_DECODERS["bart"]
    plain, path = checkpoints.make("bart", kind, **config)

    def work(model: Any) -> None:
        ids = prompt()["input_ids"]
        tokens = {"input_ids": ids, "decoder_input_ids": ids[:, :3]}
        with pytest.raises(DrumlineError, match=r"12 tokens .* an EncoderDecoderCache"):
            model(**tokens, past_key_values=DynamicCache())

    on_master(path, 2, work, device_map=second_halves(plain))


def test_hidden_states_that_are_recorded_inside_of_layers_are_refused(checkpoints, on_master):
    """Zamba's hybrid layers have the layer whose output counts inside: half of them was missing."""
    plain, path = checkpoints.make("zamba2", UNUSUAL["zamba2"][0], **UNUSUAL["zamba2"][1])
    everything = {name: int(bool(name)) for name in ["", *layer_names(plain)]}

    def work(model: Any) -> None:
        for _ in range(2):
            with pytest.raises(DrumlineError, match=r"inside of layers, as in model\.layers\.1\."):
                model(**prompt(), output_hidden_states=True)
        model.generate(**prompt(), max_new_tokens=2)

    on_master(path, 2, work, device_map=everything)


def test_hidden_states_may_be_asked_for_after_passes_that_looked_at_none(checkpoints, on_master):
    """They hold tokens of the layers' own here, which stayed away once nobody had looked."""
    names = ("attention_heads", "layers", "ffn_dim")
    sizes = {f"{side}_{name}": 4 for side in ("encoder", "decoder") for name in names}
    config = {**BASE, **sizes, "d_model": 32, "block_size": 8, "num_global_tokens": 4}
    plain, path = checkpoints.make("pegasus_x", "PegasusXForConditionalGeneration", **config)
    ids = prompt()["input_ids"]

    @torch.no_grad()
    def work(model: Any) -> Any:
        inputs = {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}
        for _ in range(4):
            model(**inputs)
        found = model(**inputs, output_hidden_states=True).encoder_hidden_states
        return torch.utils._pytree.tree_map(torch.Tensor.tolist, found)

    assert on_master(path, 2, work, device_map=second_halves(plain)) == work(plain)


def test_what_a_layer_hands_on_is_here_for_a_pass_that_needs_it_first_now(checkpoints, on_master):
    """It was left where it is once nobody had looked at it, and another cache, with which calls are
    sent amid a pass, ended in an error."""
    skip_unless_it_runs("gemma3n")
    plain, path = checkpoints.make("gemma3n", CAUSAL["gemma3n"][0], **CAUSAL["gemma3n"][1])
    ids = prompt()["input_ids"][:1]

    def work(model: Any) -> Any:
        common = {"max_new_tokens": 5, "do_sample": False}
        model.generate(ids, **common)
        return model.generate(ids, **common, guidance_scale=1.5).tolist()

    device_map = {"": 0, "model.layers": 1}
    assert on_master(path, 2, work, device_map=device_map) == work(plain)


def test_what_a_layer_hands_on_is_here_for_each_of_several_threads(checkpoints, on_master):
    """The first passes of some threads used up the trials of a tensor that all were to read."""
    plain, path = checkpoints.make("t5", ENCODER_DECODERS["t5"][0], **ENCODER_DECODERS["t5"][1])
    ids = prompt()["input_ids"][:1]

    def tokens(model: Any, length: int) -> list[list[int]]:
        return model.generate(ids[:, :length], max_new_tokens=5, do_sample=False).tolist()

    def work(model: Any) -> Any:
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(lambda length: tokens(model, length), range(3, 10)))

    blocks = {f"{side}.block.{n}": 1 for side in ("encoder", "decoder") for n in range(3)}
    assert on_master(path, 2, work, device_map={"": 0, **blocks}) == work(plain)


def test_what_layers_hand_on_is_not_asked_for_its_gradient(checkpoints, on_master):
    """A pass with gradients behind some without was an error: it fetched what nothing had read."""
    plain, path = checkpoints.make("t5", ENCODER_DECODERS["t5"][0], **ENCODER_DECODERS["t5"][1])
    ids = prompt()["input_ids"][:1]

    def logits(model: Any) -> torch.Tensor:
        return model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits.detach()

    def work(model: Any) -> Any:
        with torch.no_grad():
            for _ in range(4):
                logits(model)
        return logits(model)

    places = {"": 0, **{f"decoder.block.{n}": 1 for n in range(4)}}
    over_ranks = on_master(path, 2, work, device_map=places)
    torch.testing.assert_close(over_ranks, work(plain), atol=1e-3, rtol=1e-3)


def test_logits_of_routers_are_refused_where_some_would_be_missing(checkpoints, on_master):
    plain, path = checkpoints.make("mixtral", CAUSAL["mixtral"][0], **CAUSAL["mixtral"][1])

    def work(model: Any) -> None:
        with pytest.raises(DrumlineError, match="output_router_logits=True, but these are made"):
            model(**prompt(), output_router_logits=True)

    on_master(path, 2, work, device_map=second_halves(plain))


def test_what_layers_write_into_their_inputs_reaches_the_other_ranks(checkpoints, on_master):
    """RWKV's layers fill one state, each its own part of it, and the model scales their weights."""
    config = {**BASE, "attention_hidden_size": 32, "context_length": 64, "rescale_every": 2}
    plain, path = checkpoints.make("rwkv", "RwkvForCausalLM", **config)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])

    def work(model: Any) -> Any:
        with torch.no_grad():
            state = model(ids, use_cache=True).state
            model(ids[:, :3], state=state, use_cache=True)
        tokens = model.generate(ids, max_new_tokens=8, do_sample=False)
        return tokens.tolist(), [part.tolist() for part in state]

    blocks = [f"rwkv.blocks.{n}" for n in range(4)]
    everywhere = {"": 0, **dict(zip(blocks, [1, 2, 0, 2], strict=True))}
    assert on_master(path, 3, work, device_map=everywhere) == work(plain)
    with pytest.raises(LaunchError, match=r"div_ on rwkv\.blocks\.3.*, which is on disk"):
        on_master(path, 1, work, device_map={"": "cpu", blocks[3]: "disk"})


def test_a_cache_of_a_model_s_own_kind_is_not_changed_by_halves(checkpoints, on_master):
    plain, path = checkpoints.make("minimax", CAUSAL["minimax"][0], **CAUSAL["minimax"][1])
    ids = prompt()["input_ids"]

    def work(model: Any) -> None:
        with pytest.raises(DrumlineError, match=r"MiniMaxCache has a crop\(\) of its own"):
            model(ids).past_key_values.crop(-1)
        with pytest.raises(DrumlineError, match="came with"):
            model(ids[:, :1], past_key_values=plain(ids).past_key_values)

    on_master(path, 2, work, device_map=second_halves(plain))


BF16_ERROR, ROUTED_BF16_ERROR = 0.05, 0.1
"""Of bfloat16 logits against those of float32, as a part of the largest: bounds on rounding.

The larger one is for experts, whose shares of a token are rounded, too.
"""


@pytest.mark.parametrize("family", ["llama_tied", "gemma2", "mixtral", "qwen3_next"])
def test_in_bfloat16_a_family_rounds_as_one_process_does(checkpoints, on_master, family):
    cls, config = CAUSAL[family]
    exact, path = checkpoints.make(family, cls, **config)
    one = type(exact).from_pretrained(path, dtype=torch.bfloat16)

    @torch.no_grad()
    def work(model: Any) -> torch.Tensor:
        return model(**prompt()).logits.float()

    found = on_master(path, 2, work, device_map=second_halves(exact), dtype=torch.bfloat16)
    reference = work(exact)
    assert torch.equal(found, work(one))
    is_same = tokens_of_same_experts(one, exact)
    assert is_same.sum() >= 3
    bound = ROUTED_BF16_ERROR if hasattr(exact.config, "num_experts_per_tok") else BF16_ERROR
    errors = (found - reference).abs().amax(-1)  # of each token
    assert errors[is_same].max() <= bound * reference.abs().max()


@torch.no_grad()
def tokens_of_same_experts(*models: Any) -> torch.Tensor:
    """Of each token of the prompt, whether it and all before it go to the same experts in all.

    A router that is rounded chooses another expert where two are close, and which those are
    depends on the processor: what follows such a token differs by more than a rounding.
    """
    mask = prompt()["attention_mask"].bool()
    of_model: list[list[torch.Tensor]] = []
    for model in models:
        experts: list[torch.Tensor] = []
        routers = [part for name, part in model.named_modules() if name.endswith("mlp.gate")]
        assert bool(routers) == hasattr(model.config, "num_experts_per_tok")
        for router in routers:
            router.register_forward_hook(
                lambda _, args, output, experts=experts: experts.append(output[-1].sort(-1).values)
            )
        model(**prompt())
        of_model.append(experts)
    is_other = torch.zeros_like(mask)
    for one, other in zip(*of_model, strict=True):
        is_other |= (one != other).any(-1).view(mask.shape) & mask
    return mask & (is_other.cumsum(1) == 0)


VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


NARROWING = {
    "image_size": 64,
    "depths": [1, 2, 1, 1],
    "num_heads": [1, 2, 2, 2],
    "num_attention_heads": [1, 2, 2, 2],
    "initializer_range": 0.4,
}
"""Of models whose layers return hidden states of another shape than they are given."""

SWIN = {**NARROWING, "embed_dim": 8, "patch_size": 2, "window_size": 4}


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def bert(model: Any) -> Any:
    return model(**prompt()).logits


def vit(model: Any) -> Any:
    return model(pixel_values=pixels(2, 3, 16, 16)).last_hidden_state


def twice(model: Any) -> Any:
    """The second pass knows what layers return, and with hidden states, more of it is looked at."""
    image = pixels(2, 3, 64, 64)
    logits = model(image).logits
    again = model(image, output_hidden_states=True)
    return torch.cat([each.flatten() for each in (logits, again.logits, *again.hidden_states)])


def vit_mae(model: Any) -> Any:
    return model(pixels(2, 3, 16, 16), noise=pixels(2, 4)).logits


def clip(model: Any) -> Any:
    return model(**prompt(), pixel_values=pixels(2, 3, 16, 16)).logits_per_image


def whisper(model: Any) -> Any:
    """With and without a result that is more than tokens, which has a copy of the cache."""
    audio = pixels(2, 16, 60)
    options = {"input_features": audio, "max_new_tokens": 8, "return_dict_in_generate": True}
    results = [model.generate(**options, output_scores=True, num_beams=beams) for beams in (1, 3)]
    plain = model.generate(input_features=audio, max_new_tokens=8)
    return torch.cat([plain, *[result.sequences for result in results], results[0].scores[3]], 1)


def llava(model: Any) -> Any:
    ids = torch.tensor([[5, 60, 60, 60, 60, 7, 8]])
    image = pixels(1, 3, 16, 16)
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=image,
        max_new_tokens=8,
        num_beams=2,
    )


def qwen3_vl(model: Any) -> Any:
    ids = torch.tensor([[5, 61, 60, 60, 60, 60, 62, 7]])
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == 60).int(),
        pixel_values=pixels(16, 3 * 2 * 8 * 8),
        image_grid_thw=torch.tensor([[1, 4, 4]]),
        max_new_tokens=8,
    )


OTHERS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "bert": ("BertForMaskedLM", BASE, bert),
    "vit": ("ViTModel", {**VISION, "initializer_range": 0.4}, vit),
    "swin": ("SwinForImageClassification", SWIN, twice),
    "pvt": ("PvtForImageClassification", {**NARROWING, "hidden_sizes": [8, 16, 16, 32]}, twice),
    "convnext": (
        "ConvNextForImageClassification",
        {**NARROWING, "hidden_sizes": [8, 8, 16, 16]},
        twice,
    ),
    "vit_mae": (
        "ViTMAEForPreTraining",
        {**VISION, **{f"decoder_{name}": size for name, size in VISION.items()}},
        vit_mae,
    ),
    "clip": ("CLIPModel", {"text_config": BASE, "vision_config": VISION}, clip),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **BASE,
            "d_model": 32,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 16,
            "max_source_positions": 30,
            "max_target_positions": 32,
            "init_std": 0.4,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        whisper,
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {"model_type": "llama", **KV},
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "image_token_index": 60,
            "vision_feature_layer": -2,
            "image_seq_length": 4,
        },
        llava,
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {
                **HEADS,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [2, 1, 1],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "depth": 4,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 4,
                "patch_size": 8,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1, 2],
            },
            "image_token_id": 60,
            "video_token_id": 63,
            "vision_start_token_id": 61,
            "vision_end_token_id": 62,
        },
        qwen3_vl,
    ),
}


@pytest.mark.parametrize("family", OTHERS)
def test_a_family_that_is_not_only_a_decoder_is_exact(checkpoints, on_master, family):
    cls, config, use = OTHERS[family]
    plain, path = checkpoints.make(family, cls, **config)

    @torch.no_grad()
    def work(model: Any) -> Any:
        return use(model).tolist()

    assert on_master(path, 2, work, device_map=second_halves(plain)) == work(plain)
