"""Tensors in memory of ncclMemAlloc that is registered with a communicator."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from communicator.backends.nccl.nccl_library import NcclLibrary
from communicator.errors import WORK_ERRORS, CommunicatorError, Unsupported
from coordinator import Coordinator

PAGE_BYTES = 4096  # NCCL_WIN_REQUIRED_ALIGNMENT


class Allocating(Protocol):
    """A communicator of NCCL, as its memory knows it."""

    coor: Coordinator

    @property
    def device(self) -> torch.device: ...
    @property
    def library(self) -> NcclLibrary: ...

    def rank_name(self, rank: int | None = None) -> str: ...
    def is_usable(self) -> bool: ...
    def mem_alloc(self, nbytes: int) -> int: ...
    def mem_free(self, address: int) -> None: ...


class RegisteredMemory:
    """Allocates and frees memory of one communicator.

    Freeing waits for the device, which would end any capture in this process. So the last view of a
    tensor only notes its memory, and the next empty() or close() frees it. After close() nothing
    else would, so the last view does, unless its thread captures.
    """

    def __init__(self, comm: Allocating) -> None:
        self._comm, self._library, self._device = weakref.ref(comm), comm.library, comm.device
        self._dropped: list[int] = []  # addresses that no tensor uses any longer

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
        block = _Block(self, comm.mem_alloc(nbytes), nbytes)
        whole = torch.as_tensor(block, device=comm.device)
        return whole[: numel * dtype.itemsize].view(dtype).view(sizes)

    def drop(self, address: int) -> None:
        self._dropped.append(address)
        comm = self._comm()
        if comm is None or not comm.is_usable():
            self.free_dropped()

    def free_dropped(self) -> None:
        """Free what no tensor uses any longer, once the device has done its work."""
        while self._dropped and not torch.cuda.is_current_stream_capturing():
            try:
                comm, address = self._comm(), self._dropped.pop()
            except IndexError:  # another thread took the last
                return
            torch.cuda.synchronize(self._device)
            if comm is not None and comm.is_usable():
                comm.mem_free(address)
            else:
                self._library.mem_free(address)


def _check_free_memory(comm: Allocating, nbytes: int) -> None:
    """Raise on every rank if one cannot allocate: the others would wait for it inside NCCL."""

    def try_alloc() -> None:
        try:
            with torch.cuda.device(comm.device):
                comm.library.try_mem_alloc(nbytes)
        except Unsupported as error:
            raise CommunicatorError(
                f"{comm.rank_name()}: empty of {nbytes} bytes is for all ranks or none: {error} "
                "Ask for less, or free memory there."
            ) from error

    comm.coor.run_on_all_ranks(try_alloc, error_class=WORK_ERRORS)


class _Block:
    """Memory that torch sees by the CUDA array interface, until its last view is gone."""

    def __init__(self, memory: RegisteredMemory, address: int, nbytes: int) -> None:
        self._memory, self._address = memory, address
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self._memory.drop(self._address)
