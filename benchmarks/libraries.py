"""The calls of each library that moves tensors, in one form: ours, gloo's through torch, MPI's.

library = gloo(coor)
library.call("allreduce", tensor, result("allreduce", tensor, world_size))()
is_right(library, "allreduce", 4096, torch.float32)  # on this rank
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.mpi_library import ROWS, Call, Library, gives_answer
from coordinator import Coordinator


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


def gloo(coor: Coordinator) -> Library:
    store = coor.store("benchmark")
    dist.init_process_group("gloo", store=store, rank=coor.rank, world_size=coor.world_size)
    return Gloo("gloo", None, coor.rank, coor.world_size)


def is_right(library: Library, operation: str, nbytes: int, dtype: torch.dtype) -> bool:
    """Does the call give this rank the plain answer? On inputs that differ by rank and element."""
    ramp = (torch.arange(nbytes // dtype.itemsize) % 7).to(dtype)
    ramp = ramp.view(library.size, -1) if operation in ROWS else ramp
    return gives_answer(library, operation, ramp)
