"""Pipeline stages of TP groups: whole layers by stage, each layer sharded over its stage's ranks.

model = drumline.load("checkpoint", tp=2, device_map="auto")    # 4 ranks: 2 stages of 2 ranks
print(model.generate(tokens))                                    # on the master; the others serve

Along `dp_replicate` there is such a model each, which its own first rank calls.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from pathlib import Path
from typing import Any

import torch

from communicator import Communicator
from coordinator import Coordinator
from drumline.checkpoint.model_tensors import named_tensors, tied_names
from drumline.checkpoint.plan_executor import LoadStats
from drumline.checkpoint.shard_loader import plan_on_all_ranks
from drumline.checkpoint.weight_map import stored_ties
from drumline.core.consistency import check_same_on_all_ranks, model_facts, run_on_all_ranks
from drumline.core.device_map import DeviceMap, Place, abbreviate_names
from drumline.core.group_monitor import GroupMonitor, monitored_loading
from drumline.core.mesh import Mesh, resolve_mesh
from drumline.errors import PlanError
from drumline.kv_cache.windows import give_back_prompts
from drumline.pipeline.driver import PipelineDriver
from drumline.pipeline.master_model import distribute
from drumline.planner.load_options import LoadOptions
from drumline.planner.memory import Memory, allowed_memory
from drumline.planner.model_profile import part_of_tensor, profile_model
from drumline.planner.plan import plan
from drumline.planner.token_memory import memory_of_model, shared_token_memory, with_tokens
from drumline.stages.ring import Ring
from drumline.stages.stage import Stage
from drumline.stages.stage_weights import LoadedStage
from drumline.stages.tp_stage import StageGroup, TpDriverRing, TpRing
from drumline.strategies.opening import open_checkpoint
from drumline.strategies.plan_inputs import where_prompts_are_whole
from drumline.strategies.serve_stage import (
    open_message_communicator,
    open_ring_communicators,
    serve_and_exit,
)
from drumline.tensor_parallel.sharded_model import ShardedModel, shard_checkpoint, shrink
from drumline.tensor_parallel.tp_layers import insert_collectives
from drumline.timings import TIMINGS


def load_pipeline_tp(path: str | Path, coor: Coordinator | None, options: LoadOptions) -> Any:
    """The model on the first rank of each replica, which drives it; all others serve. Collective.

    Consecutive ranks make a TP group, so that it lies within a node. A stage has as much memory as
    the poorest of the ranks that hold it.

    The model has `mesh`, and `loaded`: what loading took here, in bytes. Raises PlanError or
    CheckpointError on every rank before serving starts.
    """
    with contextlib.ExitStack() as stack:
        if coor is None:
            coor = stack.enter_context(Coordinator())
            # Other replicas may still use it for a long time.
            late = functools.partial(coor.close, timeout_s=TIMINGS.next_message_s)
            stack.push(lambda kind, error, trace: late() if error is None else None)
        mesh = _checked_mesh(options, coor.world_size)
        sharded, driven, device_map, stats = _load_shards(coor, path, mesh, options)
        for check in sharded.files.copy_checks:
            stack.enter_context(check)
        ranks = mesh.group(coor.rank, "pp", "tp")
        replica = coor if len(ranks) == coor.world_size else _split(coor, ranks, stack)
        axes = {axis: mesh.axis_size(axis) for axis in mesh.axes if axis in ("pp", "tp")}
        own_mesh = Mesh(axes, tuple(range(len(ranks))))  # numbered as in the replica's Coordinator
        group, ring_comms = _connect(replica, own_mesh, sharded, device_map, options.backend, stack)
        resources = stack.pop_all()
    hop = own_mesh.coordinate(replica.rank)["pp"] + 1
    layers_by_stage = {stage: device_map.holds(stage) for stage, _ in device_map.free_nbytes}
    leaders = None  # as on ranks that lead no group, or the only one
    if ring_comms:
        forward, back, *on_device = ring_comms
        leaders = Ring(forward, back, layers_by_stage, resources, group.monitor, on_device)
    ring, device = TpRing(group, hop, leaders, resources), torch.device(sharded.device)
    give_back_prompts(sharded.model)
    stage = Stage(sharded.model.eval(), ring, device)
    if not replica.is_master():
        serve_and_exit(stage, replica)
    driver = PipelineDriver(TpDriverRing(stage, ring), device)
    model = distribute(
        LoadedStage(driven, device_map, stats=stats), driver, _hops(driven, device_map)
    )
    model.mesh = mesh
    return model


def _load_shards(
    coor: Coordinator, path: str | Path, mesh: Mesh, options: LoadOptions
) -> tuple[ShardedModel, Any, DeviceMap, LoadStats]:
    """The model with this rank's shards of its stage, and the stages. Collective.

    Also the model that the user calls, on the rank that drives: modules without weights compute
    there, all else is on meta.
    """
    with monitored_loading(coor, lambda rank: "its part of a stage"):
        checkpoint = open_checkpoint(coor, path, options)
        sharded = run_on_all_ranks(coor, lambda: shard_checkpoint(coor, checkpoint, mesh, options))
        is_driver = coor.rank == mesh.group(coor.rank, "pp", "tp")[0]
        driven = copy.deepcopy(sharded.model) if is_driver else None
        device_map = _plan(coor, mesh, sharded, options)
        stages = run_on_all_ranks(coor, lambda: stages_of(sharded.model, device_map))
        only = {name: {"pp": stage} for name, stage in stages.items()}
        load_plan = plan_on_all_ranks(coor, lambda: sharded.plan(mesh, coor.rank, only))
        return sharded, driven, device_map, sharded.fill(coor, load_plan)


def _checked_mesh(options: LoadOptions, world_size: int) -> Mesh:
    """The mesh with `pp` and `tp`, rank 0 first in both. Raises PlanError for any other."""
    mesh = resolve_mesh(options.mesh, options.tp, world_size, "pp")
    if mesh.axis_size("dp_shard") > 1:
        raise PlanError(
            f"the mesh {dict(mesh.axes)} has stages, which the first rank of each replica drives "
            "on its own, and shards parameters along 'dp_shard', for which all replicas would have "
            "to run in step; name that axis 'dp_replicate', or make 'tp' larger, or leave out "
            "the stages."
        )
    if mesh.ranks[0] != 0:
        raise PlanError(
            f"the mesh {dict(mesh.axes)} over the ranks {mesh.ranks} has stages, which the rank "
            "at its first place drives, and that has to be the master; put rank 0 first."
        )
    return Mesh({**dict.fromkeys({"pp", "tp"} - mesh.axes.keys(), 1), **mesh.axes}, mesh.ranks)


def _plan(coor: Coordinator, mesh: Mesh, sharded: ShardedModel, options: LoadOptions) -> DeviceMap:
    """The layers of each stage, the same on every rank. Collective."""
    mode = "auto" if options.device_map in (None, "meta") else options.device_map
    shrink(sharded.model, sharded.splits, mesh, 0)
    model = sharded.model
    parts = profile_model(model, stored=stored_ties(model, sharded.files.index))
    free_nbytes = _free_nbytes_by_stage(coor, mesh, sharded.device, options.max_memory)
    if options.length:
        whole_on = where_prompts_are_whole(model.config, options, free_nbytes, len(free_nbytes))
        sizes = (options.pass_batch, options.length, whole_on)
        measured = functools.partial(memory_of_model, model, parts, *sizes)
        memory = shared_token_memory(coor, type(model), measured)
        parts = with_tokens(parts, memory.of_batch(options.batch, options.pass_batch))
    device_map: DeviceMap = run_on_all_ranks(coor, lambda: plan(parts, free_nbytes, mode))
    check_same_on_all_ranks(coor, {"plan": device_map.to_json(), **model_facts(model, model.dtype)})
    if disk := [name for name, (_, device) in device_map.places.items() if device == "disk"]:
        raise PlanError(
            f"device_map puts {abbreviate_names(disk)} on disk, and ranks that shard a layer keep "
            "their parts in memory; give the number of a stage, or leave out tp= and mesh=."
        )
    return device_map


def _connect(
    replica: Coordinator,
    mesh: Mesh,
    sharded: ShardedModel,
    device_map: DeviceMap,
    backend: str | None,
    stack: contextlib.ExitStack,
) -> tuple[StageGroup, list[Communicator]]:
    """This rank's TP group, its layers connected, and the communicators of the leaders' ring."""
    members = _split(replica, mesh.group(replica.rank, "tp"), stack)
    comms = [stack.enter_context(open_message_communicator(members, None))]
    if sharded.styles:
        comms.append(stack.enter_context(Communicator(members, device=sharded.device)))
        insert_collectives(sharded.model, sharded.styles, comms[1])
    ring_comms = _ring_comms(replica, mesh, torch.device(sharded.device), backend, stack)
    stages = [mesh.coordinate(rank)["pp"] for rank in range(replica.world_size)]
    layers = {rank: f"its part of {device_map.holds(stage)}" for rank, stage in enumerate(stages)}
    monitor = GroupMonitor(replica, [*reversed(ring_comms), *comms], layers)
    stack.callback(monitor.close)
    on_device = next((comm for comm in comms[1:] if _carries_tensors(comm)), None)
    return StageGroup(replica.rank, comms[0], monitor, on_device), ring_comms


def _carries_tensors(comm: Communicator) -> bool:
    """True if tensors of messages, too, go by the communicator of the layers."""
    return comm.device.type != "cpu"


def _free_nbytes_by_stage(
    coor: Coordinator, mesh: Mesh, where: str, max_memory: Memory | None
) -> dict[Place, int]:
    """Free memory by stage: the least of all ranks that hold it, each on its own device."""
    devices = coor.allgather_object(where)
    by_place = allowed_memory(coor, max_memory)
    by_rank = [by_place.get((rank, device), 0) for rank, device in enumerate(devices)]
    return {
        (stage, devices[first]): min(by_rank[r] for r in mesh.group(first, "tp", "dp_replicate"))
        for stage, first in enumerate(mesh.group(0, "pp"))
    }


def stages_of(model: Any, device_map: DeviceMap) -> dict[str, int]:
    """The stage of every tensor that a checkpoint holds."""
    stage_by_name: dict[str, int] = {}
    for first, names in tied_names(model).items():
        parts = {part_of_tensor(name, set(device_map.places)) for name in names}
        stages = {device_map.places[part][0] for part in parts}
        if len(stages) > 1 or parts & set(names):
            raise PlanError(
                f"{first} is used outside the modules of one stage, so no TP group could hold it; "
                "load the model with tp= alone, or with device_map= alone."
            )
        stage_by_name[first] = stages.pop()
    return stage_by_name


def _hops(model: Any, device_map: DeviceMap) -> dict[str, int]:
    """By module that is called by a message: the place of its stage on the way."""
    modules = dict(model.named_modules())
    return {
        name: stage + 1
        for name, (stage, _) in device_map.places.items()
        if name in modules and named_tensors(modules[name])
    }


def _ring_comms(
    coor: Coordinator,
    mesh: Mesh,
    device: torch.device,
    backend: str | None,
    stack: contextlib.ExitStack,
) -> list[Communicator]:
    """The communicators of the leaders' ring, forward and back, and two more between their devices
    where there are such; none elsewhere, or if there is one TP group."""
    firsts = mesh.group(0, "pp")  # by stage, the leader of its TP group
    if len(firsts) == 1 or coor.rank not in firsts:
        return []
    return open_ring_communicators(_split(coor, firsts, stack), device, backend, stack)


def _split(coor: Coordinator, ranks: tuple[int, ...], stack: contextlib.ExitStack) -> Coordinator:
    group = coor.split(ranks)
    assert group is not None, "this rank is one of them"
    return stack.enter_context(group)
