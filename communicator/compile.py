"""The documented names of communicator.torch_interop.compiled_collectives."""

from communicator.torch_interop.compiled_collectives import (
    allgather,
    allreduce,
    alltoall,
    name,
    reduce_scatter,
    reduced,
    sendrecv,
)

__all__ = ["allgather", "allreduce", "alltoall", "name", "reduce_scatter", "reduced", "sendrecv"]
