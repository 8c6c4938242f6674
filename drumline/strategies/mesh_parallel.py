"""A transformers checkpoint loaded over a mesh: tensor parallel, replicated, sharded by FSDP2.

model = drumline.load("checkpoint", tp=2)      # on every rank, which all make the same calls
print(model.generate(tokens))
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from communicator import Communicator
from coordinator import Coordinator
from drumline.checkpoint.plan_executor import LoadStats
from drumline.checkpoint.shard_loader import plan_on_all_ranks
from drumline.checkpoint.source import Checkpoint
from drumline.contact.generate_options import Criteria
from drumline.contact.model_hooks import ModelHooks
from drumline.core.consistency import run_on_all_ranks
from drumline.core.group_monitor import GroupMonitor, MonitoredCommunicator, monitored_loading
from drumline.core.mesh import ALIASES, Mesh, resolve_mesh
from drumline.core.mixed_classes import mixed_class
from drumline.errors import PeerLost, PlanError, RefusedUse
from drumline.kv_cache.windows import give_back_prompts
from drumline.planner.load_options import LoadOptions
from drumline.planner.model_profile import layer_names
from drumline.strategies.opening import open_checkpoint
from drumline.tensor_parallel.sharded_model import ShardedModel, shard_checkpoint, shrink
from drumline.tensor_parallel.synced_generation import (
    same_samples_on_all_ranks,
    same_stopping_on_all_ranks,
)
from drumline.tensor_parallel.tp_layers import insert_collectives
from drumline.timings import TIMINGS

SHARD_OF_ALL = "its part of every layer"

SYNCED_GPUS_INDEX = 6
"""Position of synced_gpus among the arguments of generate()."""


class MeshModel(ModelHooks):
    """Mixed into the class of the model. Ranks along tp make the same calls with the same inputs.

    `mesh` says who is where; `loaded` what loading took, in bytes.
    """

    mesh: Mesh
    loaded: LoadStats
    _monitor: GroupMonitor | None
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
        """As in transformers; ranks that share a model take the samples of the first, and stop with
        it."""
        if self.mesh.axis_size("dp_shard") > 1 and len(args) < SYNCED_GPUS_INDEX:
            # Each needs the shards of all others until the end.
            kwargs.setdefault("synced_gpus", True)
        generate = super().generate  # type: ignore[misc]
        if self._monitor is None:
            return generate(*args, **kwargs)
        with same_samples_on_all_ranks(self._monitor, self.device):  # type: ignore[attr-defined]
            return generate(*args, **kwargs)

    def stopping_criteria(self, criteria: Criteria) -> Criteria:
        """The criteria, with one stop for all ranks that share the model."""
        if self._monitor is None:
            return criteria
        return same_stopping_on_all_ranks(criteria, self._monitor)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, where each rank has a whole model. Raises RefusedUse elsewhere."""
        if self._monitor is not None or self.mesh.axis_size("dp_shard") > 1:
            raise RefusedUse(
                f"the ranks of the mesh {dict(self.mesh.axes)} share the layers and each would "
                "schedule what has come to it by then, so they would wait for each other in other "
                'batches; add device_map="auto", and rank 0 schedules for all.'
            )
        return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]


def load_mesh(path: str | Path, coor: Coordinator | None, options: LoadOptions) -> Any:
    """The model of a checkpoint on every rank, each with its own part. Collective; see `load`."""
    with contextlib.ExitStack() as stack:
        coor = coor or stack.enter_context(Coordinator())
        mesh = _checked_mesh(options, coor.world_size)
        with monitored_loading(coor, lambda rank: SHARD_OF_ALL):
            checkpoint = open_checkpoint(coor, path, options)
            sharded = run_on_all_ranks(
                coor, lambda: _sharded(coor, checkpoint, mesh, options), TIMINGS.load_s
            )
            plan = plan_on_all_ranks(coor, lambda: sharded.plan(mesh, coor.rank))
            stats = sharded.fill(coor, plan)
            for check in checkpoint.files.copy_checks:
                stack.enter_context(check)
            monitor = _connect_tp_group(sharded, coor, mesh, options.backend, stack)
        give_back_prompts(sharded.model)
        model = _as_mesh_model(sharded.model.eval(), mesh, stats, monitor, stack.pop_all())
        coor.live_calls.follow(model, {"forward": "model"}, "work")
        return model


def _sharded(
    coor: Coordinator, checkpoint: Checkpoint, mesh: Mesh, options: LoadOptions
) -> ShardedModel:
    """The empty model, sharded along the mesh."""
    sharded = shard_checkpoint(coor, checkpoint, mesh, options)
    if mesh.axis_size("dp_shard") > 1:
        shrink(sharded.model, sharded.splits, mesh, coor.rank)
        _shard_over_data(sharded.model, options.mesh, checkpoint.dtype)
    return sharded


def _connect_tp_group(
    sharded: ShardedModel,
    coor: Coordinator,
    mesh: Mesh,
    backend: str | None,
    stack: contextlib.ExitStack,
) -> GroupMonitor | None:
    """Connect the ranks that share a model, if it is sharded over several. Collective."""
    if not sharded.styles:
        return None
    group = coor.split(mesh.group(coor.rank, "tp"))
    assert group is not None, "this rank is one of them"
    comm = stack.enter_context(
        Communicator(stack.enter_context(group), backend, device=sharded.device)
    )
    layers = dict.fromkeys(range(comm.world_size), SHARD_OF_ALL)
    monitor = GroupMonitor(group, [comm], layers, is_driven=False)
    stack.callback(monitor.close)
    monitored: Any = MonitoredCommunicator(comm, monitor)
    insert_collectives(sharded.model, sharded.styles, monitored)
    return monitor


def _checked_mesh(options: LoadOptions, world_size: int) -> Mesh:
    """The mesh that is asked for. Raises PlanError for what would have no effect along it."""
    mesh = resolve_mesh(options.mesh, options.tp, world_size)
    if mesh.axis_size("dp_shard") > 1 and not hasattr(options.mesh, "mesh_dim_names"):
        raise PlanError(
            f"the mesh {dict(mesh.axes)} shards parameters along 'dp_shard', which FSDP2 brings "
            "together again over process groups of torch; pass a torch DeviceMesh, not sizes."
        )
    return mesh


def _as_mesh_model(
    model: Any,
    mesh: Mesh,
    stats: LoadStats,
    monitor: GroupMonitor | None,
    stack: contextlib.ExitStack,
) -> Any:
    model.__class__ = mixed_class(type(model), MeshModel, type(model))
    model.mesh, model.loaded, model._monitor = mesh, stats, monitor
    model._leave = weakref.finalize(model, _leave, stack, monitor)
    return model


def _leave(stack: contextlib.ExitStack, monitor: GroupMonitor | None) -> None:
    """Wait for the others, unless one has failed or this rank is on its way out with an error."""
    if monitor is not None and monitor.has_failed:
        lost = PeerLost("a rank of the model failed")
        stack.__exit__(type(lost), lost, None)
    elif getattr(sys, "last_value", None) is None:
        stack.close()


def _shard_over_data(model: nn.Module, mesh: Any, dtype: torch.dtype) -> None:
    """Have FSDP2 shard again, layer by layer, what tensor parallelism has sharded.

    It has one dtype for each group: modules with weights of another than `dtype` are their own.
    """
    from torch.distributed.fsdp import fully_shard

    outer = _data_axes(mesh)
    own = (name.rpartition(".")[0] for name, p in model.named_parameters() if p.dtype != dtype)
    for name in sorted({*own, *layer_names(model)} - {""}, key=len, reverse=True):  # inner first
        fully_shard(model.get_submodule(name), mesh=outer)
    fully_shard(model, mesh=outer)


def _data_axes(mesh: Any) -> Any:
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
