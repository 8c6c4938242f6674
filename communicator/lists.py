"""Collectives in the shapes that torch.distributed knows: lists of tensors, and uneven sizes.

lists.allgather(comm, [a, b, c], mine)

Tensors may be parts of others, complex, or under autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed import ReduceOp

from communicator.base import Communicator
from communicator.errors import Unsupported

OPS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MAX: "max",
    ReduceOp.MIN: "min",
}
BOOL_OPS = {
    **OPS,
    ReduceOp.SUM: "max",
    ReduceOp.BOR: "max",
    ReduceOp.PRODUCT: "min",
    ReduceOp.BAND: "min",
}
BITWISE = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
Tensors = Sequence[torch.Tensor]


def allreduce(comm: Communicator, tensor: torch.Tensor, op: Any) -> None:
    with _written(tensor) as whole:
        if op in BITWISE and whole.dtype != torch.bool:
            rows = comm.allgather(whole)
            for row in rows[1:]:
                BITWISE[op](rows[0], row, out=rows[0])
            whole.copy_(rows[0])
        else:
            comm.allreduce(whole, _op(comm, op, whole.dtype))


def broadcast(comm: Communicator, tensor: torch.Tensor, src: int) -> None:
    with _written(tensor) as whole:
        comm.broadcast(whole, src)


def reduce(comm: Communicator, tensor: torch.Tensor, dst: int, op: Any) -> None:
    with _written(tensor) as whole:
        comm.reduce(whole, dst, _op(comm, op, whole.dtype))


def allgather(comm: Communicator, outs: Tensors, tensor: torch.Tensor) -> None:
    """outs: one for each rank, each of the shape that rank has."""
    if any(out.shape != outs[0].shape for out in outs):
        return _allgather_uneven(comm, outs, tensor)
    for out, row in zip(outs, comm.allgather(_read(tensor)), strict=True):
        _plain(out).copy_(row.view(_plain(out).shape))


def _allgather_uneven(comm: Communicator, outs: Tensors, tensor: torch.Tensor) -> None:
    _plain(outs[comm.rank]).copy_(_plain(tensor))
    for src, out in enumerate(outs):
        broadcast(comm, out, src)


def allgather_flat(comm: Communicator, out: torch.Tensor, tensor: torch.Tensor) -> None:
    """out: what the ranks have, one after the other."""
    mine = _read(tensor)
    with _written(out) as whole:
        comm.allgather(mine, out=whole.view(comm.world_size, *mine.shape))


def reduce_scatter(comm: Communicator, out: torch.Tensor, rows: Tensors, op: Any) -> None:
    """rows: one for each rank, which may differ in shape."""
    if any(row.shape != rows[0].shape for row in rows):
        for dst, row in enumerate(rows):
            total = _read(row).clone()
            comm.reduce(total, dst, _op(comm, op, total.dtype))
            if dst == comm.rank:
                _plain(out).copy_(total)
        return
    reduce_scatter_flat(comm, out, torch.stack([_plain(row) for row in rows]), op)


def reduce_scatter_flat(
    comm: Communicator, out: torch.Tensor, tensor: torch.Tensor, op: Any
) -> None:
    """tensor: what is for each rank, one after the other."""
    with _written(out) as whole:
        rows = _read(tensor).view(comm.world_size, *whole.shape)
        comm.reduce_scatter(rows, _op(comm, op, whole.dtype), out=whole)


def gather(comm: Communicator, outs: Tensors, tensor: torch.Tensor, dst: int) -> None:
    """outs: on rank dst one for each rank, on the others none."""
    if comm.rank == dst:
        exchange(comm, [None] * comm.world_size, outs)
        _plain(outs[dst]).copy_(_plain(tensor))
    else:
        comm.send(_read(tensor), dst)


def scatter(comm: Communicator, out: torch.Tensor, rows: Tensors, src: int) -> None:
    """rows: on rank src one for each rank, on the others none."""
    if comm.rank == src:
        exchange(comm, rows, [None] * comm.world_size)
        _plain(out).copy_(_plain(rows[src]))
    else:
        with _written(out) as whole:
            comm.recv(whole, src)


def alltoall(comm: Communicator, outs: Tensors, tensors: Tensors) -> None:
    """tensors[i] goes to rank i, and outs[i] comes from it; sizes may differ."""
    _plain(outs[comm.rank]).copy_(_plain(tensors[comm.rank]))
    exchange(comm, tensors, outs)


def alltoall_flat(
    comm: Communicator,
    out: torch.Tensor,
    tensor: torch.Tensor,
    out_sizes: Sequence[int],
    sizes: Sequence[int],
) -> None:
    """Equal parts along the first dim, or parts of these sizes."""
    if out_sizes or sizes:
        even = [tensor.shape[0] // comm.world_size] * comm.world_size
        with _written(out) as whole:
            parts = torch.split(_read(tensor), list(sizes) or even)
            alltoall(comm, torch.split(whole, list(out_sizes) or even), parts)
        return
    mine = _read(tensor)
    with _written(out) as whole:
        shape = (comm.world_size, -1)
        comm.alltoall(mine.view(shape), out=whole.view(shape))


def exchange(
    comm: Communicator,
    sends: Sequence[torch.Tensor | None],
    recvs: Sequence[torch.Tensor | None],
) -> None:
    """To and from each other rank at once; None where there is nothing."""
    calls = [
        (move, tensor, peer)
        for move, tensors in ((comm.send, sends), (comm.recv, recvs))
        for peer, tensor in enumerate(tensors)
        if tensor is not None and peer != comm.rank
    ]
    with pieces([tensor for _, tensor, _ in calls]) as whole, comm.group():
        for (move, _, peer), tensor in zip(calls, whole, strict=True):
            move(tensor, peer)


def _op(comm: Communicator, op: Any, dtype: torch.dtype) -> str:
    table = BOOL_OPS if dtype == torch.bool else OPS
    if op not in table:
        raise Unsupported(
            f"rank {comm.rank}: {op} of {dtype} is not offered here. Use SUM, AVG, PRODUCT, MAX or "
            "MIN."
        )
    return table[op]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without autograd, complex numbers as pairs."""
    found = tensor.detach()
    return torch.view_as_real(found) if found.is_complex() else found


def _read(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor in one piece of memory."""
    return _plain(tensor).contiguous()


@contextmanager
def pieces(tensors: Tensors) -> Iterator[list[torch.Tensor]]:
    """The plain tensors, each in one piece; what is written there ends up in the tensors."""
    with ExitStack() as stack:
        yield [stack.enter_context(_written(tensor)) for tensor in tensors]


@contextmanager
def _written(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensor in one piece of memory; what is written there ends up in the tensor."""
    target = _plain(tensor)
    whole = target.contiguous()
    yield whole
    if not target.is_contiguous():
        target.copy_(whole)
