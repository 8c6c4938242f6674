"""Arguments of a pass of a transformers model: those that have a row for each sequence, and so on.

An argument that is not listed may couple the rows of a batch, so such a batch is left whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from drumline.contact.caches import cache_key

BY_ROW = {"input_ids": (2,), "attention_mask": (2, 4), "position_ids": (2,), "inputs_embeds": (3,)}
"""Tensors with a row for each sequence, and how many dimensions they may have."""

SAME_FOR_ALL = {
    "use_cache",
    "logits_to_keep",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
}

MASKS_OF_WINDOWS = ("create_sliding_window_causal_mask", "create_chunked_causal_mask")


def masks_windows(code: Mapping[str, Any]) -> bool:
    """True if a model's module makes the masks of layers that keep a window of tokens.

    Where they are not known by name, prompts of such models stay whole."""
    return any(name in code for name in MASKS_OF_WINDOWS)


def undivided_inputs(inputs: Mapping[str, Any], batch: int) -> list[str]:
    """The inputs that are not sure to have a row for each sequence, or to be the same for all."""
    cache = cache_key(inputs)
    return [
        name
        for name, value in inputs.items()
        if name != cache and not _is_divisible(name, value, batch)
    ]


def _is_divisible(name: str, value: Any, batch: int) -> bool:
    if value is None:
        return True
    if name in BY_ROW and isinstance(value, torch.Tensor):
        may_be_shared = name == "position_ids" and value.shape[:1] == (1,)
        return value.dim() in BY_ROW[name] and (value.shape[0] == batch or may_be_shared)
    return name in SAME_FOR_ALL and not isinstance(value, torch.Tensor)


def unread_inputs(inputs: Mapping[str, Any], batch: int) -> list[str]:
    """The undivided inputs that have no place in the lists above at all."""
    return [
        name
        for name in undivided_inputs(inputs, batch)
        if name not in BY_ROW and name not in SAME_FOR_ALL
    ]
