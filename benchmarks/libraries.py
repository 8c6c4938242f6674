"""The calls of each library that moves tensors, in one form: ours, gloo's through torch, MPI's.

library = gloo(coor)
library.call("allreduce", tensor, result("allreduce", tensor, world_size))()
is_right(library, "allreduce", 4096, torch.float32)  # on this rank
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from coordinator import Coordinator

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

    def call(self, operation: str, tensor: torch.Tensor, out: torch.Tensor) -> Call:
        if operation != "there and back":
            return self.collective(operation, tensor, out)
        if self.rank > 1:
            return lambda: None
        send, recv = self.point(tensor, 1 - self.rank)
        first, then = (send, recv) if self.rank == 0 else (recv, send)
        return lambda: (first(), then())

    def collective(self, operation: str, tensor: torch.Tensor, out: torch.Tensor) -> Call:
        raise NotImplementedError

    def point(self, tensor: torch.Tensor, peer: int) -> tuple[Call, Call]:
        raise NotImplementedError


class Ours(Library):
    def collective(self, operation: str, tensor: torch.Tensor, out: torch.Tensor) -> Call:
        world = self.world
        calls: dict[str, Call] = {
            "allreduce": lambda: world.allreduce(tensor),
            "broadcast": lambda: world.broadcast(tensor),
            "reduce": lambda: world.reduce(tensor),
            "allgather": lambda: world.allgather(tensor, out=out),
            "reduce_scatter": lambda: world.reduce_scatter(tensor, out=out),
            "alltoall": lambda: world.alltoall(tensor, out=out),
            "barrier": lambda: world.barrier(),
        }
        return calls[operation]

    def point(self, tensor: torch.Tensor, peer: int) -> tuple[Call, Call]:
        return lambda: self.world.send(tensor, peer), lambda: self.world.recv(tensor, peer)


class Gloo(Library):
    def collective(self, operation: str, tensor: torch.Tensor, out: torch.Tensor) -> Call:
        flat, rows = tensor.view(-1), list(out) if operation == "allgather" else []
        calls: dict[str, Call] = {
            "allreduce": lambda: dist.all_reduce(tensor),
            "broadcast": lambda: dist.broadcast(tensor, 0),
            "reduce": lambda: dist.reduce(tensor, 0),
            "allgather": lambda: dist.all_gather(rows, tensor),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, flat),
            "alltoall": lambda: dist.all_to_all_single(out, tensor),
            "barrier": lambda: dist.barrier(),
        }
        return calls[operation]

    def point(self, tensor: torch.Tensor, peer: int) -> tuple[Call, Call]:
        return lambda: dist.send(tensor, peer), lambda: dist.recv(tensor, peer)


class Mpi(Library):
    dtypes = ("float32",)  # numpy has no bfloat16

    def collective(self, operation: str, tensor: torch.Tensor, out: torch.Tensor) -> Call:
        from mpi4py import MPI

        world, array, rows = self.world, tensor.numpy(), out.numpy()
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

    def point(self, tensor: torch.Tensor, peer: int) -> tuple[Call, Call]:
        array = tensor.numpy()
        return lambda: self.world.Send(array, peer), lambda: self.world.Recv(array, peer)


def mpi(rank: int, size: int) -> Library:
    from mpi4py import MPI

    said = MPI.Get_library_version()
    name = "Open MPI" if "Open MPI" in said else "MPICH"
    if "Intel" in said:  # of another folder, so its version stands above no table
        name = f"Intel MPI {said.partition('Library ')[2].split()[0]}"
    return Mpi(name, MPI.COMM_WORLD, rank, size)


def gloo(coor: Coordinator) -> Library:
    store = coor.store("benchmark")
    dist.init_process_group("gloo", store=store, rank=coor.rank, world_size=coor.world_size)
    return Gloo("gloo", None, coor.rank, coor.world_size)


def result(operation: str, tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Where the call writes: a tensor of its own, or tensor itself where it works in place."""
    if operation == "allgather":
        return torch.zeros((size, *tensor.shape), dtype=tensor.dtype)
    if operation == "reduce_scatter":
        return torch.zeros_like(tensor[0])
    return torch.zeros_like(tensor) if operation == "alltoall" else tensor


def is_right(library: Library, operation: str, nbytes: int, dtype: torch.dtype) -> bool:
    """Does the call give this rank the plain answer? On inputs that differ by rank and element."""
    rank, size = library.rank, library.size
    ramp = (torch.arange(nbytes // dtype.itemsize) % 7).to(dtype)
    ramp = ramp.view(size, -1) if operation in ROWS else ramp
    tensor = ramp + rank
    out = result(operation, tensor, size)
    library.call(operation, tensor, out)()
    answer = _answer(operation, ramp, rank, size)
    return answer is None or torch.equal(out, answer)


def _answer(operation: str, ramp: torch.Tensor, rank: int, size: int) -> torch.Tensor | None:
    """What rank must hold after the call if each put in ramp + its rank; None if anything."""
    if operation in ("allreduce", "reduce", "reduce_scatter"):
        total = size * ramp + sum(range(size))
        if operation == "reduce_scatter":
            return total[rank]
        return total if operation == "allreduce" or rank == 0 else None
    if operation == "broadcast" or (operation == "there and back" and rank < 2):
        return ramp
    if operation == "allgather":
        return torch.stack([ramp + other for other in range(size)])
    if operation == "alltoall":
        return torch.stack([ramp[rank] + other for other in range(size)])
    return None
