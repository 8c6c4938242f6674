"""What the master keeps in place of keys and values that are on other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inference.errors import InferenceError

BOOKKEEPING = {
    "__get__",
    "__getitem__",
    "__setitem__",
    "as_subclass",
    "cat",
    "clone",
    "copy_",
    "detach",
    "dim",
    "expand",
    "index_copy_",
    "index_select",
    "numel",
    "repeat_interleave",
    "roll",
    "size",
    "to",
    "zero_",
}
"""The functions by which a cache counts, cuts and reorders its tokens; none reads a value."""


class Shadow(torch.Tensor):
    """One byte per token in the shape of keys: its lengths are true, and its values are refused."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ not in BOOKKEEPING:
            raise InferenceError(
                f"{func.__name__}() on the keys or values of a layer that is on another rank, "
                "where "
                "they stay; this rank only counts its tokens. Load the model on one rank to read "
                "them."
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.clone().as_subclass(Shadow)


ONE = torch.zeros((), dtype=torch.uint8)
"""Expanded to any number of tokens, and never written to."""


def shadow(batch: int, tokens: int) -> torch.Tensor:
    """[batch, 1, tokens, 1]"""
    plain = ONE.expand(batch, 1, tokens, 1)
    return torch.Tensor._make_subclass(Shadow, plain)


def hide(layer: Any) -> None:
    """Make shadows of what a layer of a cache allocated itself."""
    for name in ("keys", "values"):
        if type(getattr(layer, name, None)) is torch.Tensor:
            setattr(layer, name, getattr(layer, name).as_subclass(Shadow))
