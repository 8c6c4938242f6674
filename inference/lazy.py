"""A hidden state that is still on another rank, or not computed yet.

A remote layer returns one at once. It is a tensor in every respect, and the first operation that
touches it fetches its value; passing it on to the next remote layer does not touch it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from .errors import InferenceError


class Source(Protocol):
    def flush(self) -> Any: ...


class Lazy(torch.Tensor):
    """A tensor of known shape whose value `source` sets when it is flushed."""

    source: Source | None
    slot: int
    value: torch.Tensor | None

    @staticmethod
    def like(hidden: torch.Tensor, source: Source, slot: int) -> Lazy:
        lazy: Lazy = torch.Tensor._make_wrapper_subclass(
            Lazy, hidden.shape, dtype=hidden.dtype, device=hidden.device
        )
        lazy.source, lazy.slot, lazy.value = source, slot, None
        return lazy

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map(fetched, args), **tree_map(fetched, kwargs or {}))

    def fetch(self) -> torch.Tensor:
        if self.value is None:
            assert self.source is not None
            self.source.flush()
            self.source = None
        if self.value is None:
            raise InferenceError(
                "this hidden state does not exist, because the call that was to compute it "
                "failed; run again."
            )
        return self.value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.fetch())


def fetched(value: Any) -> Any:
    """A plain tensor for a lazy one; anything else as it is."""
    return value.fetch() if isinstance(value, Lazy) else value


def fetch_all(value: Any) -> Any:
    """The same structure with every lazy tensor replaced by its value."""
    return tree_map(fetched, value)
