"""Allocation of memory for tensors that will be read, in huge pages where the kernel has them.

shards = allocate_hugepages({"weight": ((1024, 4096), torch.float32, "cpu")})

Read into memory in pages of 4 KiB, a file costs as much time in faults as in copying.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence

import torch

HUGE_PAGE_NBYTES = 2 << 20
"""The size of a huge page of x86 and Arm."""

MAPPING_NBYTES = 32 << 20
"""Tensors share a mapping up to this size: it goes back to the system with the last of them."""

ALIGNMENT_NBYTES = 64
"""Where torch's own allocator has tensors begin."""

TensorSpec = tuple[Sequence[int], torch.dtype, "torch.device | str"]
"""Shape, dtype and device."""


def allocate_hugepages(specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Allocate empty tensors; those on the CPU lie one behind the other in few mappings."""
    tensors = {}
    sizes = {}
    for name, (shape, dtype, device) in specs.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes and torch.device(device).type == "cpu":
            sizes[name] = nbytes
        else:
            tensors[name] = torch.empty(tuple(shape), dtype=dtype, device=device)
    for part in _group_by_mapping(sizes):
        for name, raw in _map_memory(part).items():
            shape, dtype, _ = specs[name]
            tensors[name] = raw.view(dtype).view(tuple(shape))
    return tensors


def _group_by_mapping(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The sizes in their order, as many at a time as may share a mapping."""
    part: dict[str, int] = {}
    total = 0
    for name, nbytes in sizes.items():
        if part and total + nbytes > MAPPING_NBYTES:
            yield part
            part, total = {}, 0
        part[name] = nbytes
        total += nbytes
    if part:
        yield part


def _map_memory(sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Bytes in one mapping. What does not fill a huge page lies in small ones, so that no memory is
    used but what the tensors need."""
    total = sum(-(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES for nbytes in sizes.values())
    # What fills a huge page begins where one begins.
    spare = HUGE_PAGE_NBYTES if total >= HUGE_PAGE_NBYTES else 0
    memory = mmap.mmap(-1, total + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = 0
    if spare:
        begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE_NBYTES
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, begin, total // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES)
    buffers = {}
    for name, nbytes in sizes.items():
        buffers[name] = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=begin)
        begin += -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES
    return buffers
