"""The plan of a load, which bytes of a checkpoint go to which rank: pure arithmetic.

plan = plan_loading(requests, index, mesh, readers)   # raises PlanError or CheckpointError
print(plan.nbytes_of(rank), [transfer.route for transfer in plan.transfers])
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from drumline.checkpoint.safetensors_index import ComputedTensor, Index, StoredTensor, TensorReader
from drumline.core.mesh import Mesh
from drumline.core.shards import (
    OwnedRegion,
    Region,
    ShardSpec,
    local_shape,
    owned_regions,
    split_into_blocks,
)
from drumline.errors import CheckpointError, PlanError


@dataclass(frozen=True)
class SourceSlice:
    """A stored tensor, or a part of one, that fills the box `at` of a parameter.

    `lead` dimensions of the box are of size 1 and missing in the file: one expert of a stack.
    `origin` is where the part starts in the stored tensor.
    """

    key: str
    at: Region
    origin: tuple[int, ...]
    lead: int = 0

    def in_file(self, region: Region) -> Region:
        """The stored tensor's box that fills a box of the parameter, which lies within `at`."""
        inner = Region(region.start[self.lead :], region.size[self.lead :])
        return inner.moved(self.at.start[self.lead :], self.origin)


def whole_tensor(key: str, shape: Sequence[int]) -> tuple[SourceSlice, ...]:
    """A parameter that is stored as it is."""
    zeros = (0,) * len(shape)
    return (SourceSlice(key, Region(zeros, tuple(shape)), zeros),)


def read_slices(
    reader: TensorReader,
    index: Index,
    slices: Sequence[SourceSlice],
    region: Region,
    out: torch.Tensor,
) -> None:
    """Fill `out` with a box of a parameter that is made of pieces."""
    for slice_ in slices:
        common = region.overlap(slice_.at)
        if common is None:
            continue
        stored, box = index[slice_.key], slice_.in_file(common)
        target = out[common.moved(region.start, (0,) * len(region.start)).slices()].view(box.size)
        if target.is_contiguous() and target.dtype == stored.torch_dtype:
            reader.read(stored, box, target)
        else:
            target.copy_(reader.box(stored, box))


def parts_of(slices: Sequence[SourceSlice], index: Index) -> list[StoredTensor]:
    """The stored tensors that all pieces of a parameter may be kept as; none if one may not be."""
    pieces = [index[slice_.key] for slice_ in slices]
    parts = [stored.parts if isinstance(stored, ComputedTensor) else () for stored in pieces]
    return [part for own in parts for part in own] if all(parts) else []


def fills_exactly(slices: Sequence[SourceSlice], shape: Sequence[int]) -> bool:
    """True if the pieces make up a tensor of this shape, and nothing else."""
    inside = all(
        len(slice_.at.size) == len(shape)
        and all(
            a + n <= size for a, n, size in zip(slice_.at.start, slice_.at.size, shape, strict=True)
        )
        for slice_ in slices
    )
    return inside and sum(slice_.at.numel for slice_ in slices) == math.prod(shape)


@dataclass(frozen=True)
class TensorRequest:
    """A parameter or buffer: its whole shape, its shards, and what it is made of.

    Only ranks with these coordinates hold it at all: `only={"pp": 1}`.
    """

    shape: tuple[int, ...]
    itemsize: int
    slices: tuple[SourceSlice, ...]
    splits: tuple[ShardSpec, ...] = ()
    only: Mapping[str, int] = field(default_factory=dict)

    def is_held_by(self, mesh: Mesh, rank: int) -> bool:
        return not self.only or self.only.items() <= mesh.coordinate(rank).items()


@dataclass(frozen=True)
class Transfer:
    """A box of a stored tensor, read once by `reader`, for one or more ranks.

    `owners` are the ranks, and where the box (`size` in the parameter) starts in their shards.
    """

    name: str
    key: str
    source: Region
    size: tuple[int, ...]
    reader: int
    owners: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def route(self) -> tuple[int, ...]:
        """The ranks it passes, in order: each hands on what it got, so it leaves a rank once."""
        return (self.reader, *(rank for rank, _ in self.owners if rank != self.reader))

    def blocks(self, limit: int) -> Iterator[Transfer]:
        """The transfer in pieces of at most `limit` elements."""
        zeros = (0,) * len(self.source.start)
        lead = len(self.size) - len(zeros)
        for block in split_into_blocks(self.source.size, limit):
            owners = tuple(
                (rank, (*start[:lead], *block.moved(zeros, start[lead:]).start))
                for rank, start in self.owners
            )
            source = block.moved(zeros, self.source.start)
            size = (*self.size[:lead], *block.size)
            yield replace(self, source=source, size=size, owners=owners)


@dataclass(frozen=True)
class LoadPlan:
    """Transfers in the order of the files, and the shape of every shard."""

    requests: Mapping[str, TensorRequest]
    mesh: Mesh
    readers: tuple[int, ...]
    transfers: tuple[Transfer, ...]

    def shape_of(self, name: str, rank: int) -> tuple[int, ...]:
        request = self.requests[name]
        return local_shape(request.shape, request.splits, self.mesh, rank)

    def nbytes_of(self, rank: int) -> int:
        """The bytes of a rank's shards."""
        return sum(
            owned.region.numel * request.itemsize
            for request in self.requests.values()
            if request.is_held_by(self.mesh, rank)
            for owned in owned_regions(request.shape, request.splits, self.mesh, rank)
        )

    def canonical_text(self) -> str:
        """The part of the plan that is equal on all ranks, as text to be compared."""
        requests = [
            (
                *(name, r.shape, r.itemsize, r.splits, tuple(r.only.items())),
                [(s.key, s.at.start, s.at.size, s.origin, s.lead) for s in r.slices],
            )
            for name, r in self.requests.items()
        ]
        return repr((self.mesh, self.readers, requests))

    def in_blocks(self, index: Index, nbytes: int) -> LoadPlan:
        """This plan with transfers of at most `nbytes` each, as they are stored."""
        limits = ((t, max(1, nbytes // index[t.key].torch_dtype.itemsize)) for t in self.transfers)
        return replace(self, transfers=tuple(b for t, limit in limits for b in t.blocks(limit)))

    def hops(
        self, rank: int, kept_by_rank: Sequence[Sequence[int]] = ()
    ) -> Iterator[tuple[Transfer, int | None, int | None]]:
        """The transfers through `rank`, in order, each with its previous and next rank.

        kept_by_rank: the numbers of transfers that each rank has already. What all its owners have
        passes no rank.
        """
        kept = [frozenset(numbers) for numbers in kept_by_rank]
        for number, transfer in enumerate(self.transfers):
            route = [rank for rank in transfer.route if not kept or number not in kept[rank]]
            if rank in route and (len(route) > 1 or rank in dict(transfer.owners)):
                at = route.index(rank)
                src = route[at - 1] if at else None
                dst = route[at + 1] if at + 1 < len(route) else None
                yield transfer, src, dst


def plan_loading(
    requests: Mapping[str, TensorRequest],
    index: Index,
    mesh: Mesh,
    readers: Sequence[int],
    rank: int | None = None,
) -> LoadPlan:
    """Plan which rank reads and which ranks get each region.

    readers: by rank, the rank that reads for it.
    rank: plan only the transfers that this rank has a part in, all that it needs; None for all.

    Raises CheckpointError for keys that are missing or of another shape, and PlanError for a split
    along an axis that the mesh does not have.
    """
    _check_requests(requests, index)
    reader = None if rank is None else readers[rank]
    ranks = [r for r in sorted(mesh.ranks) if reader is None or readers[r] == reader]
    regions_of = cache(lambda shape, splits, rank: owned_regions(shape, splits, mesh, rank))
    transfers: list[Transfer] = []
    for name, request in requests.items():
        holders = [rank for rank in ranks if request.is_held_by(mesh, rank)]
        owned = {rank: regions_of(request.shape, request.splits, rank) for rank in holders}
        transfers += _transfers(name, request, owned, readers)
    transfers.sort(key=lambda t: (index[t.key].file, index[t.key].offset, t.source.start, t.reader))
    return LoadPlan(requests, mesh, tuple(readers), tuple(transfers))


def _check_requests(requests: Mapping[str, TensorRequest], index: Index) -> None:
    keys = {slice_.key for request in requests.values() for slice_ in request.slices}
    missing = sorted(keys - index.keys())
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors are missing from the checkpoint ({', '.join(missing[:5])}), "
            "so the model would be incomplete; load the checkpoint that belongs to the model."
        )
    for name, request in requests.items():
        if not fills_exactly(request.slices, request.shape):
            pieces = [f"{piece.key} {list(piece.at.size)}" for piece in request.slices[:5]]
            raise CheckpointError(
                f"{name} of shape {request.shape} is not filled exactly by the stored tensors "
                f"({', '.join(pieces) or 'none'}); load the checkpoint that belongs to the model."
            )
        for slice_ in request.slices:
            _check_slice(name, slice_, index[slice_.key])


def _check_slice(name: str, slice_: SourceSlice, stored: StoredTensor) -> None:
    size = slice_.at.size[slice_.lead :]
    rest = tuple(n - start for n, start in zip(stored.shape, slice_.origin, strict=False))
    if len(size) != len(stored.shape) or any(n > r for n, r in zip(size, rest, strict=True)):
        raise CheckpointError(
            f"{name} needs {size} of {slice_.key} in {stored.file}, which is stored with shape "
            f"{stored.shape}; load the checkpoint that belongs to the model."
        )


def _transfers(
    name: str,
    request: TensorRequest,
    owned_by_rank: Mapping[int, Sequence[OwnedRegion]],
    readers: Sequence[int],
) -> Iterator[Transfer]:
    """Each distinct region of each reader's ranks once, with all ranks that own it."""
    owners: dict[tuple[int, SourceSlice, Region], list[tuple[int, tuple[int, ...]]]] = {}
    for rank, owned_regions_ in owned_by_rank.items():
        for owned in owned_regions_:
            for slice_, region, start in _intersections(owned, request.slices):
                owners.setdefault((readers[rank], slice_, region), []).append((rank, start))
    for (reader, slice_, region), ranks in owners.items():
        source = slice_.in_file(region)
        yield Transfer(name, slice_.key, source, region.size, reader, tuple(ranks))


def _intersections(
    owned: OwnedRegion, slices: Sequence[SourceSlice]
) -> Iterator[tuple[SourceSlice, Region, tuple[int, ...]]]:
    """The parts of an owned region by the slice they come from, and their start in the shard."""
    for slice_ in slices:
        region = owned.region.overlap(slice_.at)
        if region is not None:
            yield slice_, region, region.moved(owned.region.start, owned.at).start


def reader_ranks(reader: str, nodes: Sequence[Sequence[int]]) -> list[int]:
    """By rank, the rank that reads for it: itself, the first rank of its node, or rank 0."""
    num_ranks = sum(len(node) for node in nodes)
    if reader == "each":
        return list(range(num_ranks))
    if reader == "node":
        first = {rank: node[0] for node in nodes for rank in node}
        return [first[rank] for rank in range(num_ranks)]
    if reader == "rank0":
        return [0] * num_ranks
    raise PlanError(
        f'reader={reader!r} is not a way to read the files; give "each" (every rank its own part), '
        '"node" (the first rank of each node) or "rank0".'
    )
