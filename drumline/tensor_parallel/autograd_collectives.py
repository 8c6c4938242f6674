"""Collectives that gradients flow through as they do on one rank.

y = summed(partial, comm)        # what all ranks have in part, whole on every rank
mine = own_part(x, comm)         # this rank's tokens of [batch, length, width]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from communicator import Communicator


def bounds(size: int, comm: Communicator) -> tuple[int, int]:
    """Which of `size` this rank has, cut as Split cuts."""
    each = each_of(size, comm)
    return min(comm.rank * each, size), min((comm.rank + 1) * each, size)


def each_of(size: int, comm: Communicator) -> int:
    """How many of `size` a rank has; the last ones may have fewer, or are filled up."""
    return -(-size // comm.world_size)


def shared(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """x, which all ranks have, entering what each does a part of: gradients are summed."""
    return _Shared.apply(x, comm) if _needs_gradient(x) else x  # type: ignore[no-untyped-call]


def summed(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """The sum of every rank's x, which is a fresh tensor and may be overwritten."""
    if _needs_gradient(x):
        return _Summed.apply(x, comm)  # type: ignore[no-any-return, no-untyped-call]
    return comm.allreduce(x.contiguous())


def gathered(x: torch.Tensor, width: int, comm: Communicator) -> torch.Tensor:
    """Every rank's columns side by side: [..., width]."""
    if _needs_gradient(x):
        return _Gathered.apply(x, width, comm)  # type: ignore[no-any-return, no-untyped-call]
    return _gather(x, width, comm)


def own_part(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """This rank's tokens of [batch, length, width], which all have; zeros fill up the last ones."""
    if _needs_gradient(x):
        return _OwnPart.apply(x, comm)  # type: ignore[no-any-return, no-untyped-call]
    return _own_rows(x, comm)


def all_parts(x: torch.Tensor, length: int, comm: Communicator) -> torch.Tensor:
    """The tokens of all ranks, each of which has its own: [batch, length, width]."""
    if _needs_gradient(x):
        return _AllParts.apply(x, length, comm)  # type: ignore[no-any-return, no-untyped-call]
    return _all_rows(x, length, comm)


def own_sum(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """This rank's tokens of the sum of every rank's x."""
    if _needs_gradient(x):
        return _OwnSum.apply(x, comm)  # type: ignore[no-any-return, no-untyped-call]
    return comm.reduce_scatter(_by_rank(x, comm))


def with_summed_gradients(module: nn.Module, comm: Communicator) -> Callable[..., Any]:
    """The forward of a module that every rank has whole and uses in part: gradients are summed."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = {name: p for name, p in module._parameters.items() if p is not None}
        module._parameters.update({n: shared(p, comm) for n, p in own.items()})  # type: ignore[misc]
        try:
            return plain(*args, **kwargs)
        finally:
            module._parameters.update(own)

    return forward


def _needs_gradient(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _gather(x: torch.Tensor, width: int, comm: Communicator) -> torch.Tensor:
    each = each_of(width, comm)
    rows = comm.allgather(F.pad(x, (0, each - x.shape[-1])).contiguous())
    return rows.movedim(0, -2).flatten(-2)[..., :width]


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.comm.allreduce(gradients[0].contiguous().clone()), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        return comm.allreduce(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: int, comm: Communicator) -> torch.Tensor:
        ctx.bounds = bounds(width, comm)
        return _gather(x, width, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        begin, end = ctx.bounds
        return gradients[0][..., begin:end].contiguous(), None, None


def _by_rank(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """[world_size, batch, each, width]: the tokens of every rank, filled up with zeros."""
    each = each_of(x.shape[1], comm)
    filled = F.pad(x, (0, 0, 0, each * comm.world_size - x.shape[1]))
    batch, _, width = filled.shape
    return filled.view(batch, comm.world_size, each, width).movedim(1, 0).contiguous()


def _own_rows(x: torch.Tensor, comm: Communicator) -> torch.Tensor:
    begin, end = bounds(x.shape[1], comm)
    return F.pad(x[:, begin:end], (0, 0, 0, each_of(x.shape[1], comm) - (end - begin)))


def _all_rows(x: torch.Tensor, length: int, comm: Communicator) -> torch.Tensor:
    rows = comm.allgather(x.contiguous())
    return rows.movedim(0, 1).flatten(1, 2)[:, :length].contiguous()


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.length, ctx.comm = x.shape[1], comm
        return _own_rows(x, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _all_rows(gradients[0], ctx.length, ctx.comm), None


class _AllParts(torch.autograd.Function):
    """The gradient of the whole is the same on all ranks: what is done to it sums its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, length: int, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return _all_rows(x, length, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _own_rows(gradients[0], ctx.comm), None, None


class _OwnSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.length, ctx.comm = x.shape[1], comm
        return comm.reduce_scatter(_by_rank(x, comm))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _all_rows(gradients[0], ctx.length, ctx.comm), None
