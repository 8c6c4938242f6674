"""Which bytes of a checkpoint go to which rank: pure arithmetic, before a tensor or a message.

plan = plan_loading(wanted, index, mesh, readers)   # raises PlanError or CheckpointError
print(plan.nbytes_of(rank), [transfer.route for transfer in plan.transfers])
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from drumline.checkpoint.safetensors_index import Index, StoredTensor
from drumline.core.mesh import Mesh
from drumline.core.shards import OwnedRegion, Region, ShardSpec, local_shape, owned_regions
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

    def in_file(self, box: Region) -> Region:
        """Where a box of the parameter, which lies within `at`, is in the stored tensor."""
        inner = Region(box.start[self.lead :], box.size[self.lead :])
        return inner.moved(self.at.start[self.lead :], self.origin)


def whole_tensor(key: str, shape: Sequence[int]) -> tuple[SourceSlice, ...]:
    """A parameter that is stored as it is."""
    zeros = (0,) * len(shape)
    return (SourceSlice(key, Region(zeros, tuple(shape)), zeros),)


def fills_exactly(pieces: Sequence[SourceSlice], shape: Sequence[int]) -> bool:
    """Whether the pieces make up a tensor of this shape, and nothing else."""
    inside = all(
        len(piece.at.size) == len(shape)
        and all(
            a + n <= size for a, n, size in zip(piece.at.start, piece.at.size, shape, strict=True)
        )
        for piece in pieces
    )
    return inside and sum(piece.at.numel for piece in pieces) == math.prod(shape)


@dataclass(frozen=True)
class TensorRequest:
    """A parameter or buffer: its whole shape, how it is cut, and what it is made of.

    Only ranks with these coordinates hold it at all: `only={"pp": 1}`.
    """

    shape: tuple[int, ...]
    itemsize: int
    pieces: tuple[SourceSlice, ...]
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


@dataclass(frozen=True)
class LoadPlan:
    """Transfers in the order of the files, and the shape of every shard."""

    wanted: Mapping[str, TensorRequest]
    mesh: Mesh
    readers: tuple[int, ...]
    transfers: tuple[Transfer, ...]

    def shape_of(self, name: str, rank: int) -> tuple[int, ...]:
        wanted = self.wanted[name]
        return local_shape(wanted.shape, wanted.splits, self.mesh, rank)

    def nbytes_of(self, rank: int) -> int:
        """The share of a rank: what its shards need."""
        return sum(
            own.box.numel * wanted.itemsize
            for wanted in self.wanted.values()
            if wanted.is_held_by(self.mesh, rank)
            for own in owned_regions(wanted.shape, wanted.splits, self.mesh, rank)
        )

    def written(self) -> str:
        """What all ranks have in common of it."""
        wanted = [
            (
                *(name, one.shape, one.itemsize, one.splits, tuple(one.only.items())),
                [(p.key, p.at.start, p.at.size, p.origin, p.lead) for p in one.pieces],
            )
            for name, one in self.wanted.items()
        ]
        return repr((self.mesh, self.readers, wanted))

    def hops(self, rank: int) -> Iterator[tuple[Transfer, int | None, int | None]]:
        """What passes `rank`, in order: the transfer, whom it comes from and whom it goes to."""
        for transfer in self.transfers:
            route = transfer.route
            if rank in route:
                place = route.index(rank)
                before = route[place - 1] if place else None
                after = route[place + 1] if place + 1 < len(route) else None
                yield transfer, before, after


def plan_loading(
    wanted: Mapping[str, TensorRequest],
    index: Index,
    mesh: Mesh,
    readers: Sequence[int],
    rank: int | None = None,
) -> LoadPlan:
    """Who reads and who gets which box. `readers`: by rank, the rank that reads for it.

    rank: plan only what this one has a part in, which is all that it needs; everything, if None.

    Raises CheckpointError for keys that are missing or of another shape, and PlanError for a cut
    along an axis that the mesh does not have.
    """
    _check(wanted, index)
    reads = None if rank is None else readers[rank]
    ranks = [one for one in sorted(mesh.ranks) if reads is None or readers[one] == reads]
    owned = cache(lambda shape, splits, rank: owned_regions(shape, splits, mesh, rank))
    found: list[Transfer] = []
    for name, one in wanted.items():
        holders = [rank for rank in ranks if one.is_held_by(mesh, rank)]
        owns = {rank: owned(one.shape, one.splits, rank) for rank in holders}
        found += _transfers(name, one, owns, readers)
    found.sort(key=lambda t: (index[t.key].file, index[t.key].offset, t.source.start, t.reader))
    return LoadPlan(wanted, mesh, tuple(readers), tuple(found))


def _check(wanted: Mapping[str, TensorRequest], index: Index) -> None:
    missing = sorted({p.key for one in wanted.values() for p in one.pieces if p.key not in index})
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors are missing from the checkpoint ({', '.join(missing[:5])}), "
            "so the model would be incomplete; load the checkpoint that belongs to the model."
        )
    for name, one in wanted.items():
        if not fills_exactly(one.pieces, one.shape):
            raise CheckpointError(
                f"{name} of shape {one.shape} is not filled exactly by what is stored "
                f"({', '.join(piece.key for piece in one.pieces[:5])}); "
                "load the checkpoint that belongs to the model."
            )
        for piece in one.pieces:
            _check_piece(name, piece, index[piece.key])


def _check_piece(name: str, piece: SourceSlice, stored: StoredTensor) -> None:
    needs = piece.at.size[piece.lead :]
    room = tuple(size - at for size, at in zip(stored.shape, piece.origin, strict=False))
    if len(needs) != len(stored.shape) or any(n > r for n, r in zip(needs, room, strict=True)):
        raise CheckpointError(
            f"{name} needs {needs} of {piece.key} in {stored.file}, which is stored with shape "
            f"{stored.shape}; "
            "load the checkpoint that belongs to the model."
        )


def _transfers(
    name: str,
    wanted: TensorRequest,
    owns: Mapping[int, Sequence[OwnedRegion]],
    readers: Sequence[int],
) -> Iterator[Transfer]:
    """Each distinct box of each reader's ranks once, with everybody who owns it."""
    owners: dict[tuple[int, SourceSlice, Region], list[tuple[int, tuple[int, ...]]]] = {}
    for rank, boxes in owns.items():
        for own in boxes:
            for piece, box, at in _shares(own, wanted.pieces):
                owners.setdefault((readers[rank], piece, box), []).append((rank, at))
    for (reader, piece, box), ranks in owners.items():
        yield Transfer(name, piece.key, piece.in_file(box), box.size, reader, tuple(ranks))


def _shares(
    own: OwnedRegion, pieces: Sequence[SourceSlice]
) -> Iterator[tuple[SourceSlice, Region, tuple[int, ...]]]:
    """The parts of an owned box by the piece they come from, and where they go in the shard."""
    for piece in pieces:
        box = own.box.overlap(piece.at)
        if box is not None:
            yield piece, box, box.moved(own.box.start, own.at).start


def reader_ranks(reader: str, nodes: Sequence[Sequence[int]]) -> list[int]:
    """By rank, the rank that reads for it: itself, the first of its node, or rank 0."""
    num_ranks = sum(len(node) for node in nodes)
    if reader == "each":
        return list(range(num_ranks))
    if reader == "node":
        first = {rank: node[0] for node in nodes for rank in node}
        return [first[rank] for rank in range(num_ranks)]
    if reader == "rank0":
        return [0] * num_ranks
    raise PlanError(
        f'reader={reader!r} says not who reads the files; give "each" (every rank its own part), '
        '"node" (the first rank of each node) or "rank0".'
    )
