"""Builds modules on meta without the time that filling their weights takes.

with init_on_meta():
    model = nn.Linear(4096, 4096)       # names and shapes; nothing was drawn for it
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

FILLERS = {
    *(f for name, f in vars(init).items() if name.endswith("_") and callable(f)),
    torch.Tensor.normal_,
    torch.Tensor.uniform_,
}
"""What gives a tensor its first values, and returns it."""


@contextlib.contextmanager
def init_on_meta() -> Iterator[None]:
    """Within this block and thread, tensors are made on meta and stay unfilled."""
    with torch.device("meta"), _Unfilled():
        yield


class _Unfilled(TorchFunctionMode):
    """On meta, torch goes through all steps of drawing numbers, for no number."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in FILLERS:
            tensor = args[0] if args else given["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **given)
