"""Tensor parallel inside stages: whole layers over teams of ranks, each layer cut over its team.

model = drumline.load("checkpoint", tp=2, device_map="auto")    # 4 ranks: 2 stages of 2 ranks
print(model.generate(tokens))                                    # on the master; the others serve

Along `dp_replicate` there is such a model each, which its own first rank calls.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from communicator import Communicator
from coordinator import Coordinator
from drumline.checkpoint.model_tensors import named_tensors, tied_names
from drumline.checkpoint.shard_loader import plan_on_all_ranks
from drumline.core.consistency import check_same_on_all_ranks, model_facts, run_on_all_ranks
from drumline.core.device_map import DeviceMap, Place
from drumline.core.mesh import Mesh, resolve_mesh
from drumline.errors import PlanError, WorkerExit
from drumline.liveness.group_monitor import Vigil
from drumline.liveness.stopped_ranks import on_lookout, outlast_master
from drumline.pipeline.driver import Session
from drumline.pipeline.master_model import distribute
from drumline.planner.load_options import LoadOptions
from drumline.planner.memory import Memory, cluster_memory, limit_memory
from drumline.planner.model_profile import cache_nbytes, part_of_tensor, profile_model, with_cache
from drumline.planner.plan import plan
from drumline.stages.ring import FOREVER_S, Ring
from drumline.stages.tp_stage import Driver, Follower, Leader, Team, TeamStage
from drumline.tensor_parallel.parallelize import connect
from drumline.tensor_parallel.sharded_model import (
    CutModel,
    build,
    compute_buffers,
    cut_checkpoint,
    find,
)


def load_over_teams(path: str | Path, coor: Coordinator | None, asked: LoadOptions) -> Any:
    """The model on the first rank of each replica, who calls it; all others serve. Collective.

    Ranks that follow each other make a team, so that it lies within a node. A stage has as much
    room as the rank that has least of those that hold it.

    The model has `mesh`, and `loaded`: what loading took here, in bytes. Raises PlanError or
    CheckpointError on every rank before serving starts.
    """
    with contextlib.ExitStack() as stack:
        if coor is None:
            coor = stack.enter_context(Coordinator())
            stack.push(_patiently(coor))
        grid = _grid(asked, coor.world_size)
        with on_lookout(coor, lambda rank: "its part of a stage"):
            files, configs = find(coor, path, grid, asked)
            cut = run_on_all_ranks(coor, lambda: cut_checkpoint(coor, files, configs, grid, asked))
            chosen = _plan(coor, grid, cut, asked)
            stages = run_on_all_ranks(coor, lambda: stages_of(cut.model, chosen))
            only = {name: {"pp": stage} for name, stage in stages.items()}
            parts = plan_on_all_ranks(coor, lambda: cut.plan(grid, coor.rank, only))
            done = cut.fill(coor, parts)
        mine = grid.group(coor.rank, "pp", "tp")
        crew = coor if len(mine) == coor.world_size else _split(coor, mine, stack)
        own = _one_replica(grid, mine)
        team, links = _connect(crew, own, cut, chosen, asked.backend, stack)
        driver = None
        if crew.is_master():
            driver = _driver(cut, asked)
            driver.mesh, driver.loaded = grid, done
        under = stack.pop_all()
    ring = Ring(links[0], links[1], holds(chosen), under) if links else None
    hears = Leader(team, ring) if ring and not crew.is_master() else Follower(team, under)
    device = torch.device(cut.device)
    hop = own.coordinate(crew.rank)["pp"] + 1
    stage = TeamStage(cut.model.eval(), hears, device, hop, team)
    if crew.is_master():
        return _driven(driver, Driver(stage, team, ring), chosen, device)
    code = _serve(stage)
    outlast_master(crew, code)
    raise WorkerExit(code)


def _patiently(coor: Coordinator) -> Any:
    """What closes a Coordinator that other replicas may still use for a long time."""

    def close(kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            coor.close(timeout_s=FOREVER_S)

    return close


def _grid(asked: LoadOptions, world_size: int) -> Mesh:
    """The mesh with `pp` and `tp`, rank 0 first in both. Raises PlanError for any other."""
    grid = resolve_mesh(asked.mesh, asked.tp, world_size, "pp")
    if grid.axis_size("dp_shard") > 1:
        raise PlanError(
            f"the mesh {dict(grid.axes)} has stages, which the first rank of each replica drives "
            "on its own, and shards parameters along 'dp_shard', for which all replicas would have "
            "to run in step; name that axis 'dp_replicate', or make 'tp' larger, or leave out "
            "the stages."
        )
    if grid.ranks[0] != 0:
        raise PlanError(
            f"the mesh {dict(grid.axes)} over the ranks {grid.ranks} has stages, which the rank "
            "at its first place drives, and that has to be the master; put rank 0 first."
        )
    return Mesh({**dict.fromkeys({"pp", "tp"} - grid.axes.keys(), 1), **grid.axes}, grid.ranks)


def _one_replica(grid: Mesh, ranks: tuple[int, ...]) -> Mesh:
    """The mesh of these ranks alone, numbered as in their own Coordinator."""
    axes = {axis: size for axis, size in grid.axes.items() if axis in ("pp", "tp")}
    return Mesh(axes, tuple(range(len(ranks))))


def _plan(coor: Coordinator, grid: Mesh, cut: CutModel, asked: LoadOptions) -> DeviceMap:
    """Which stage has which layers, the same on every rank. Collective."""
    device_map = "auto" if asked.device_map in (None, "meta") else asked.device_map
    cut.shrink(grid, 0)
    parts, model = profile_model(cut.model), cut.model
    if asked.length:
        needs = cache_nbytes(cut.config, model.dtype, asked.batch, asked.length)
        parts = with_cache(parts, -(-needs // grid.axis_size("tp")))
    room = _room_by_stage(coor, grid, cut.device, asked.max_memory)
    chosen: DeviceMap = run_on_all_ranks(
        coor, lambda: plan(parts, room, _without_speeds(device_map))
    )
    check_same_on_all_ranks(coor, {"plan": chosen.to_json(), **model_facts(model, model.dtype)})
    return chosen


def _connect(
    crew: Coordinator,
    grid: Mesh,
    cut: CutModel,
    chosen: DeviceMap,
    backend: str | None,
    stack: contextlib.ExitStack,
) -> tuple[Team, list[Communicator]]:
    """This rank's team, its layers connected, and what the ring of first ranks needs."""
    members = _split(crew, grid.group(crew.rank, "tp"), stack)
    comms = [stack.enter_context(_frames(members, None))]
    if cut.styles:
        comms.append(stack.enter_context(Communicator(members)))
        connect(cut.model, cut.styles, comms[1])
    links = _links(crew, grid, backend, stack)
    stages = [grid.coordinate(rank)["pp"] for rank in range(crew.world_size)]
    parts = {rank: chosen.holds(stage) for rank, stage in enumerate(stages)}
    vigil = Vigil(crew, [*links, *comms], parts)
    stack.callback(vigil.close)
    return Team(crew.rank, comms[0], vigil), links


def _without_speeds(device_map: Any) -> Any:
    if device_map == "fastest":
        raise PlanError(
            'device_map="fastest" decides itself how many ranks share a layer, and tp= or mesh= do '
            'so too; leave these out, or use "auto", or a dict of module to stage.'
        )
    return device_map


def _room_by_stage(
    coor: Coordinator, grid: Mesh, where: str, max_memory: Memory | None
) -> dict[Place, int]:
    """By stage, what the poorest of all ranks that hold it has on its own device."""
    devices = [name.decode() for name in coor.allgather(where.encode())]
    room = limit_memory(cluster_memory(coor), max_memory)
    free = [room.get((rank, device), 0) for rank, device in enumerate(devices)]
    return {
        (stage, devices[first]): min(free[r] for r in grid.group(first, "tp", "dp_replicate"))
        for stage, first in enumerate(first_ranks(grid))
    }


def first_ranks(grid: Mesh) -> tuple[int, ...]:
    """By stage, the rank that speaks to other stages."""
    return grid.group(0, "pp")


def stages_of(model: Any, chosen: DeviceMap) -> dict[str, int]:
    """The stage of every tensor that a checkpoint holds."""
    found: dict[str, int] = {}
    for first, names in tied_names(model).items():
        parts = {part_of_tensor(name, set(chosen.places)) for name in names}
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


def _driver(cut: CutModel, asked: LoadOptions) -> Any:
    """The model that the user calls: what has no weights computes here, all else is on meta."""
    model = build(type(cut.model), cut.config, asked)
    compute_buffers(model, cut.device)
    model.generation_config = cut.generation or model.generation_config
    model._prefetcher = None
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
    return {stage: chosen.holds(stage) for stage, _ in chosen.free_nbytes}


def _links(
    coor: Coordinator, grid: Mesh, backend: str | None, stack: contextlib.ExitStack
) -> list[Communicator]:
    """What the ring of the teams' first ranks needs; nothing elsewhere, or if there is one team."""
    firsts = first_ranks(grid)
    if len(firsts) == 1 or coor.rank not in firsts:
        return []
    leaders = _split(coor, firsts, stack)
    return [stack.enter_context(_frames(leaders, backend)) for _ in range(2)]


def _split(coor: Coordinator, ranks: tuple[int, ...], stack: contextlib.ExitStack) -> Coordinator:
    group = coor.split(ranks)
    assert group is not None, "this rank is one of them"
    return stack.enter_context(group)


def _frames(coor: Coordinator, backend: str | None) -> Communicator:
    return Communicator(coor, backend, timeout_s=FOREVER_S, device_type="cpu")
