"""Collectives with torch.distributed's arguments: lists of tensors, and uneven sizes.

list_collectives.allgather(comm, [a, b, c], tensor)

Tensors may be parts of others, complex, lazily negated or conjugated, or under autograd. torch asks
for as many elements on every rank, not for the same shape; so a communicator gets them flat here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from zlib import crc32

import torch
from torch.distributed import ReduceOp

from communicator.calls.call_check import check_identical, tensor_to_text, text_to_tensor
from communicator.calls.dtypes import DTYPES, NAMES_OF_TORCH_OPS
from communicator.communicator import Communicator
from communicator.errors import CommunicatorError, Unsupported
from communicator.p2p.flat_tensors import (
    as_flat_input,
    expanded_dims,
    flat_numel,
    flattened,
    flattened_all,
    write_back,
)

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


@contextmanager
def _in_place(
    comm: Communicator, tensor: torch.Tensor, is_written: bool = True
) -> Iterator[torch.Tensor]:
    """flattened(tensor); an error if it is expanded, and what came is more than one number."""
    with flattened(tensor, is_written) as whole:
        yield whole
    if expanded_dims(tensor):
        kept, bits = as_flat_input(tensor).view(-1).view(torch.uint8), whole.view(torch.uint8)
        if not torch.equal(kept, bits):
            raise CommunicatorError(
                f"{comm.rank_name()}: a tensor of {tuple(tensor.shape)} is expanded, with strides "
                f"{tensor.stride()}, and another rank's is not, so all that came was lost "
                "except one number. Pass its clone()."
            )


def allreduce(comm: Communicator, tensor: torch.Tensor, op: Any) -> None:
    with _in_place(comm, tensor) as whole:
        if _is_bitwise(op, tensor.dtype):
            whole.copy_(_bitwise(comm, whole, op))
        else:
            comm.allreduce(whole, _op_name(comm, op, tensor.dtype))


def compare_lists(comm: Communicator, call: str, tensors: Tensors) -> None:
    """Raise on every rank, before anything moves, unless the lists are as long, of the same sizes.

    For a list of several: what is wrong in a later one would show once the first has moved.
    """
    if len(tensors) > 1 and _is_compared(comm):
        sizes = ", ".join(f"{flat_numel(tensor)} {tensor.dtype}" for tensor in tensors)
        _compare(comm, call, f"{len(tensors)} tensors ({crc32(sizes.encode()):08x}) of {sizes}")


def _compare(comm: Communicator, call: str, text: str) -> None:
    """Raise on every rank if they describe other calls."""
    if _is_compared(comm):
        rows = comm.allgather(text_to_tensor(text))
        check_identical(comm, call, [tensor_to_text(row) for row in rows])


def _is_compared(comm: Communicator) -> bool:
    """On the CPU alone, as in _compare_parts."""
    return comm.device.type == "cpu" and comm.world_size > 1


def allreduce_coalesced(comm: Communicator, tensors: Tensors, op: Any) -> None:
    """Each reduced once, also one that is there twice or lies in another."""
    compare_lists(comm, "allreduce_coalesced", tensors)
    if _are_apart(tensors):
        for tensor in tensors:
            allreduce(comm, tensor, op)
        return
    totals = [tensor.detach().clone() for tensor in tensors]
    for total in totals:
        allreduce(comm, total, op)
    for tensor, total in zip(tensors, totals, strict=True):
        tensor.detach().copy_(total)


def _are_apart(tensors: Tensors) -> bool:
    """True if no tensor is within the memory of another, from its first to its last element."""
    spans = sorted(_span(tensor) for tensor in tensors if tensor.numel())
    return all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in dims)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def allreduce_sparse(comm: Communicator, tensor: torch.Tensor, op: Any) -> None:
    """The sum of all ranks' sparse_coo tensors, coalesced. Each may have its own number of entries.

    Needs memory for world_size times the most entries of a rank.
    """
    if op != ReduceOp.SUM:
        raise Unsupported(f"{comm.rank_name()}: {op} of sparse tensors is not offered, only SUM.")
    own = tensor.detach().coalesce()
    sizes = [len(own.values()), own.sparse_dim(), *own.shape]
    facts = comm.allgather(torch.tensor(sizes, device=comm.device)).tolist()
    counts = [count for count, *_ in facts]
    check_identical(comm, "sparse allreduce", [str(shape) for _, *shape in facts])
    rows = _allgather_padded(comm, own.indices().t(), counts)
    values = _allgather_padded(comm, own.values(), counts)
    total = torch.sparse_coo_tensor(rows.t(), values, own.shape, check_invariants=False)
    with torch.no_grad():
        tensor.copy_(total.coalesce())


def _allgather_padded(comm: Communicator, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """All ranks' rows, rank after rank; counts: of each rank."""
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in counts]
    allgather(comm, gathered, padded)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])


def _is_bitwise(op: Any, dtype: torch.dtype) -> bool:
    is_whole = not dtype.is_floating_point and not dtype.is_complex
    return is_whole and op in BITWISE and not (dtype == torch.bool and op in BOOL_OPS)


def _bitwise(comm: Communicator, whole: torch.Tensor, op: Any) -> torch.Tensor:
    return _combine(comm.allgather(whole), op)


def _combine(rows: torch.Tensor, op: Any) -> torch.Tensor:
    """The bits of all rows in one, the first of them."""
    for row in rows[1:]:
        BITWISE[op](rows[0], row, out=rows[0])
    return rows[0]


def broadcast(comm: Communicator, tensor: torch.Tensor, src: int) -> None:
    with _in_place(comm, tensor, is_written=comm.rank != src) as whole:
        comm.broadcast(whole, src)


def reduce(comm: Communicator, tensor: torch.Tensor, dst: int, op: Any) -> None:
    with _in_place(comm, tensor, is_written=comm.rank == dst) as whole:
        if not _is_bitwise(op, tensor.dtype):
            comm.reduce(whole, dst, _op_name(comm, op, tensor.dtype))
            return
        total = _bitwise(comm, whole, op)
        if comm.rank == dst:
            whole.copy_(total)


def allgather(comm: Communicator, outs: Tensors, tensor: torch.Tensor) -> None:
    """outs: one for each rank, each of the shape that rank has."""
    own, sizes = as_flat_input(tensor).view(-1), [flat_numel(out) for out in outs]
    parts: Iterable[torch.Tensor]
    if len(set(sizes)) == 1:
        parts = comm.allgather(own)
    else:
        parts = torch.split(comm.allgather(own, sizes=sizes), sizes)
    for out, part in zip(outs, parts, strict=True):
        write_back(out, part)


def allgather_flat(comm: Communicator, out: torch.Tensor, tensor: torch.Tensor) -> None:
    """out: what the ranks have, one after the other."""
    own_input = as_flat_input(tensor).view(-1)
    with flattened(out) as whole:
        comm.allgather(own_input, out=whole.view(comm.world_size, -1))


def reduce_scatter(comm: Communicator, out: torch.Tensor, rows: Tensors, op: Any) -> None:
    """rows: one for each rank, which may differ in shape."""
    flat_rows = [as_flat_input(row).view(-1) for row in rows]
    sizes, flat = [len(row) for row in flat_rows], torch.cat(flat_rows)
    if len(set(sizes)) == 1:
        return _reduce_scatter_rows(comm, out, flat, op)
    if _is_bitwise(op, out.dtype):
        total = torch.split(_bitwise(comm, flat, op), sizes)[comm.rank]
    else:
        total = comm.reduce_scatter(flat, _op_name(comm, op, out.dtype), sizes=sizes)
    write_back(out, total)


def reduce_scatter_flat(
    comm: Communicator, out: torch.Tensor, tensor: torch.Tensor, op: Any
) -> None:
    """tensor: what is for each rank, one after the other."""
    _reduce_scatter_rows(comm, out, as_flat_input(tensor), op)


def _reduce_scatter_rows(
    comm: Communicator, out: torch.Tensor, flat: torch.Tensor, op: Any
) -> None:
    rows = flat.view(comm.world_size, -1)
    with flattened(out) as whole:
        if _is_bitwise(op, out.dtype):
            whole.copy_(_combine(comm.alltoall(rows), op))
        else:
            comm.reduce_scatter(rows, _op_name(comm, op, out.dtype), out=whole)


def gather(comm: Communicator, outs: Tensors, tensor: torch.Tensor, dst: int) -> None:
    """outs: on rank dst one for each rank, on the others none."""
    own = as_flat_input(tensor).view(-1)
    _compare_ends(comm, "gather", own, dst)
    rows = comm.gather(own, dst)
    if rows is not None:
        for out, part in zip(outs, rows, strict=True):
            write_back(out, part)


def scatter(comm: Communicator, out: torch.Tensor, rows: Tensors, src: int) -> None:
    """rows: on rank src one for each rank, on the others none."""
    stacked = None
    if comm.rank == src:
        stacked = torch.stack([as_flat_input(row).view(-1) for row in rows])
    with flattened(out) as whole:
        _compare_ends(comm, "scatter", whole, src)
        comm.scatter(whole, stacked, src)


def _compare_ends(comm: Communicator, call: str, own: torch.Tensor, root: int) -> None:
    """Raise on every rank if they call with other numbers of elements, dtypes or roots.

    Where a collective's messages do not say so: they go from the root or to it, and a rank that
    only sends would hear of a mistake from none.
    """
    if not comm.capabilities.compares_every_call:
        _compare(comm, call, f"{own.numel()} elements of {own.dtype}, root {root}")


def alltoall(comm: Communicator, outs: Tensors, tensors: Tensors) -> None:
    """tensors[i] goes to rank i, and outs[i] comes from it; sizes may differ.

    A tensor that lies between the outputs' first and last element goes from a copy.
    """
    _compare_parts(comm, outs, tensors)
    begins, ends = zip(*map(_span, outs), strict=True)
    begin, end = min(begins), max(ends)
    tensors = [
        tensor.detach().clone() if _span(tensor)[0] < end and begin < _span(tensor)[1] else tensor
        for tensor in tensors
    ]
    write_back(outs[comm.rank], as_flat_input(tensors[comm.rank]))
    exchange(comm, tensors, outs)


def _compare_parts(comm: Communicator, outs: Tensors, tensors: Tensors) -> None:
    """Raise on every rank unless what each sends to each is what that one expects.

    On the CPU alone: elsewhere the host would have to wait for the answer.
    """
    if comm.device.type != "cpu" or comm.world_size == 1:
        return
    counts = [flat_numel(tensor) for tensor in (*tensors, *outs)]
    facts = comm.allgather(torch.tensor([_dtype_number(outs[0]), *counts]))
    dtypes, (sent, expected) = facts[:, 0].tolist(), facts[:, 1:].chunk(2, dim=1)
    wrong = (sent != expected.t()).nonzero().tolist()
    if not wrong and len(set(dtypes)) == 1:
        return
    problem = f"the dtypes are {dtypes}, by rank"
    if wrong:
        src, dst = wrong[0]
        problem = (
            f"{comm.rank_name(src)} sends {sent[src, dst]} elements to {comm.rank_name(dst)}, "
            f"which expects {expected[dst, src]}"
        )
    raise CommunicatorError(
        f"{comm.rank_name()}: the ranks disagree in an alltoall: {problem}. Nothing was exchanged. "
        "Let the parts be of the same dtype, and as large where they go as where they come from."
    )


def split_rows(
    whole: torch.Tensor, sizes: Sequence[int], world_size: int
) -> tuple[torch.Tensor, ...]:
    """Parts of these sizes along the first dim, or, if none are given, equal ones."""
    return torch.split(whole.detach(), list(sizes) or [len(whole) // world_size] * world_size)


def alltoall_flat(
    comm: Communicator,
    out: torch.Tensor,
    tensor: torch.Tensor,
    out_sizes: Sequence[int],
    sizes: Sequence[int],
) -> None:
    """Equal parts along the first dim, or parts of these sizes."""
    if out_sizes or sizes:
        size = comm.world_size
        return alltoall(comm, split_rows(out, out_sizes, size), split_rows(tensor, sizes, size))
    rows = (comm.world_size, -1)
    with flattened(out) as whole:
        comm.alltoall(as_flat_input(tensor).view(rows), out=whole.view(rows))


def exchange(
    comm: Communicator, sends: Sequence[torch.Tensor | None], recvs: Sequence[torch.Tensor | None]
) -> None:
    """To and from each other rank at once; None where there is nothing."""
    calls = [
        (kind, tensor, peer)
        for kind, tensors in (("send", sends), ("recv", recvs))
        for peer, tensor in enumerate(tensors)
        if tensor is not None and peer != comm.rank
    ]
    with flattened_all([(kind, tensor) for kind, tensor, _ in calls]) as whole, comm.group():
        for (kind, _, peer), tensor in zip(calls, whole, strict=True):
            getattr(comm, kind)(tensor, peer)


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


def _dtype_number(tensor: torch.Tensor) -> int:
    """The number of a dtype, the same on all ranks."""
    return [*(info.torch for info in DTYPES), torch.complex32].index(tensor.dtype)
