"""A tiny config of any class of causal models, from its default config."""

from __future__ import annotations

import re
from typing import Any

SIZES = (
    (r"vocab_size|vocab_size_per_layer_input", 64),
    (
        r"hidden_size|d_model|n_embd|dim_model|embedding_size|embed_dim|attention_hidden_size"
        r"|lru_width|emb_dim",
        32,
    ),
    (r"hidden_size_per_layer_input", 8),
    (r".*(intermediate|ffn|inner|d_ff).*", 48),
    (r"(num_)?((en|de)coder_)?(hidden_)?layers|n_layers?|num_(en|de)coder_layers", 4),
    (r"(num_|(num_)?(en|de)coder_)attention_heads|n_heads?|num_heads", 4),
    (r"num_key_value_heads|num_kv_heads", 2),
    (r"head_dim|attention_head_dim|kv_channels", 8),
    (r"sliding_window|window_size|attention_window_size|attention_chunk_size", 6),
    (r".*lora_rank", 16),
    (r"(qk_nope|v|qk_rope|qk|index|linear_.*)_head_dim|rotary_dim", 8),
    (r"(num|n)_.*experts|num_experts", 4),
    (r".*per_tok|.*top_?k", 2),
    (r"n_group|topk_group", 1),
    (r"max_position_embeddings|n_positions|context_length", 128),
    (r".*state_size|.*d_state", 8),
)
"""Patterns of fields with whole numbers, and the most that a tiny config has there."""


def tiny_config(kind: type[Any]) -> Any:
    """The default config of a class of models with few layers, which are narrow."""
    return kind.config_class(**_tiny_fields(kind.config_class().to_dict()))


def _tiny_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are to differ, of the configs in a config too."""
    sizes: dict[str, Any] = {
        name: min(value, size)
        for name, value in fields.items()
        if type(value) is int and value > 1
        for size in [_tiny_size(name)]
        if size is not None
    }
    heads = [sizes.get(name) for name in ("num_attention_heads", "num_key_value_heads")]
    if None not in heads and fields["num_attention_heads"] == fields["num_key_value_heads"]:
        sizes["num_key_value_heads"] = heads[0]  # of latents each head has its own
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    sizes |= {name: 1 for name in tokens if isinstance(fields.get(name), int)}
    if isinstance(layer_types := fields.get("layer_types"), list):
        kinds = list(dict.fromkeys(layer_types))
        sizes["layer_types"] = [kinds[number % len(kinds)] for number in range(4)]
    inner = {n: v for n, v in fields.items() if isinstance(v, dict) and "model_type" in v}
    return sizes | {
        name: {key: v for key, v in value.items() if key != "per_layer_config"}
        | _tiny_fields(value)
        for name, value in inner.items()
    }


def _tiny_size(name: str) -> int | None:
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
