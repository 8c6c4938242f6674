"""Arguments and outputs of a pass of a transformers model: which have a row for each sequence.

An argument that is not listed may couple the rows of a batch, so such a batch is left whole.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from drumline.contact import transformers_api as api
from drumline.contact.caches import cache_key, is_cache
from drumline.errors import DrumlineError

Output: TypeAlias = api.ModelOutput
"""A dict of a model's outputs, each with a field of its own."""

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


def knows_masks_of_windows(code: Mapping[str, Any]) -> bool:
    """True if transformers still has all of them, where this module of a model has its masks."""
    modules = {sys.modules.get(getattr(value, "__module__", "")) for value in code.values()}
    return all(any(hasattr(m, name) for m in modules) for name in MASKS_OF_WINDOWS)


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


def text_inputs(model: Any, batch: int, length: int) -> dict[str, Any]:
    """Arguments of a pass as generate() makes for a prompt, on meta: what a model has for text."""
    ids = torch.empty(batch, length, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    if model.main_input_name == "input_ids":
        inputs["input_ids"] = ids
    else:  # sounds and images: what the encoder makes of them stands for itself
        width = model.config.get_text_config(decoder=True).hidden_size
        inputs["encoder_outputs"] = (torch.empty(batch, length, width, device="meta"),)
    parameters = inspect.signature(model.forward).parameters.values()
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    names = {each.name for each in parameters}
    return {name: value for name, value in inputs.items() if takes_all or name in names}


def without_tokenizers(inputs: Mapping[str, Any], forward: Callable[..., Any]) -> dict[str, Any]:
    """The inputs that are not tokenizers or processors: generate() hands on to every layer the one
    that it looks for stop strings with. Those that `forward` has a parameter for stay."""
    names = {name for name, value in inputs.items() if hasattr(value, "decode")}
    if names:
        names -= inspect.signature(forward).parameters.keys()
    return {name: value for name, value in inputs.items() if name not in names}


def is_output(value: Any) -> bool:
    return isinstance(value, api.ModelOutput)


def join_rows(outputs: Sequence[Any], cache: Any) -> Any:
    """One output of all rows from those of groups of rows; `cache` stands for those of the groups.

    Raises DrumlineError for what is neither a tensor, nor a cache, nor made of them.
    """

    def join(name: str, values: Sequence[Any]) -> Any:
        if isinstance(values[0], torch.Tensor):
            return torch.cat(list(values))
        if is_cache(values[0]):
            return cache
        if values[0] is None:
            return None
        raise DrumlineError(
            f"rank 0: the model returned {name} as a {type(values[0]).__name__}, which cannot be "
            "put together from groups of rows; set model.micro_batches = False to compute batches "
            "whole."
        )

    return _join("its output", outputs, join)


def join_chunks(outputs: Sequence[Any], tokens: Sequence[int]) -> Any:
    """One output of all tokens from those of spans that follow each other, of `tokens` each.

    What has not all tokens of each span in its second dimension is that of the last span.
    """

    def join(name: str, values: Sequence[Any]) -> Any:
        is_by_token = all(
            isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == count
            for value, count in zip(values, tokens, strict=True)
        )
        return torch.cat(list(values), dim=1) if is_by_token else values[-1]

    return _join("its output", outputs, join)


def _join(name: str, values: Sequence[Any], join: Callable[[str, Sequence[Any]], Any]) -> Any:
    """Join what is at the same place in equal structures of dicts, outputs, tuples and lists."""
    first = values[0]
    if isinstance(first, dict):
        items = {key: _join(key, [value[key] for value in values], join) for key in first}
        return type(first)(**items)
    if isinstance(first, (tuple, list)):
        columns = zip(*values, strict=True)
        return type(first)(_join(name, column, join) for column in columns)
    return join(name, values)
