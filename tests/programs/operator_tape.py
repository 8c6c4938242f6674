"""A stand-in for a CUDA graph: the operators that a piece of Python called, in the same memory.

Python runs once, at the capture, and what its operators changed is undone, as none of them runs in
a real capture. A replay runs the operators and not a line of Python; what reads a value is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
}


class OperatorTape(TorchDispatchMode):
    """The steps of one capture."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], None]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        try:
            with self:
                yield
        finally:
            for storage, before in self._before.values():
                storage.copy_(before)
            self._before.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        for tensor in _written(func, args, kwargs):
            self.will_write(tensor)
        made = func(*args, **kwargs)
        old = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        new = [
            t if isinstance(t, torch.Tensor) and _memory(t) not in old else None
            for t in tree_leaves(made)
        ]

        def again() -> None:
            for tensor, value in zip(new, tree_leaves(func(*args, **kwargs)), strict=True):
                if tensor is not None:
                    tensor.copy_(value)

        self._steps.append(again)
        return made

    def add(self, step: Callable[[], None]) -> None:
        """One more step, which is not an operator of torch."""
        self._steps.append(step)

    def will_write(self, tensor: torch.Tensor) -> None:
        """Remember what the memory of a tensor holds, for the end of the capture."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._before:
            self._before[storage.data_ptr()] = storage, storage.clone()

    def replay(self) -> None:
        for step in self._steps:
            step()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes into."""
    arguments = func._schema.arguments
    values = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args) :])]
    for argument, value in zip(arguments, values, strict=True):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
