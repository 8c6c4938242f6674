"""The ranks of a launch as a grid with named axes: pure arithmetic.

mesh = Mesh({"dp_shard": 2, "tp": 2})
print(mesh.coordinate(3))                # {"dp_shard": 1, "tp": 1}
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from drumline.errors import PlanError

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""The axes that mean something to `drumline.load`, outermost first where the order is free."""

ALIASES = {"fsdp": "dp_shard"}
"""Names of axes in transformers, and ours."""


@dataclass(frozen=True)
class Mesh:
    """Sizes by axis, the last one varying fastest; `ranks` lists the ranks in that order.

    `ranks` is every rank of the launch, 0 first, unless given.
    """

    axes: Mapping[str, int]
    ranks: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        for axis, size in self.axes.items():
            if size < 1:
                raise PlanError(
                    f"the mesh {dict(self.axes)} has {size} ranks along {axis!r}, so nobody would "
                    "hold that part; every axis needs at least 1."
                )
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.size)))
        if len(self.ranks) != self.size or len(set(self.ranks)) != self.size:
            raise PlanError(
                f"the mesh {dict(self.axes)} has {self.size} places and the ranks {self.ranks}, "
                "so it is not one rank per place; give each rank once."
            )

    @property
    def size(self) -> int:
        return math.prod(self.axes.values())

    def axis_size(self, axis: str) -> int:
        """The number of ranks along an axis; 1 for an axis that the mesh does not have."""
        return self.axes.get(axis, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank, by axis."""
        return dict(self._places[rank])

    @cached_property
    def _places(self) -> dict[int, dict[str, int]]:
        """The coordinate of every rank; cached, since plans use it for every tensor."""
        ranges = [range(size) for size in self.axes.values()]
        places = [dict(zip(self.axes, at, strict=True)) for at in itertools.product(*ranges)]
        return dict(zip(self.ranks, places, strict=True))

    @cached_property
    def descending_axes(self) -> frozenset[str]:
        """The axes along which ranks do not ascend everywhere."""
        unsorted, step = set(), self.size
        for axis, size in self.axes.items():
            step //= size
            behind = [place for place in range(self.size) if place // step % size]
            if any(self.ranks[place] < self.ranks[place - step] for place in behind):
                unsorted.add(axis)
        return frozenset(unsorted)

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along these axes only, itself among them, in order."""
        coordinate = self.coordinate(rank)
        fixed = {axis: at for axis, at in coordinate.items() if axis not in axes}
        return tuple(r for r in self.ranks if fixed.items() <= self.coordinate(r).items())


def read_mesh(mesh: Any, world_size: int) -> Mesh:
    """A Mesh from what users write: a dict of sizes, a torch DeviceMesh, or a Mesh.

    A DeviceMesh of one dimension needs no name: it is `tp`. Raises PlanError if it does not cover
    the launch, or has an axis that means nothing here.
    """
    grid = _from(mesh)
    unknown = [axis for axis in grid.axes if axis not in AXES]
    if unknown:
        raise PlanError(
            f"the mesh has the axes {unknown}, and nothing would be placed along them; "
            f"name them after what they do: {', '.join(AXES)}."
        )
    if sorted(grid.ranks) != list(range(world_size)):
        raise PlanError(
            f"the mesh {dict(grid.axes)} has {grid.size} places and the launch {world_size} "
            f"ranks; start {grid.size} ranks, or give "
            "sizes whose product is the number of ranks."
        )
    return grid


def resolve_mesh(mesh: Any, tp: int | None, world_size: int, others: str = "dp_replicate") -> Mesh:
    """The mesh that `load` was given, or TP groups of `tp` ranks along the `others` axis.

    Raises PlanError for a mesh that cannot be, or that contradicts tp.
    """
    if mesh is not None:
        grid = read_mesh(mesh, world_size)
        if tp is not None and tp != grid.axis_size("tp"):
            raise PlanError(f"tp={tp} contradicts the mesh {dict(grid.axes)}; give one of them.")
        return grid
    size = tp if tp is not None else 1 if others == "pp" else world_size
    if size < 1 or world_size % size:
        raise PlanError(
            f"tp={tp} does not divide the {world_size} ranks of the launch, so some would have no "
            f"part; start a multiple of {max(size, 1)} ranks."
        )
    return Mesh({others: world_size // size, "tp": size})


def num_stages(mesh: Any) -> int:
    """The number of pipeline stages of a mesh as users write it; 1 for no mesh."""
    if mesh is None or not (isinstance(mesh, (Mesh, Mapping)) or hasattr(mesh, "mesh_dim_names")):
        return 1
    return _from(mesh).axis_size("pp")


def _from(mesh: Any) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, Mapping):
        axes = {ALIASES.get(str(axis), str(axis)): size for axis, size in mesh.items()}
        if len(axes) == len(mesh) and all(isinstance(n, numbers.Integral) for n in axes.values()):
            return Mesh({axis: int(size) for axis, size in axes.items()})
    if hasattr(mesh, "mesh_dim_names"):
        ranks = tuple(mesh.mesh.flatten().tolist())
        return Mesh(dict(zip(axis_names(mesh), mesh.shape, strict=True)), ranks)
    raise PlanError(
        f"mesh={mesh!r} is not a mesh, and is not ignored; give whole sizes by axis, each axis "
        'once (fsdp is dp_shard), such as {"pp": 2, "tp": 2}, or a torch DeviceMesh.'
    )


def axis_names(mesh: Any) -> Sequence[str]:
    """The axes of a DeviceMesh by our names."""
    names = mesh.mesh_dim_names
    if names is None:
        if mesh.ndim > 1:
            raise PlanError(
                f"the DeviceMesh of shape {tuple(mesh.shape)} names none of its axes, so they "
                f"cannot be told apart; pass mesh_dim_names=(...) of {', '.join(AXES)}."
            )
        return ("tp",)
    return [ALIASES.get(name, name) for name in names]
