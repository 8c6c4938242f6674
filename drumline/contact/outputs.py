"""Outputs of transformers' models, as drumline takes them apart and builds them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from drumline.contact import transformers_api as api
from drumline.contact.caches import is_cache
from drumline.errors import DrumlineError

Output: TypeAlias = api.ModelOutput
"""A dict of a model's outputs, each with a field of its own."""


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
    """One output of all tokens from those of spans that follow each other, of so many tokens each.

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
