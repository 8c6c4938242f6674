"""A transformers checkpoint loaded over a mesh: tensor parallel, replicated, sharded by FSDP2.

model = drumline.load("checkpoint", tp=2)      # on every rank; call it alike on every rank
print(model.generate(tokens))
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from pathlib import Path
from typing import Any

from torch import nn

from communicator import Communicator
from coordinator import Coordinator
from drumline.checkpoint.plan_executor import LoadStats
from drumline.checkpoint.shard_loader import plan_on_all_ranks
from drumline.checkpoint.shard_plan import LoadPlan
from drumline.checkpoint.source import CheckpointFiles
from drumline.core.mesh import ALIASES, Mesh, resolve_mesh
from drumline.errors import PeerLost, PlanError
from drumline.liveness.group_monitor import Vigil, Watched
from drumline.liveness.stopped_ranks import on_lookout
from drumline.planner.load_options import LoadOptions
from drumline.planner.model_profile import layer_names
from drumline.tensor_parallel.parallelize import connect
from drumline.tensor_parallel.sharded_model import CutModel, cut_checkpoint, find
from drumline.tensor_parallel.synced_generation import drawn_alike, stopping_alike

ITS_PART = "every layer"
"""What each rank has of a model whose layers are cut, in words."""


SYNCED_AT = 6
"""The place of synced_gpus among the arguments of generate()."""


class OverMesh:
    """Mixed into the class of the model. Every rank calls it alike, with the same inputs along tp.

    `mesh` says who is where; `loaded` what loading took, in bytes.
    """

    mesh: Mesh
    loaded: LoadStats
    _vigil: Vigil | None
    _leave: Any

    def close(self) -> None:
        """Give back the connections to the other ranks. Collective, unless one of them was lost;
        harmless when done twice."""
        self._leave()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As ever; the ranks that share a model draw the samples of the first, and stop with it."""
        if self.mesh.axis_size("dp_shard") > 1 and len(args) < SYNCED_AT:
            # Each needs the shards of all others until the end.
            kwargs.setdefault("synced_gpus", True)
        said = super().generate  # type: ignore[misc]
        if self._vigil is None:
            return said(*args, **kwargs)
        with drawn_alike(self._vigil, self.device):  # type: ignore[attr-defined]
            return said(*args, **kwargs)

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_stopping_criteria(*args, **kwargs)  # type: ignore[misc]
        return found if self._vigil is None else stopping_alike(found, self._vigil)


def load_over_mesh(path: str | Path, coor: Coordinator | None, asked: LoadOptions) -> Any:
    """The model of a checkpoint on every rank, each with its own part. Collective; see `load`."""
    with contextlib.ExitStack() as stack:
        if coor is None:
            coor = stack.enter_context(Coordinator())
        grid = _grid(asked, coor.world_size)
        with on_lookout(coor, lambda rank: f"its part of {ITS_PART}"):
            files, configs = find(coor, path, grid, asked)
            made, plan = plan_on_all_ranks(
                coor, lambda: _planned(coor, files, configs, grid, asked), lambda it: it[1]
            )
            done = made.fill(coor, plan)
            vigil = _team(made, coor, grid, asked.backend, stack) if made.styles else None
        if made.generation is not None:
            made.model.generation_config = made.generation
        return _dress(made.model.eval(), grid, done, vigil, stack.pop_all())


def _planned(
    coor: Coordinator, files: CheckpointFiles, configs: Any, grid: Mesh, asked: LoadOptions
) -> tuple[CutModel, LoadPlan]:
    """The empty model, cut along the mesh, and what this rank is to read of it."""
    made = cut_checkpoint(coor, files, configs, grid, asked)
    if grid.axis_size("dp_shard") > 1:
        made.shrink(grid, coor.rank)
        _shard(made.model, asked.mesh)
    return made, made.plan(grid, coor.rank)


def _team(
    cut: CutModel, coor: Coordinator, grid: Mesh, backend: str | None, stack: contextlib.ExitStack
) -> Vigil:
    """Connect the ranks that share a model, and look after them. Collective."""
    team = coor.split(grid.group(coor.rank, "tp"))
    assert team is not None, "this rank is one of them"
    comm = stack.enter_context(Communicator(stack.enter_context(team), backend))
    vigil = Vigil(team, [comm], dict.fromkeys(range(comm.world_size), ITS_PART), is_driven=False)
    stack.callback(vigil.close)
    watched: Any = Watched(comm, vigil)
    connect(cut.model, cut.styles, watched)
    return vigil


def _grid(asked: LoadOptions, world_size: int) -> Mesh:
    """The mesh that is asked for. Raises PlanError for what would have no effect along it."""
    _refuse_room(asked)
    grid = resolve_mesh(asked.mesh, asked.tp, world_size)
    if grid.axis_size("dp_shard") > 1 and not hasattr(asked.mesh, "mesh_dim_names"):
        raise PlanError(
            f"the mesh {dict(grid.axes)} shards parameters along 'dp_shard', which FSDP2 brings "
            "together again over process groups of torch; pass a torch DeviceMesh, not sizes."
        )
    return grid


def _refuse_room(asked: LoadOptions) -> None:
    """A mesh says which rank holds what, however much room there is."""
    given = {"max_memory": asked.max_memory, "length": asked.length or None}
    for name, value in given.items():
        if value is not None:
            raise PlanError(
                f"{name}={value!r} says how to spread whole layers, and a mesh without stages "
                'cuts all of them alike, so it would change nothing; add device_map="auto" for '
                "stages of ranks that cut their layers, or leave it out."
            )


def _dress(
    model: Any, mesh: Mesh, done: LoadStats, vigil: Vigil | None, stack: contextlib.ExitStack
) -> Any:
    kind: Any = type(model)
    model.__class__ = _over_mesh(kind)
    model.mesh, model.loaded, model._vigil = mesh, done, vigil
    model._leave = weakref.finalize(model, _leave, stack, vigil)
    return model


@functools.cache  # transformers takes some time to make a class
def _over_mesh(kind: type[Any]) -> type[Any]:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (OverMesh, kind), names)


def _leave(stack: contextlib.ExitStack, vigil: Vigil | None) -> None:
    """Wait for the others, unless one is lost or this rank is on its way out with an error."""
    if vigil is not None and vigil.verdict:
        lost = PeerLost(vigil.verdict)
        stack.__exit__(type(lost), lost, None)
    elif getattr(sys, "last_value", None) is None:
        stack.close()


def _shard(model: nn.Module, mesh: Any) -> None:
    """Give what tensor parallelism has cut to FSDP2, which cuts it again, layer by layer."""
    from torch.distributed.fsdp import fully_shard

    outer = _over_data(mesh)
    for name in list(layer_names(model)):
        fully_shard(model.get_submodule(name), mesh=outer)
    fully_shard(model, mesh=outer)


def _over_data(mesh: Any) -> Any:
    """The part of a DeviceMesh that FSDP2 takes: what is sharded last, after what is replicated."""
    from torch.distributed.device_mesh import DeviceMesh

    kinds = ("dp_replicate", "dp_shard")
    names = [name for name in mesh.mesh_dim_names if ALIASES.get(name, name) in kinds]
    outer = mesh if len(names) == mesh.ndim else mesh[tuple(names)]
    if [ALIASES.get(name, name) for name in names] != list(reversed(kinds)):
        return outer
    return DeviceMesh.from_group(
        [mesh.get_group(name) for name in reversed(names)],
        mesh.device_type,
        mesh=outer.mesh.T.contiguous(),
        mesh_dim_names=tuple(reversed(names)),
    )
