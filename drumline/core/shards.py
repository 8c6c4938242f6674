"""The regions of a tensor that a rank owns: pure arithmetic.

regions = owned_regions((8, 6), (ShardSpec("tp", 0),), mesh, rank=1)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drumline.core.mesh import Mesh
from drumline.errors import PlanError

Ranges = list[tuple[int, int]]
"""Half-open intervals of one dimension, in the order in which they lie in the shard."""


@dataclass(frozen=True)
class ShardSpec:
    """Dimension `dim` is split along a mesh axis, as by torch.chunk: the last may get less.

    With `factor` > 1 the dimension is first split into that many equal parts, and each of them
    along the axis, so that a shard holds a piece of every part (gate and up in one tensor; FSDP
    over a tensor-parallel dimension, which DTensor writes _StridedShard).
    """

    axis: str
    dim: int
    factor: int = 1


@dataclass(frozen=True)
class Region:
    """A rectangular region of a tensor."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    def overlap(self, other: Region) -> Region | None:
        """The intersection of two regions, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(
            min(a.stop, b.stop) for a, b in zip(self.slices(), other.slices(), strict=True)
        )
        size = tuple(end - begin for begin, end in zip(start, stop, strict=True))
        return Region(start, size) if all(n > 0 for n in size) else None

    def moved(self, old: Sequence[int], new: Sequence[int]) -> Region:
        """The region translated from origin `old` to origin `new`."""
        start = zip(self.start, old, new, strict=True)
        return Region(tuple(a - o + n for a, o, n in start), self.size)


@dataclass(frozen=True)
class OwnedRegion:
    """A region of the whole tensor, and its start in the shard."""

    region: Region
    at: tuple[int, ...]


def owned_regions(
    shape: Sequence[int], splits: Sequence[ShardSpec], mesh: Mesh, rank: int
) -> tuple[OwnedRegion, ...]:
    """The regions of a tensor that `rank` owns. Splits apply in order, each to the rest."""
    return tuple(_products(_kept(shape, splits, mesh, rank)))


def local_shape(
    shape: Sequence[int], splits: Sequence[ShardSpec], mesh: Mesh, rank: int
) -> tuple[int, ...]:
    """The shape of a rank's shard."""
    return tuple(_length(ranges) for ranges in _kept(shape, splits, mesh, rank))


def _kept(shape: Sequence[int], splits: Sequence[ShardSpec], mesh: Mesh, rank: int) -> list[Ranges]:
    """The intervals of every dimension that `rank` owns; the shard is their product."""
    here = mesh.coordinate(rank)
    kept: list[Ranges] = [[(0, size)] for size in shape]
    for split in splits:
        dim = _dim(split, shape, mesh)
        size, index = mesh.axis_size(split.axis), here[split.axis]
        parts = [_chunk(kept[dim], split.factor, part) for part in range(split.factor)]
        kept[dim] = _merged([r for part in parts for r in _chunk(part, size, index)])
    return kept


def _dim(split: ShardSpec, shape: Sequence[int], mesh: Mesh) -> int:
    if split.axis not in mesh.axes:
        raise PlanError(
            f"a tensor is to be sharded along {split.axis!r}, and the mesh has only "
            f"{list(mesh.axes)}; add the axis to the mesh, or leave out what asks for it."
        )
    if not -len(shape) <= split.dim < len(shape):
        raise PlanError(
            f"a tensor of shape {tuple(shape)} is to be sharded in dimension {split.dim}, which it "
            "does not have; correct the plan."
        )
    return split.dim % len(shape)


def _chunk(ranges: Ranges, count: int, index: int) -> Ranges:
    """Chunk `index` of the intervals laid end to end, sizes as torch.chunk has them."""
    size = -(-_length(ranges) // count)
    begin, end = index * size, (index + 1) * size
    chunk, passed = [], 0
    for start, stop in ranges:
        low, high = max(begin - passed, 0), min(end - passed, stop - start)
        if low < high:
            chunk.append((start + low, start + high))
        passed += stop - start
    return chunk


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _merged(ranges: Ranges) -> Ranges:
    merged: Ranges = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def _products(kept: Sequence[Ranges]) -> Iterator[OwnedRegion]:
    """One region for each choice of an interval in every dimension."""
    placed = []
    for ranges in kept:
        offsets = itertools.accumulate((stop - start for start, stop in ranges), initial=0)
        placed.append(list(zip(ranges, offsets, strict=False)))
    for choice in itertools.product(*placed):
        start = tuple(interval[0] for interval, _ in choice)
        size = tuple(interval[1] - interval[0] for interval, _ in choice)
        if all(size):
            yield OwnedRegion(Region(start, size), tuple(offset for _, offset in choice))


def split_into_blocks(size: Sequence[int], limit: int) -> Iterator[Region]:
    """Split a region of this size into blocks of at most `limit` elements, whole rows if possible.

    A block is contiguous in the region, so its transfer needs memory for `limit` elements.
    """
    inner = math.prod(size[1:])
    if math.prod(size) <= limit:
        yield Region((0,) * len(size), tuple(size))
    elif inner <= limit:
        rows = limit // inner
        for row in range(0, size[0], rows):
            n = min(rows, size[0] - row)
            yield Region((row, *(0 for _ in size[1:])), (n, *size[1:]))
    else:
        for row in range(size[0]):
            for block in split_into_blocks(size[1:], limit):
                yield Region((row, *block.start), (1, *block.size))
