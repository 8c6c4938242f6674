"""The calls of a library in one form, and those of an MPI; imports no torch.

library = mpi(rank, size)
library.call("allreduce", array, out)()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

ROWS = ("reduce_scatter", "alltoall")  # take a row for each rank
Call = Callable[[], object]


class Library:
    """The calls of one library on one tensor, ready to be timed. See result for out.

    operations, dtypes: those it has, if not all.
    """

    operations: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    def __init__(self, name: str, world: Any, rank: int, size: int) -> None:
        self.name, self.world, self.rank, self.size = name, world, rank, size

    def call(self, operation: str, tensor: Any, out: Any) -> Call:
        if operation != "there and back":
            return self.collective(operation, tensor, out)
        if self.rank > 1:
            return lambda: None
        send, recv = self.point(tensor, 1 - self.rank)
        first, then = (send, recv) if self.rank == 0 else (recv, send)
        return lambda: (first(), then())

    def collective(self, operation: str, tensor: Any, out: Any) -> Call:
        raise NotImplementedError

    def point(self, tensor: Any, peer: int) -> tuple[Call, Call]:
        raise NotImplementedError


class Mpi(Library):
    dtypes = ("float32",)  # numpy has no bfloat16

    def collective(self, operation: str, tensor: Any, out: Any) -> Call:
        from mpi4py import MPI

        world, array, rows = self.world, np.asarray(tensor), np.asarray(out)
        reduced = (MPI.IN_PLACE, array) if self.rank == 0 else (array, None)
        calls: dict[str, Call] = {
            "allreduce": lambda: world.Allreduce(MPI.IN_PLACE, array),
            "broadcast": lambda: world.Bcast(array, 0),
            "reduce": lambda: world.Reduce(*reduced),
            "allgather": lambda: world.Allgather(array, rows),
            "reduce_scatter": lambda: world.Reduce_scatter_block(array, rows),
            "alltoall": lambda: world.Alltoall(array, rows),
            "barrier": lambda: world.Barrier(),
        }
        return calls[operation]

    def point(self, tensor: Any, peer: int) -> tuple[Call, Call]:
        array = np.asarray(tensor)
        return lambda: self.world.Send(array, peer), lambda: self.world.Recv(array, peer)


def mpi(rank: int, size: int) -> Library:
    from mpi4py import MPI

    said = MPI.Get_library_version()
    name = "Open MPI" if "Open MPI" in said else "MPICH"
    if "Intel" in said:  # of another folder, so its version stands above no table
        name = f"Intel MPI {said.partition('Library ')[2].split()[0]}"
    return Mpi(name, MPI.COMM_WORLD, rank, size)


def result(operation: str, tensor: Any, size: int) -> Any:
    """Where the call writes: numbers of its own, or tensor itself where it works in place."""
    if operation == "allgather":
        return 0 * tensor.repeat(size).reshape(size, *tensor.shape)
    if operation == "reduce_scatter":
        return 0 * tensor[0]
    return 0 * tensor if operation == "alltoall" else tensor


def gives_answer(library: Library, operation: str, ramp: Any) -> bool:
    """Does the call on ramp + rank give this rank the plain answer? As arrays, or tensors."""
    rank, size = library.rank, library.size
    tensor = ramp + rank
    out = result(operation, tensor, size)
    library.call(operation, tensor, out)()
    answer = _answer(operation, ramp, rank, size)
    rows = [out] if operation not in ("allgather", "alltoall") else out
    return answer is None or all(
        bool((row == right).all()) for row, right in zip(rows, answer, strict=True)
    )


def _answer(operation: str, ramp: Any, rank: int, size: int) -> list[Any] | None:
    """The rows that rank must hold after the call; None if anything."""
    if operation in ("allreduce", "reduce", "reduce_scatter"):
        total = size * ramp + sum(range(size))
        if operation == "reduce_scatter":
            return [total[rank]]
        return [total] if operation == "allreduce" or rank == 0 else None
    if operation == "broadcast" or (operation == "there and back" and rank < 2):
        return [ramp]
    if operation == "allgather":
        return [ramp + other for other in range(size)]
    if operation == "alltoall":
        return [ramp[rank] + other for other in range(size)]
    return None
