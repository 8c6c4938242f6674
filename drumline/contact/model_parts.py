"""Inner models, configs and hooks of a model of transformers; and a tiny model to try."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from drumline.contact import transformers_api as api
from drumline.contact.caches import is_of_transformers

VOCABULARY = 16
"""Tokens of the tiny model."""


def is_model(module: Any) -> bool:
    return isinstance(module, api.PreTrainedModel)


def recorded_output(hook: Callable[..., Any]) -> str | None:
    """The name of the output that a hook of transformers' own records; None for other hooks."""
    if not is_of_transformers(str(getattr(hook, "__module__", ""))):
        return None
    return str(inspect.getclosurevars(hook).nonlocals.get("key", "hidden_states"))


def build_tiny() -> Any:
    """A causal model of one layer. Random numbers of the script are not used up."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": VOCABULARY}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    ends: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    with torch.device("meta"):
        model = api.tiny_llama(**sizes, **heads, **ends)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        values = torch.linspace(-1, 1, tensor.numel()).sin() * (tensor.dim() + 1)
        tensor.data.copy_(values.view(tensor.shape))
    return model.eval()
