"""Inner models, configs and hooks of a model of transformers; and a tiny model to try."""

from __future__ import annotations

import functools
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


def may_return(module: Any, output: str) -> bool:
    """True if a pass can return an output such as "attentions": models say what they record, and
    other parts that make it take an argument for it. Mamba's do neither, and ignore it."""
    parts = [*module.modules()]
    recorded = [key for part in parts if is_model(part) for key in part.can_record_outputs]
    forwards = {type(part).forward for part in parts}
    takes = any(f"output_{output}" in inspect.signature(f).parameters for f in forwards)
    return takes or any(key.endswith(output) for key in recorded)


def recorded_output(hook: Callable[..., Any]) -> str | None:
    """The name of the output that a hook of transformers' own records; None for other hooks."""
    if not is_of_transformers(str(getattr(hook, "__module__", ""))):
        return None
    return str(inspect.getclosurevars(hook).nonlocals.get("key", "hidden_states"))


def _tiny_on_meta(num_layers: int) -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    ends: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    with torch.device("meta"):
        return api.tiny_llama(num_hidden_layers=num_layers, **sizes, **heads, **ends)


@functools.cache
def number_attribute() -> str:
    """The attribute in which attention says which layer of a cache is its own; "" if none does."""
    parts = _tiny_on_meta(2).modules()
    first, second = next(part for part in parts if isinstance(part, torch.nn.ModuleList))
    for one, other in zip(first.modules(), second.modules(), strict=True):
        for name, value in vars(one).items():
            if type(value) is int and (value, getattr(other, name)) == (0, 1):
                return name
    return ""


def layer_number(module: Any) -> int:
    """The layer of the cache that a module says it has, or -1."""
    number = getattr(module, number_attribute(), None)
    return number if isinstance(number, int) else -1


def build_tiny() -> Any:
    """A causal model of one layer. Random numbers of the script are not used up."""
    model = _tiny_on_meta(1)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        values = torch.linspace(-1, 1, tensor.numel()).sin() * (tensor.dim() + 1)
        tensor.data.copy_(values.view(tensor.shape))
    return model.eval()
