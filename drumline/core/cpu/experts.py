"""The experts of a few tokens on a CPU, each read once from memory.

use_fast_experts(model)

A token goes to few experts of many, and costs as much as reading their matrices. What transformers
takes on a CPU for a stack of experts reads them at a half to a third of that speed. Last bits are
others than its.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drumline.contact.loading.models import expert_gate
from drumline.core.cpu.products import (
    MIN_NBYTES,
    has_loop,
    is_usual,
    multiply_rows,
    only_values_count,
)


def use_fast_experts(model: nn.Module) -> None:
    """Have stacks of experts of a model multiply those of a few tokens alone, outside of autograd.

    None does where torch.backends.mkldnn.enabled is False.
    """
    for module in model.modules():
        gate = expert_gate(module)
        if gate is None or "forward" in vars(module) or not torch.backends.mkldnn.enabled:
            continue
        if all(map(_gains, _stacks(module))):
            module.forward = functools.partial(_forward, module)


def _stacks(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    return module.gate_up_proj, module.down_proj  # type: ignore[return-value]


def _gains(stack: torch.Tensor) -> bool:
    return (
        is_usual(stack)
        and stack.dim() == 3
        and has_loop(stack)
        and stack.nbytes >= MIN_NBYTES * len(stack)
    )


def _forward(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """With the names that transformers gives to the arguments."""
    gate = expert_gate(module)
    inputs = (hidden_states, top_k_index, top_k_weights)
    if gate is None or args or kwargs or not _is_taken(*_stacks(module), *inputs):
        return type(module).forward(module, *inputs, *args, **kwargs)
    return _sum_of_experts(gate, *_stacks(module), *inputs)


def _is_taken(
    gate_up: torch.Tensor, down: torch.Tensor, hidden: torch.Tensor, index: torch.Tensor, *_: Any
) -> bool:
    return (
        type(hidden) is torch.Tensor
        and hidden.is_cpu
        and hidden.dim() == index.dim() == 2
        and 0 < index.numel() <= len(gate_up)  # with more, experts are those of several tokens
        and all(_gains(stack) and stack.dtype is hidden.dtype for stack in (gate_up, down))
        and only_values_count(hidden, gate_up)
    )


def _sum_of_experts(
    gate: Callable[[torch.Tensor], torch.Tensor],
    gate_up: torch.Tensor,
    down: torch.Tensor,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of each token's experts; a number past the last is one of another rank."""
    chosen = index.flatten().tolist()
    ours = [place for place, number in enumerate(chosen) if number < len(gate_up)]
    numbers = tuple(chosen[place] for place in ours)
    rows = hidden.repeat_interleave(index.shape[1], 0)[ours]
    outputs = multiply_rows(gate(multiply_rows(rows, gate_up, numbers)).contiguous(), down, numbers)
    weighted = outputs * weights.flatten()[ours, None]
    terms = weighted.new_zeros(index.numel(), outputs.shape[1])
    terms[ours] = weighted
    return terms.view(*index.shape, -1).sum(1).to(hidden.dtype)
