"""Products of large float32 weights on a CPU by oneDNN, in place of the library torch takes.

use_onednn(model)

torch gives them to MKL: that reads the weights with one thread for one row, a token of one
sequence, and copies them into another order for a few rows. oneDNN's last bits are others.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from coordinator import torch_private

MIN_NBYTES = 1 << 18
"""Of the weights: a call of oneDNN takes 10 us longer, about what it saves there with 8 rows."""


def use_onednn(model: nn.Module) -> None:
    """Have the linear layers of a model that gain from it multiply by oneDNN, outside of autograd.

    None does where torch has no oneDNN, or torch.backends.mkldnn.enabled is False.
    """
    for module in model.modules():
        if not isinstance(module, nn.Linear) or "forward" in vars(module):
            continue
        if type(module).forward is nn.Linear.forward and _gains(module.weight):
            module.forward = functools.partial(_forward, module)  # type: ignore[method-assign]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product as a layer computes it after `use_onednn`."""
    return _product(x, weight, bias) if _gains(weight) else F.linear(x, weight, bias)


def _forward(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # as nn.Linear names it
    return _product(input, module.weight, module.bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    is_plain = type(x) is torch.Tensor and x.dtype is torch.float32
    if is_plain and _is_usual(weight) and _only_values_count(x, weight):
        return torch_private.onednn_linear(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


def _only_values_count(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True where nothing but the product's values is asked for: no derivative, graph or cast."""
    return not (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[no-untyped-call]
        or torch_private.is_transformed(x)
        or torch_private.is_transformed(weight)
        or torch_private.has_tangents()
    )


def _is_usual(weight: torch.Tensor) -> bool:
    return (
        type(weight) in (torch.Tensor, nn.Parameter)
        and weight.layout is torch.strided
        and weight.is_cpu
        and weight.dtype is torch.float32
        and weight.is_contiguous()
    )


def _gains(weight: torch.Tensor) -> bool:
    return (
        _is_usual(weight)
        and weight.nbytes >= MIN_NBYTES
        and bool(torch.backends.mkldnn.enabled)
        and _has_onednn()
    )


@functools.cache
def _has_onednn() -> bool:
    """True if oneDNN multiplies here as torch does; asked of it once."""
    if torch_private.onednn_linear is None:
        return False
    x, weight, bias = torch.ones(2, 3), torch.arange(12.0).view(4, 3), torch.arange(4.0)
    try:
        with torch.no_grad():
            result = torch_private.onednn_linear(x, weight, bias, "none", [], "")
        return torch.equal(result, F.linear(x, weight, bias))
    except (RuntimeError, TypeError):
        return False
