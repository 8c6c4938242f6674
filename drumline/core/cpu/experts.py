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

from drumline.contact.loading.models import are_some_experts, expert_gate
from drumline.core.cpu.products import (
    MIN_NBYTES,
    has_loop,
    is_usual,
    multiply_rows,
    only_values_count,
)

MOST_READS = 2
"""Of each expert, on average: with more tokens that share it, one product of all is faster."""


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
    if gate is not None and not args and not kwargs and _is_taken(*_stacks(module), *inputs[:2]):
        numbers = top_k_index.flatten().tolist()
        is_shared = len(numbers) > MOST_READS * len({*numbers})
        if not is_shared and (_are_all_here(module, numbers) or are_some_experts(module)):
            return _weighted_sum(gate, *_stacks(module), hidden_states, numbers, top_k_weights)
    return type(module).forward(module, *inputs, *args, **kwargs)


def _are_all_here(module: nn.Module, numbers: list[int]) -> bool:
    return min(numbers) >= 0 and max(numbers) < len(_stacks(module)[0])


def _is_taken(
    gate_up: torch.Tensor, down: torch.Tensor, hidden: torch.Tensor, index: torch.Tensor
) -> bool:
    return (
        type(hidden) is torch.Tensor
        and hidden.is_cpu
        and hidden.dim() == index.dim() == 2
        and 0 < index.numel() <= len(gate_up)  # with more, experts are those of several tokens
        and all(_gains(stack) and stack.dtype is hidden.dtype for stack in (gate_up, down))
        and hidden.shape[1] == gate_up.shape[-1]
        and gate_up.shape[:2] == (len(down), 2 * down.shape[-1])
        and only_values_count(hidden, gate_up)
    )


def _weighted_sum(
    gate: Callable[[torch.Tensor], torch.Tensor],
    gate_up: torch.Tensor,
    down: torch.Tensor,
    hidden: torch.Tensor,
    chosen: list[int],
    weights: torch.Tensor,
) -> torch.Tensor:
    """The sum of each token's experts; a number out of range is one of another rank.

    chosen: the numbers of the experts of the first token, those of the next, and so on.
    """
    ours = [place for place, number in enumerate(chosen) if 0 <= number < len(gate_up)]
    numbers = tuple(chosen[place] for place in ours)
    rows = hidden.repeat_interleave(weights.shape[1], 0)[ours]
    outputs = multiply_rows(gate(multiply_rows(rows, gate_up, numbers)).contiguous(), down, numbers)
    weighted = outputs * weights.flatten()[ours, None]
    terms = weighted.new_zeros(len(chosen), outputs.shape[1])
    terms[ours] = weighted
    return terms.view(*weights.shape, -1).sum(1).to(hidden.dtype)
