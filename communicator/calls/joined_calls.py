"""Collectives along a dim of the tensor, and of parts whose sizes differ.

joined = allgather_along(calls, comm.allgather, tensor, None, dim=-1, sizes=[3, 5])

A mistake is raised on this rank alone: see CheckedCalls.or_decline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from communicator.calls.arguments import check_dim, check_shares, check_sizes
from communicator.calls.checked_calls import CheckedCalls
from communicator.calls.dtypes import Op


def allgather_along(
    calls: CheckedCalls,
    allgather: Callable[[torch.Tensor], torch.Tensor],
    tensor: torch.Tensor,
    out: torch.Tensor | None,
    dim: int | None,
    sizes: Sequence[int] | None,
) -> torch.Tensor:
    """Every rank's tensor, joined along dim. sizes: that of each rank there, if they differ.

    allgather: the user's call of equal parts.
    """
    _check_no_out(calls, "allgather", out)
    calls.backend.check_tensor("allgather", tensor)
    dim = check_dim(calls.rank_name(), "allgather", tensor, dim)
    if sizes is not None:
        check_sizes(calls, "allgather", sizes, tensor.shape[dim])
    if sizes is None or len(set(sizes)) == 1:
        rows = allgather(tensor.unsqueeze(dim))  # a shape that tells the dim, and is compared
        return calls.join_rows(rows.squeeze(dim + 1), dim)
    shapes = [(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]) for size in sizes]
    counts = [torch.Size(shape).numel() for shape in shapes]
    flat = tensor.new_empty(sum(counts))
    calls.allgatherv(_telling_dim(flat, tensor, dim), tensor, counts)
    if dim == 0:
        return flat.view(sum(sizes), *tensor.shape[1:])
    calls.backend.follow_calls()
    parts = zip(torch.split(flat, counts), shapes, strict=True)
    return torch.cat([part.view(shape) for part, shape in parts], dim)


def reduce_scatter_along(
    calls: CheckedCalls,
    reduce_scatter: Callable[[torch.Tensor, Op], torch.Tensor],
    tensor: torch.Tensor,
    op: Op,
    out: torch.Tensor | None,
    dim: int | None,
    sizes: Sequence[int] | None,
) -> torch.Tensor:
    """This rank's part of the reduction, which is cut along dim, evenly or into these sizes.

    reduce_scatter: the user's call of equal parts.
    """
    _check_no_out(calls, "reduce_scatter", out)
    calls.backend.check_tensor("reduce_scatter", tensor)
    dim = check_dim(calls.rank_name(), "reduce_scatter", tensor, dim)
    if sizes is None:
        share, rest = divmod(tensor.shape[dim], calls.world_size)
        if rest:
            raise ValueError(
                f"{calls.rank_name()}, reduce_scatter: dim {dim} of {tuple(tensor.shape)} cannot "
                f"be cut evenly for {calls.world_size} ranks. Pass sizes=, one for each."
            )
        sizes = [share] * calls.world_size
    check_shares(calls, "reduce_scatter", sizes, tensor.shape[dim])
    if len(set(sizes)) == 1:
        cut = (*tensor.shape[:dim], calls.world_size, sizes[0], *tensor.shape[dim + 1 :])
        rows = tensor.view(cut).movedim(dim, 0)
        return reduce_scatter(rows.contiguous(), op)
    parts = torch.split(tensor, list(sizes), dim)
    flat = torch.cat([part.flatten() for part in parts]) if dim else tensor.flatten()
    out = torch.empty_like(parts[calls.rank], memory_format=torch.contiguous_format)
    whole = _telling_dim(flat, tensor, dim)
    calls.reduce_scatterv(out, whole, [part.numel() for part in parts], op)
    return out


def _telling_dim(flat: torch.Tensor, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The parts of all ranks, flat, in a shape that tells the dim: ranks compare it."""
    lead = tensor.shape[:dim]
    return flat.view(*lead, flat.numel() // max(lead.numel(), 1))


def _check_no_out(calls: CheckedCalls, call: str, out: torch.Tensor | None) -> None:
    if out is not None:
        raise ValueError(f"{calls.rank_name()}, {call}: out= goes with neither dim= nor sizes=")
