"""Collectives with torch.distributed's arguments: lists of tensors, and uneven sizes.

list_collectives.allgather(comm, [a, b, c], tensor)

Tensors may be parts of others, complex, lazily negated or conjugated, or under autograd. torch asks
for as many elements on every rank, not for the same shape; so a communicator gets them flat here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed import ReduceOp

from communicator.base import Communicator
from communicator.calls.dtypes import NAMES_OF_TORCH_OPS
from communicator.errors import Unsupported

BOOL_OPS = {
    **NAMES_OF_TORCH_OPS,
    ReduceOp.SUM: "max",
    ReduceOp.BOR: "max",
    ReduceOp.PRODUCT: "min",
    ReduceOp.BAND: "min",
}
COMPLEX_OPS = {op: NAMES_OF_TORCH_OPS[op] for op in (ReduceOp.SUM, ReduceOp.AVG)}
BITWISE = {
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
Tensors = Sequence[torch.Tensor]


def allreduce(comm: Communicator, tensor: torch.Tensor, op: Any) -> None:
    with flattened(tensor) as whole:
        if _is_bitwise(op, tensor.dtype):
            whole.copy_(_bitwise(comm, whole, op))
        else:
            comm.allreduce(whole, _op_name(comm, op, tensor.dtype))


def allreduce_sparse(comm: Communicator, tensor: torch.Tensor, op: Any) -> None:
    """The sum of all ranks' sparse_coo tensors, coalesced. Each may have its own number of entries.

    Needs memory for world_size times the most entries of a rank.
    """
    if op != ReduceOp.SUM:
        raise Unsupported(f"{comm.rank_name()}: {op} of sparse tensors is not offered, only SUM.")
    own = tensor.detach().coalesce()
    counts = [int(count) for count in comm.allgather(torch.tensor([len(own.values())]))]
    rows = _allgather_padded(comm, own.indices().t(), counts)
    values = _allgather_padded(comm, own.values(), counts)
    total = torch.sparse_coo_tensor(rows.t(), values, own.shape, check_invariants=False)
    with torch.no_grad():
        tensor.copy_(total.coalesce())


def _allgather_padded(comm: Communicator, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """All ranks' rows, rank after rank, of which each has so many."""
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in counts]
    allgather(comm, gathered, padded)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])


def _is_bitwise(op: Any, dtype: torch.dtype) -> bool:
    is_whole = not dtype.is_floating_point and not dtype.is_complex
    return is_whole and op in BITWISE and not (dtype == torch.bool and op in BOOL_OPS)


def _bitwise(comm: Communicator, whole: torch.Tensor, op: Any) -> torch.Tensor:
    rows = comm.allgather(whole)
    for row in rows[1:]:
        BITWISE[op](rows[0], row, out=rows[0])
    return rows[0]


def broadcast(comm: Communicator, tensor: torch.Tensor, src: int) -> None:
    with flattened(tensor) as whole:
        comm.broadcast(whole, src)


def reduce(comm: Communicator, tensor: torch.Tensor, dst: int, op: Any) -> None:
    with flattened(tensor) as whole:
        if not _is_bitwise(op, tensor.dtype):
            comm.reduce(whole, dst, _op_name(comm, op, tensor.dtype))
            return
        total = _bitwise(comm, whole, op)
        if comm.rank == dst:
            whole.copy_(total)


def allgather(comm: Communicator, outs: Tensors, tensor: torch.Tensor) -> None:
    """outs: one for each rank, each of the shape that rank has."""
    if any(out.shape != outs[0].shape for out in outs):
        return _allgather_uneven(comm, outs, tensor)
    for out, row in zip(outs, comm.allgather(_as_flat_input(tensor).view(-1)), strict=True):
        _write_back(out, row)


def _allgather_uneven(comm: Communicator, outs: Tensors, tensor: torch.Tensor) -> None:
    outs[comm.rank].detach().copy_(tensor.detach())
    for src, out in enumerate(outs):
        broadcast(comm, out, src)


def allgather_flat(comm: Communicator, out: torch.Tensor, tensor: torch.Tensor) -> None:
    """out: what the ranks have, one after the other."""
    own_input = _as_flat_input(tensor).view(-1)
    with flattened(out) as whole:
        comm.allgather(own_input, out=whole.view(comm.world_size, -1))


def reduce_scatter(comm: Communicator, out: torch.Tensor, rows: Tensors, op: Any) -> None:
    """rows: one for each rank, which may differ in shape."""
    if any(row.shape != rows[0].shape for row in rows):
        for dst, row in enumerate(rows):
            total = _as_flat_input(row).view(-1).clone()
            comm.reduce(total, dst, _op_name(comm, op, row.dtype))
            if dst == comm.rank:
                _write_back(out, total)
        return
    reduce_scatter_flat(comm, out, torch.stack([row.detach() for row in rows]), op)


def reduce_scatter_flat(
    comm: Communicator, out: torch.Tensor, tensor: torch.Tensor, op: Any
) -> None:
    """tensor: what is for each rank, one after the other."""
    with flattened(out) as whole:
        rows = _as_flat_input(tensor).view(comm.world_size, -1)
        comm.reduce_scatter(rows, _op_name(comm, op, out.dtype), out=whole)


def gather(comm: Communicator, outs: Tensors, tensor: torch.Tensor, dst: int) -> None:
    """outs: on rank dst one for each rank, on the others none."""
    if comm.rank == dst:
        exchange(comm, [None] * comm.world_size, outs)
        outs[dst].detach().copy_(tensor.detach())
    else:
        comm.send(_as_flat_input(tensor).view(-1), dst)


def scatter(comm: Communicator, out: torch.Tensor, rows: Tensors, src: int) -> None:
    """rows: on rank src one for each rank, on the others none."""
    if comm.rank == src:
        exchange(comm, rows, [None] * comm.world_size)
        out.detach().copy_(rows[src].detach())
    else:
        with flattened(out) as whole:
            comm.recv(whole, src)


def alltoall(comm: Communicator, outs: Tensors, tensors: Tensors) -> None:
    """tensors[i] goes to rank i, and outs[i] comes from it; sizes may differ."""
    outs[comm.rank].detach().copy_(tensors[comm.rank].detach())
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
        parts = torch.split(tensor.detach(), list(sizes) or even)
        return alltoall(comm, torch.split(out.detach(), list(out_sizes) or even), parts)
    rows = (comm.world_size, -1)
    with flattened(out) as whole:
        comm.alltoall(_as_flat_input(tensor).view(rows), out=whole.view(rows))


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
    with flattened_all([tensor for _, tensor, _ in calls]) as whole, comm.group():
        for (move, _, peer), tensor in zip(calls, whole, strict=True):
            move(tensor, peer)


def _op_name(comm: Communicator, op: Any, dtype: torch.dtype) -> str:
    """Our name of the op. Complex numbers are moved as pairs, of which only sums are right."""
    table = NAMES_OF_TORCH_OPS
    if dtype == torch.bool or dtype.is_complex:
        table = BOOL_OPS if dtype == torch.bool else COMPLEX_OPS
    if op not in table:
        raise Unsupported(
            f"{comm.rank_name()}: {op} of {dtype} is not offered here. Use one of "
            f"{', '.join(op.name for op in table)}."
        )
    return table[op]


def _as_flat_input(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in one piece of memory: without autograd, what is lazy done, complex as pairs."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous()


def _write_back(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Write into the tensor what _as_flat_input would give."""
    target = tensor.detach()
    if target.is_complex():
        whole = torch.view_as_complex(whole.view(*target.shape, 2))
    target.copy_(whole.view(target.shape))


@contextmanager
def flattened_all(tensors: Tensors) -> Iterator[list[torch.Tensor]]:
    """The tensors, each flat in one piece; what is written there ends up in the tensors."""
    with ExitStack() as stack:
        yield [stack.enter_context(flattened(tensor)) for tensor in tensors]


@contextmanager
def flattened(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, flat in one piece; what is written there ends up in the tensor."""
    whole = _as_flat_input(tensor)
    yield whole.view(-1)
    if whole.data_ptr() != tensor.data_ptr():
        _write_back(tensor, whole)
