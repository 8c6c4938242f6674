"""Tensors in memory of ncclMemAlloc that is registered with a communicator."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from communicator.calls.failures import run_on_all_ranks
from communicator.errors import CommunicatorError, Unsupported

if TYPE_CHECKING:
    from communicator.backends.nccl import Nccl

PAGE_BYTES = 4096  # NCCL_WIN_REQUIRED_ALIGNMENT


class RegisteredMemory:
    """Allocates and frees memory of one communicator. Torch frees with a tensor's last view."""

    def __init__(self, comm: Nccl) -> None:
        self._comm = weakref.ref(comm)
        self._deferred_frees: list[int] = []  # addresses, until no graph is being captured

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without values. Collective; raises on every rank if one has no free memory."""
        comm = self._comm()
        assert comm is not None
        sizes = torch.Size([shape] if isinstance(shape, int) else shape)
        numel = sizes.numel()
        if numel == 0:
            return torch.empty(sizes, dtype=dtype, device=comm.device)
        nbytes = -(-numel * dtype.itemsize // PAGE_BYTES) * PAGE_BYTES
        _check_free_memory(comm, nbytes)
        block = _Block(comm, self, comm.mem_alloc(nbytes), nbytes)
        whole = torch.as_tensor(block, device=comm.device)
        return whole[: numel * dtype.itemsize].view(dtype).view(sizes)

    def free(self, address: int) -> None:
        """Free now, or when the stream is no longer captured: freeing would break the graph."""
        self._deferred_frees.append(address)
        self.run_deferred_frees()

    def run_deferred_frees(self) -> None:
        comm = self._comm()
        while comm is not None and self._deferred_frees and not _is_capturing():
            comm.mem_free(self._deferred_frees.pop())


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _check_free_memory(comm: Nccl, nbytes: int) -> None:
    """Raise on every rank if one cannot allocate: the others would wait for it inside NCCL."""

    def try_alloc() -> None:
        try:
            with torch.cuda.device(comm.device):
                comm.library.try_mem_alloc(nbytes)
        except Unsupported as error:
            raise CommunicatorError(
                f"rank {comm.rank}: empty of {nbytes} bytes is for all ranks or none: {error} Ask "
                "for less, or free memory there."
            ) from error

    run_on_all_ranks(comm.coor, try_alloc)


class _Block:
    """Memory that torch sees by the CUDA array interface; freed with its last view."""

    def __init__(self, comm: Nccl, memory: RegisteredMemory, address: int, nbytes: int) -> None:
        self._comm, self._memory, self._library = weakref.ref(comm), memory, comm.library
        self._address, self._device = address, comm.device
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        comm = self._comm()
        is_registered = comm is not None and comm.is_usable()
        if is_registered and _is_capturing():
            return self._memory.free(self._address)
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            if is_registered:
                self._memory.free(self._address)
            else:
                self._library.mem_free(self._address)
