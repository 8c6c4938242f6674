"""Tensors that are still on another rank, or not computed yet.

A remote layer returns them at once. Passing one on to the next remote layer does not touch it; the
first operation that does fetches its value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from coordinator import torch_private
from drumline.errors import DrumlineError

CONTAINERS = (tuple, list, dict)


class LazySource(Protocol):
    """The calls that will compute a lazy tensor."""

    def read(self, slot: int) -> None: ...


class LazyTensor(torch.Tensor):
    """A hidden state: a tensor of known shape whose value `source` sets when it is flushed."""

    source: LazySource
    slot: int
    value: torch.Tensor | None = None
    home: torch.device

    @classmethod
    def like(cls, hidden: torch.Tensor, source: LazySource, slot: int) -> LazyTensor:
        lazy: LazyTensor = torch_private.make_wrapper(
            cls, hidden.shape, dtype=hidden.dtype, device=hidden.device
        )
        lazy.source, lazy.slot, lazy.home = source, slot, hidden.device
        return lazy

    __torch_function__ = torch_private.no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*fetch_all(args), **fetch_all(kwargs or {}))

    def fetch(self) -> torch.Tensor:
        self.source.read(self.slot)
        if self.value is None:
            raise DrumlineError(
                "a tensor of a layer on another rank is not here: the call that was to compute it "
                "failed, or it was never read before, so it was not sent back; repeat the call."
            )
        return self.value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.fetch())


def _of_value(name: str) -> Callable[..., Any]:
    def method(self: LazyTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.fetch(), name)(*args, **kwargs)

    return method


READS_MEMORY = (
    "__array__",
    "__deepcopy__",
    "__dlpack__",
    "__dlpack_device__",
    "__reduce_ex__",
    "data_ptr",
    "numpy",
    "share_memory_",
    "storage",
    "tolist",
    "untyped_storage",
)
"""Methods that look for the memory of a tensor without an operation: a lazy one has none, and some
of them end the process."""

for _name in READS_MEMORY:
    setattr(LazyTensor, _name, _of_value(_name))


class LazyUnknownShape(LazyTensor):
    """Any other tensor that a layer returned, of unknown shape: whatever is asked fetches it.

    Most are never looked at (the attention weights that some layers return), or only by the next
    layer on the same rank, so they are not sent here once that is known.
    """

    @classmethod
    def like(cls, hidden: torch.Tensor, source: LazySource, slot: int) -> LazyTensor:
        with torch_private.plain_functions():  # which would fetch a withheld `hidden`
            return super().like(hidden, source, slot)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*fetch_all(args), **fetch_all(kwargs or {}))


def fetched(value: Any) -> Any:
    """A plain tensor for a lazy one; anything else as it is."""
    return value.fetch() if isinstance(value, LazyTensor) else value


def fetch_all(value: Any) -> Any:
    """A copy of a structure, with every lazy tensor replaced by its value."""
    if type(value) is tuple and not any(isinstance(item, CONTAINERS) for item in value):
        return tuple([fetched(item) for item in value])
    if type(value) is dict and not value:
        return value
    return torch_private.tree_map(fetched, value)


def fetch_input(module: Any, args: tuple[Any, ...]) -> Any:
    """A hook that has a module given the value of a lazy tensor; None if it is given another."""
    return (args[0].fetch(), *args[1:]) if args and isinstance(args[0], LazyTensor) else None
