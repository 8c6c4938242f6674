"""Collectives that gradients flow through as they do on one rank, under Megatron-LM's names.

y = reduce_from_ranks(partial, comm)     # the sum of all ranks' tensors
tokens = scatter_tokens(x, comm)         # this rank's tokens of [batch, length, width]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from communicator import Communicator
from coordinator import torch_private

Step = Callable[[torch.Tensor], torch.Tensor]


def shard_bounds(size: int, comm: Communicator) -> tuple[int, int]:
    """Begin and end of this rank's shard of `size`, as ShardSpec shards."""
    size_per_rank = shard_size(size, comm)
    return min(comm.rank * size_per_rank, size), min((comm.rank + 1) * size_per_rank, size)


def shard_size(size: int, comm: Communicator) -> int:
    """The size of a rank's shard of `size`; the last ranks may have less, or are padded."""
    return -(-size // comm.world_size)


def _needs_gradient(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


class _Differentiable(torch.autograd.Function):
    """A function of a tensor whose gradient another function computes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Step, backward: Step) -> torch.Tensor:
        ctx.step = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.step(gradients[0]), None, None


def _apply(x: torch.Tensor, forward: Step, backward: Step) -> torch.Tensor:
    if _needs_gradient(x):
        return _Differentiable.apply(x, forward, backward)  # type: ignore[no-any-return, no-untyped-call]
    return forward(x)


def copy_to_ranks(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """x, which all ranks have, for computing a shard of something; its gradients are summed."""
    if not _needs_gradient(x):
        return x
    return _apply(x, lambda x: x.view_as(x), lambda grad: comm.allreduce(grad.contiguous().clone()))


def reduce_from_ranks(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """The sum of every rank's x, which is a fresh tensor and may be overwritten."""
    keeps = _needs_gradient(x)  # what made x may need it for its gradient
    return _apply(
        x,
        lambda x: comm.allreduce(x.contiguous().clone() if keeps else x.contiguous()),
        lambda grad: grad,
    )


def gather_from_ranks(x: torch.Tensor, width: int, comm: Communicator) -> torch.Tensor:
    """Every rank's columns side by side: [..., width]."""
    size_per_rank = shard_size(width, comm)
    begin, end = shard_bounds(width, comm)

    def gather(x: torch.Tensor) -> torch.Tensor:
        columns = comm.allgather(F.pad(x, (0, size_per_rank - x.shape[-1])).contiguous())
        return columns.movedim(0, -2).flatten(-2)[..., :width]

    return _apply(x, gather, lambda grad: grad[..., begin:end].contiguous())


def scatter_tokens(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """This rank's tokens of x [batch, length, width], which all ranks have; padded with zeros."""
    length = x.shape[1]
    return _apply(x, lambda x: _scatter(x, comm), lambda grad: _gather(grad, length, comm))


def gather_tokens(x: torch.Tensor, length: int, comm: Communicator) -> torch.Tensor:
    """The tokens of all ranks: [batch, length, width] from each rank's own.

    The gradient of the whole is the same on all ranks: what is done to it sums its own.
    """
    return _apply(x, lambda x: _gather(x, length, comm), lambda grad: _scatter(grad, comm))


def reduce_scatter_tokens(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """This rank's tokens of the sum of every rank's x."""
    length = x.shape[1]
    return _apply(
        x,
        lambda x: comm.reduce_scatter(_split_tokens_by_rank(x, comm)),
        lambda grad: _gather(grad, length, comm),
    )


def with_reduced_gradients(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    """The forward of a module that every rank uses for its own tokens; gradients are summed."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        table, _ = torch_private.own_tables(module)
        own = {name: parameter for name, parameter in table.items() if parameter is not None}
        table.update({name: copy_to_ranks(p, comm) for name, p in own.items()})
        try:
            return plain(*args, **kwargs)
        finally:
            table.update(own)

    return forward


def _split_tokens_by_rank(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """[world_size, batch, tokens per rank, width], padded with zeros."""
    size_per_rank = shard_size(x.shape[1], comm)
    filled = F.pad(x, (0, 0, 0, size_per_rank * comm.world_size - x.shape[1]))
    batch, _, width = filled.shape
    return filled.view(batch, comm.world_size, size_per_rank, width).movedim(1, 0).contiguous()


def _scatter(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    begin, end = shard_bounds(x.shape[1], comm)
    return F.pad(x[:, begin:end], (0, 0, 0, shard_size(x.shape[1], comm) - (end - begin)))


def _gather(x: torch.Tensor, length: int, comm: Communicator) -> torch.Tensor:
    rows = comm.allgather(x.contiguous())
    return rows.movedim(0, 1).flatten(1, 2)[:, :length].contiguous()
