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


def shard_bounds(size: int, comm: Communicator) -> tuple[int, int]:
    """Begin and end of this rank's shard of `size`, as ShardSpec shards."""
    size_per_rank = shard_size(size, comm)
    return min(comm.rank * size_per_rank, size), min((comm.rank + 1) * size_per_rank, size)


def shard_size(size: int, comm: Communicator) -> int:
    """The size of a rank's shard of `size`; the last ranks may have less, or are padded."""
    return -(-size // comm.world_size)


def copy_to_ranks(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """x, which all ranks have, for computing a shard of something; its gradients are summed."""
    return _CopyToRanks.apply(x, comm) if _needs_gradient(x) else x  # type: ignore[no-untyped-call]


def reduce_from_ranks(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """The sum of every rank's x, which is a fresh tensor and may be overwritten."""
    if _needs_gradient(x):
        return _ReduceFromRanks.apply(x, comm)  # type: ignore[no-any-return, no-untyped-call]
    return comm.allreduce(x.contiguous())


def gather_from_ranks(x: torch.Tensor, width: int, comm: Communicator) -> torch.Tensor:
    """Every rank's columns side by side: [..., width]."""
    if _needs_gradient(x):
        return _GatherFromRanks.apply(x, width, comm)  # type: ignore[no-any-return, no-untyped-call]
    return _gather_columns(x, width, comm)


def scatter_tokens(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """This rank's tokens of x [batch, length, width], which all ranks have; padded with zeros."""
    if _needs_gradient(x):
        return _ScatterTokens.apply(x, comm)  # type: ignore[no-any-return, no-untyped-call]
    return _scatter_tokens(x, comm)


def gather_tokens(x: torch.Tensor, length: int, comm: Communicator) -> torch.Tensor:
    """The tokens of all ranks: [batch, length, width] from each rank's own."""
    if _needs_gradient(x):
        return _GatherTokens.apply(x, length, comm)  # type: ignore[no-any-return, no-untyped-call]
    return _gather_tokens(x, length, comm)


def reduce_scatter_tokens(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """This rank's tokens of the sum of every rank's x."""
    if _needs_gradient(x):
        return _ReduceScatterTokens.apply(x, comm)  # type: ignore[no-any-return, no-untyped-call]
    return comm.reduce_scatter(_split_tokens_by_rank(x, comm))


def with_reduced_gradients(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    """The forward of a module that every rank uses for its own tokens; gradients are summed."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = {name: p for name, p in module._parameters.items() if p is not None}
        module._parameters.update({n: copy_to_ranks(p, comm) for n, p in own.items()})  # type: ignore[misc]
        try:
            return plain(*args, **kwargs)
        finally:
            module._parameters.update(own)

    return forward


def _needs_gradient(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _gather_columns(x: torch.Tensor, width: int, comm: Communicator) -> torch.Tensor:
    size_per_rank = shard_size(width, comm)
    rows = comm.allgather(F.pad(x, (0, size_per_rank - x.shape[-1])).contiguous())
    return rows.movedim(0, -2).flatten(-2)[..., :width]


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.comm.allreduce(gradients[0].contiguous().clone()), None


class _ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        return comm.allreduce(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _GatherFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: int, comm: Communicator) -> torch.Tensor:
        ctx.shard_bounds = shard_bounds(width, comm)
        return _gather_columns(x, width, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        begin, end = ctx.shard_bounds
        return gradients[0][..., begin:end].contiguous(), None, None


def _split_tokens_by_rank(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """[world_size, batch, tokens per rank, width], padded with zeros."""
    size_per_rank = shard_size(x.shape[1], comm)
    filled = F.pad(x, (0, 0, 0, size_per_rank * comm.world_size - x.shape[1]))
    batch, _, width = filled.shape
    return filled.view(batch, comm.world_size, size_per_rank, width).movedim(1, 0).contiguous()


def _scatter_tokens(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    begin, end = shard_bounds(x.shape[1], comm)
    return F.pad(x[:, begin:end], (0, 0, 0, shard_size(x.shape[1], comm) - (end - begin)))


def _gather_tokens(x: torch.Tensor, length: int, comm: Communicator) -> torch.Tensor:
    rows = comm.allgather(x.contiguous())
    return rows.movedim(0, 1).flatten(1, 2)[:, :length].contiguous()


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.length, ctx.comm = x.shape[1], comm
        return _scatter_tokens(x, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _gather_tokens(gradients[0], ctx.length, ctx.comm), None


class _GatherTokens(torch.autograd.Function):
    """The gradient of the whole is the same on all ranks: what is done to it sums its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, length: int, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return _gather_tokens(x, length, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _scatter_tokens(gradients[0], ctx.comm), None, None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.length, ctx.comm = x.shape[1], comm
        return comm.reduce_scatter(_split_tokens_by_rank(x, comm))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _gather_tokens(gradients[0], ctx.length, ctx.comm), None
