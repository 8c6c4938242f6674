"""What the master keeps in place of keys and values that are on other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from drumline.errors import DrumlineError

COUNTING_FUNCTIONS = {
    "__get__",
    "__getitem__",
    "as_subclass",
    "clone",
    "detach",
    "dim",
    "expand",
    "index_select",
    "numel",
    "repeat_interleave",
    "size",
    "to",
}
"""The functions that count, cut and reorder tokens; none reads a value, and none writes one."""


class PlaceholderTensor(torch.Tensor):
    """One byte per token in the shape of keys: its lengths are true, and its values are refused."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ not in COUNTING_FUNCTIONS:
            raise DrumlineError(
                f"{func.__name__}() on the keys or values of a layer that is on another rank, "
                "where they stay; this rank only counts its tokens. Change a cache with its own "
                "methods (crop, reset, batch_select_indices, reorder_cache), or load the model on "
                "one rank to read and write them."
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.clone().as_subclass(PlaceholderTensor)


ONE = torch.zeros((), dtype=torch.uint8)
"""Expanded to any number of tokens, and never written to."""


def make_placeholder(batch: int, tokens: int) -> torch.Tensor:
    """[batch, 1, tokens, 1]"""
    plain = ONE.expand(batch, 1, tokens, 1)
    return torch.Tensor._make_subclass(PlaceholderTensor, plain)


counting_tokens = torch._C.DisableTorchFunctionSubclass
"""Within this context, of one thread, a cache may do to shadows what it does to keys."""


def replace_with_placeholders(layer: Any) -> None:
    """Make shadows of what a layer of a cache made itself."""
    for name in ("keys", "values"):
        if type(getattr(layer, name, None)) is torch.Tensor:
            setattr(layer, name, getattr(layer, name).as_subclass(PlaceholderTensor))
