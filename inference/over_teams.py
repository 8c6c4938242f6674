"""Tensor parallel inside stages: whole layers over teams of ranks, each layer cut over its team.

model = inference.load("checkpoint", tp=2, device_map="auto")    # 4 ranks: 2 stages of 2 ranks
print(model.generate(tokens))                                    # on the master; the others serve
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from communicator import Communicator
from coordinator import Coordinator
from inference.agreement import agree_on, facts
from inference.boxes import local_shape
from inference.errors import PlanError, Served
from inference.layout import cache_nbytes, layout, model_class, owner_of, with_cache
from inference.memory import Memory, cluster_memory, given_room
from inference.mesh import Mesh, read_mesh
from inference.model import distribute
from inference.nd_load import aliases, load_into, named_tensors, replace, together
from inference.over_mesh import (
    Splits,
    build,
    compute_buffers,
    empty_like,
    own_device,
    read_configs,
)
from inference.plan import DeviceMap, Layout, Place, plan
from inference.renaming import sources_of
from inference.ring import FOREVER_S, Ring
from inference.session import Session
from inference.team import Driver, Follower, Leader, Team, TeamStage
from inference.tensor_parallel import connect, read_plan, splits_of


def load_over_teams(
    path: str | Path,
    device_map: str | Mapping[str, Place | int] = "auto",
    coor: Coordinator | None = None,
    *,
    tp: int | None = None,
    mesh: Any = None,
    max_memory: Memory | None = None,
    dtype: torch.dtype | str | None = None,
    cls: type[Any] | None = None,
    backend: str | None = None,
    batch: int = 1,
    length: int = 0,
    tp_plan: Any = "auto",
    reader: str = "each",
    build_on: str = "meta",
    **options: Any,
) -> Any:
    """The model on the master, who calls it; every other rank serves, as with stages. Collective.

    mesh: {"pp": 2, "tp": 2}; or tp alone, and as many stages as there are teams of that many
        ranks. Ranks that follow each other make a team, so that it lies within a node.
    device_map: as for `load`, a rank being a stage. Every rank uses one device, of which a stage
        has as much room as the rank of its team that has least.

    The model has `mesh`, and `loaded`: what loading took here, in bytes. Raises PlanError or
    CheckpointError on every rank before serving starts.
    """
    with contextlib.ExitStack() as stack:
        if coor is None:
            coor = stack.enter_context(Coordinator())
        grid = teams(mesh, tp, coor.world_size)
        where = own_device(coor)
        config, generation = read_configs(coor, path)
        model = together(
            coor, lambda: build(cls or model_class(config), config, dtype, build_on, options)
        )
        styles = read_plan(model, tp_plan) if grid.along("tp") > 1 else {}
        splits = splits_of(model, styles, grid.along("tp"))
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        parts = _share(model, splits, grid)
        if length:
            needs = cache_nbytes(config, model.dtype, batch, length)
            parts = with_cache(parts, -(-needs // grid.along("tp")))
        room = _room_by_stage(coor, grid, where, max_memory)
        chosen = together(coor, lambda: plan(parts, room, _without_speeds(device_map)))
        only = together(coor, lambda: stages_of(model, chosen))
        agree_on(coor, {"plan": chosen.to_bytes().decode(), **facts(model, model.dtype)})
        together(coor, lambda: compute_buffers(model, where))
        done = load_into(
            model,
            path,
            coor,
            mesh=grid,
            reader=reader,
            splits=splits,
            only={name: {"pp": stage} for name, stage in only.items()},
            shapes=shapes,
            sources=lambda index: sources_of(model, index),
            device=where,
        )
        members = stack.enter_context(_split(coor, grid.group(coor.rank, "tp")))
        if styles:
            connect(model, styles, stack.enter_context(Communicator(members)))
        team = Team(coor.rank, stack.enter_context(_frames(members, None)))
        links = _links(coor, grid, backend, stack)
        driver = None
        if coor.is_master():
            driver = _driver(type(model), config, dtype, build_on, options, where)
            driver.generation_config = generation or driver.generation_config
            driver.mesh, driver.loaded = grid, done
        under = stack.pop_all()
    ring = Ring(links[0], links[1], holds(chosen), under) if links else None
    hears = Leader(team, ring) if ring and not coor.is_master() else Follower(team, under)
    hop = grid.coordinate(coor.rank)["pp"] + 1
    stage = TeamStage(model.eval(), hears, torch.device(where), hop, team)
    if coor.is_master():
        return _driven(driver, Driver(stage, team, ring), chosen, torch.device(where))
    raise Served(_serve(stage))


def has_stages(device_map: Any, mesh: Any) -> bool:
    """Is the model to be spread by layers too? "meta" only says where it is built."""
    along = mesh.get("pp", 1) if isinstance(mesh, Mapping) else 1
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if "pp" in names:
        along = mesh.shape[names.index("pp")]
    if isinstance(mesh, Mesh):
        along = mesh.along("pp")
    return device_map not in (None, "meta") or int(along) > 1


def teams(mesh: Any, tp: int | None, world_size: int) -> Mesh:
    """The mesh of `pp` and `tp`, rank 0 first in both. Raises PlanError for any other."""
    if mesh is None:
        size = tp or 1
        if size < 1 or world_size % size:
            raise PlanError(
                f"tp={tp} does not divide the {world_size} ranks of the launch, so some would "
                f"have no part; start a multiple of {tp} ranks."
            )
        return Mesh({"pp": world_size // size, "tp": size})
    grid = read_mesh(mesh, world_size)
    if tp is not None and tp != grid.along("tp"):
        raise PlanError(f"tp={tp} contradicts the mesh {dict(grid.axes)}; give one of them.")
    others = [axis for axis in grid.axes if axis not in ("pp", "tp") and grid.along(axis) > 1]
    if others or grid.ranks[0] != 0:
        raise PlanError(
            f"the mesh {dict(grid.axes)} over the ranks {grid.ranks} has stages, which rank 0 "
            "drives from its first place, and one model; leave out the other axes "
            f"({', '.join(others) or 'and put rank 0 first'}), or leave out the stages."
        )
    axes = {axis: size for axis, size in grid.axes.items() if axis in ("pp", "tp")}
    return Mesh({**dict.fromkeys({"pp", "tp"} - axes.keys(), 1), **axes}, grid.ranks)


def _without_speeds(device_map: Any) -> Any:
    if device_map == "fastest":
        raise PlanError(
            'device_map="fastest" measures single ranks, and here a team of them computes a stage, '
            'so its speed is not known; use "auto", or a dict of module to stage.'
        )
    return device_map


def _share(model: Any, splits: Splits, grid: Mesh) -> Layout:
    """What the planner has to know if every tensor, on meta, is as small as the first rank's."""
    cut = {
        id(p): empty_like(p, local_shape(p.shape, splits[name], grid, 0))
        for name, p in model.named_parameters()
        if splits[name]
    }
    replace(model, cut)
    return layout(model)


def _room_by_stage(
    coor: Coordinator, grid: Mesh, where: str, max_memory: Memory | None
) -> dict[Place, int]:
    """By stage, what the poorest rank of its team has on its own device."""
    devices = [name.decode() for name in coor.allgather(where.encode())]
    room = given_room(cluster_memory(coor), max_memory)
    free = [room.get((rank, device), 0) for rank, device in enumerate(devices)]
    firsts = first_ranks(grid)
    return {
        (stage, devices[first]): min(free[rank] for rank in grid.group(first, "tp"))
        for stage, first in enumerate(firsts)
    }


def first_ranks(grid: Mesh) -> tuple[int, ...]:
    """By stage, the rank that speaks to other stages."""
    return grid.group(0, "pp")


def stages_of(model: Any, chosen: DeviceMap) -> dict[str, int]:
    """The stage of every tensor that a checkpoint holds."""
    found: dict[str, int] = {}
    for first, names in aliases(model).items():
        parts = {owner_of(name, set(chosen.places)) for name in names}
        stages = {chosen.places[part][0] for part in parts}
        if len(stages) > 1 or parts & set(names):
            raise PlanError(
                f"{first} is used outside the modules of one stage, so no team could hold it; load "
                "the model with tp= alone, or with device_map= alone."
            )
        found[first] = stages.pop()
    return found


def _serve(stage: TeamStage) -> int:
    try:
        code = stage.serve()
    except BaseException as error:
        stage.ring.close(error)
        raise
    stage.ring.close()
    return code


def _driver(
    kind: type[Any], config: Any, dtype: Any, build_on: str, options: Any, where: str
) -> Any:
    """The model that the user calls: what has no weights computes here, all else is on meta."""
    model = build(kind, config, dtype, build_on, options)
    compute_buffers(model, where)
    model._shelf = None
    return model.eval()


def _driven(model: Any, ring: Driver, chosen: DeviceMap, device: torch.device) -> Any:
    calls = {
        name: stage + 1
        for name, (stage, _) in chosen.places.items()
        if named_tensors(model.get_submodule(name))
    }
    return distribute(model, chosen, Session(ring, device), calls)


def holds(chosen: DeviceMap) -> dict[int, str]:
    """By stage, its modules in words."""
    return {stage: chosen.holds(stage) for stage, _ in chosen.room}


def _links(
    coor: Coordinator, grid: Mesh, backend: str | None, stack: contextlib.ExitStack
) -> list[Communicator]:
    """What the ring of the teams' first ranks needs; nothing elsewhere, or if there is one team."""
    firsts = first_ranks(grid)
    if len(firsts) == 1 or coor.rank not in firsts:
        return []
    leaders = stack.enter_context(_split(coor, firsts))
    return [stack.enter_context(_frames(leaders, backend)) for _ in range(2)]


def _split(coor: Coordinator, ranks: tuple[int, ...]) -> Coordinator:
    group = coor.split(ranks)
    assert group is not None, "this rank is one of them"
    return group


def _frames(coor: Coordinator, backend: str | None) -> Communicator:
    return Communicator(coor, backend, timeout_s=FOREVER_S, device_type="cpu")
