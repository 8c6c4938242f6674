"""Collectives along a dim of the tensor, and of parts whose sizes differ.

joined = allgather_along(comm, tensor, dim=-1, sizes=[3, 5])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from communicator.calls.arguments import check_dim, check_shares, check_sizes, check_tensor
from communicator.calls.dtypes import Op

if TYPE_CHECKING:
    from communicator.base import Communicator


def join_rows(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """The rows, [world_size, *shape], joined along a dim of the shape."""
    return rows.movedim(0, dim).flatten(dim, dim + 1)


def allgather_along(
    comm: Communicator, tensor: torch.Tensor, dim: int | None, sizes: Sequence[int] | None
) -> torch.Tensor:
    """Every rank's tensor, joined along dim. sizes: that of each rank there, if they differ."""
    if sizes is None:
        rows = comm.allgather(tensor)
        return join_rows(rows, check_dim(comm.rank_name(), "allgather", tensor, dim))
    check_tensor(comm.rank_name(), "allgather", tensor, comm.device_type)
    dim = check_dim(comm.rank_name(), "allgather", tensor, dim)
    check_sizes(comm, "allgather", sizes, tensor.shape[dim])
    if len(set(sizes)) == 1:
        return join_rows(comm.allgather(tensor), dim)
    shapes = [(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]) for size in sizes]
    counts = [torch.Size(shape).numel() for shape in shapes]
    flat = tensor.new_empty(sum(counts))
    comm.do_allgatherv(flat, tensor, counts)
    if dim == 0:
        return flat.view(sum(sizes), *tensor.shape[1:])
    parts = zip(torch.split(flat, counts), shapes, strict=True)
    return torch.cat([part.view(shape) for part, shape in parts], dim)


def reduce_scatter_along(
    comm: Communicator, tensor: torch.Tensor, op: Op, dim: int | None, sizes: Sequence[int] | None
) -> torch.Tensor:
    """This rank's part of the reduction, which is cut along dim, evenly or into these sizes."""
    dim = check_dim(comm.rank_name(), "reduce_scatter", tensor, dim)
    if sizes is None:
        share, rest = divmod(tensor.shape[dim], comm.world_size)
        if rest:
            raise ValueError(
                f"{comm.rank_name()}, reduce_scatter: dim {dim} of {tuple(tensor.shape)} cannot be "
                f"cut evenly for {comm.world_size} ranks. Pass sizes=, one for each."
            )
        sizes = [share] * comm.world_size
    check_shares(comm, "reduce_scatter", sizes, tensor.shape[dim])
    if len(set(sizes)) == 1:
        cut = (*tensor.shape[:dim], comm.world_size, sizes[0], *tensor.shape[dim + 1 :])
        rows = tensor.view(cut).movedim(dim, 0)
        return comm.reduce_scatter(rows.contiguous(), op)
    parts = torch.split(tensor, list(sizes), dim)
    flat = torch.cat([part.flatten() for part in parts]) if dim else tensor.flatten()
    out = torch.empty_like(parts[comm.rank], memory_format=torch.contiguous_format)
    comm.do_reduce_scatterv(out, flat, [part.numel() for part in parts], op)
    return out
