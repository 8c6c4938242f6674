"""Products of large weights on a CPU by what reads them fastest, in place of what torch takes.

use_fast_products(model)

One row, a token of one sequence, costs as much as reading the weights. torch gives float32 to MKL,
that reads with one thread, and bfloat16 to oneDNN, at half of what memory gives: a loop of our own
takes its place. A few rows of float32 are multiplied by oneDNN, where MKL copies the weights into
another order. Last bits are others than torch's.
"""

from __future__ import annotations

import functools
import platform

import torch
from torch import nn
from torch.nn import functional as F

from coordinator import torch_private
from drumline.core.cpu import _products

MIN_NBYTES = 1 << 18
"""Of the weights: a call of oneDNN takes 10 us longer, about what it saves there with 8 rows."""

VECTOR = 32
"""The loop takes as many columns at a time."""

LOOP_DTYPES = (torch.float32, torch.bfloat16) if platform.machine() == "x86_64" else ()
"""torch has a loop as fast for float16. On other processors than x86-64 none was measured."""


def use_fast_products(model: nn.Module) -> None:
    """Have the linear layers of a model that gain from it multiply in another way, outside of
    autograd.

    None does where torch.backends.mkldnn.enabled is False.
    """
    for module in model.modules():
        if not isinstance(module, nn.Linear) or "forward" in vars(module):
            continue
        if type(module).forward is nn.Linear.forward and _gains(module.weight):
            module.forward = functools.partial(_forward, module)  # type: ignore[method-assign]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product as a layer computes it after `use_fast_products`."""
    return _product(x, weight, bias) if _gains(weight) else F.linear(x, weight, bias)


def _forward(module: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # as nn.Linear names it
    return _product(input, module.weight, module.bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    is_plain = type(x) is torch.Tensor and x.is_cpu and x.dtype is weight.dtype
    fits = is_plain and is_usual(weight) and (bias is None or _fits(bias, weight))
    if not (fits and only_values_count(x, weight)):
        return F.linear(x, weight, bias)
    if x.shape[-1:] == weight.shape[1:] and x.numel() == x.shape[-1] and has_loop(weight):
        return multiply_rows(x.contiguous(), weight, (0,), bias)
    if weight.dtype is torch.float32 and _has_onednn():
        return torch_private.onednn_linear(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


def multiply_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    numbers: tuple[int, ...],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of each row with the matrix of the stack that has its number.

    x: [..., columns], contiguous, with as many rows as numbers; weight: [any, rows, columns].
    """
    rows, columns = weight.shape[-2:]
    out = x.new_empty((*x.shape[:-1], rows))
    _products.multiply_rows(
        weight.dtype is torch.bfloat16,
        weight.data_ptr(),
        numbers,
        x.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        columns,
        torch.get_num_threads(),
    )
    return out


def only_values_count(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True where nothing but the product's values is asked for: no derivative, graph or cast."""
    return not (
        torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[no-untyped-call]
        or torch_private.is_transformed(x)
        or torch_private.is_transformed(weight)
        or torch_private.has_tangents()
        or torch_private.dispatch_modes()
        or torch_private.function_modes()
    )


def is_usual(weight: torch.Tensor) -> bool:
    """True for values that lie one behind the other in memory of the CPU."""
    return (
        type(weight) in (torch.Tensor, nn.Parameter)
        and weight.layout is torch.strided
        and weight.is_cpu
        and weight.is_contiguous()
    )


def _fits(bias: torch.Tensor, weight: torch.Tensor) -> bool:
    is_equal = bias.dtype is weight.dtype and bias.shape == weight.shape[:1]
    return is_equal and is_usual(bias) and not torch_private.is_transformed(bias)


def _gains(weight: torch.Tensor) -> bool:
    return (
        is_usual(weight)
        and weight.nbytes >= MIN_NBYTES
        and bool(torch.backends.mkldnn.enabled)
        and (has_loop(weight) or (weight.dtype is torch.float32 and _has_onednn()))
    )


def has_loop(weight: torch.Tensor) -> bool:
    """True if rows are multiplied with this matrix, or those of a stack, by the loop."""
    return weight.dtype in LOOP_DTYPES and weight.shape[-1] % VECTOR == 0


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
