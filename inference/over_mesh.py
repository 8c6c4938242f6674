"""A transformers checkpoint loaded over a mesh: tensor parallel, replicated, sharded by FSDP2.

model = inference.load("checkpoint", tp=2)      # on every rank; call it alike on every rank
print(model.generate(tokens))
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from communicator import Communicator
from coordinator import Coordinator
from inference.boxes import Split, local_shape
from inference.checkpoint import building
from inference.errors import InferenceError, PlanError
from inference.layout import layer_names, model_class
from inference.mesh import Mesh, read_mesh
from inference.nd_load import Loaded, load_into, named_tensors, replace, together
from inference.renaming import kept_wide, sources_of
from inference.tensor_parallel import connect, read_plan, splits_of

Splits = Mapping[str, tuple[Split, ...]]


class OverMesh:
    """Mixed into the class of the model. Every rank calls it alike, with the same inputs along tp.

    `mesh` says who is where; `loaded` what loading took, in bytes.
    """

    mesh: Mesh
    loaded: Loaded
    _tp: Coordinator | None
    _leave: Any

    def close(self) -> None:
        """Give back the connections to the other ranks. Collective; harmless when done twice."""
        self._leave()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As ever; the ranks that share a model draw the same samples, those of the first."""
        if self._tp is not None:
            mine = torch.get_rng_state().numpy().tobytes()
            state = bytearray(self._tp.broadcast(mine if self._tp.is_master() else None))
            torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))
        return super().generate(*args, **kwargs)  # type: ignore[misc]


def load_over_mesh(
    path: str | Path,
    coor: Coordinator | None = None,
    *,
    mesh: Any = None,
    tp: int | None = None,
    tp_plan: Any = "auto",
    reader: str = "each",
    build_on: str = "meta",
    device: str | None = None,
    dtype: torch.dtype | str | None = None,
    cls: type[Any] | None = None,
    **options: Any,
) -> Any:
    """The model of a checkpoint on every rank, each with its own part. Collective.

    mesh: {"dp_replicate": 2, "tp": 2}, or a torch DeviceMesh, which `dp_shard` needs: along it the
        parameters are those of FSDP2. Other axes are refused.
    tp: how many ranks share one model; the short way to write a mesh.
    tp_plan: "auto" for the plan that the model carries, or styles by module name.
    reader: "each", "node" or "rank0"; ranks that do not read need no file at all.
    build_on: "meta", or "cpu" for a model whose constructor computes what no file holds.
    """
    with contextlib.ExitStack() as stack:
        if coor is None:
            coor = stack.enter_context(Coordinator())
        grid = _grid(mesh, tp, coor.world_size)
        config, generation = read_configs(coor, path)
        kind = cls or model_class(config)
        model = together(coor, lambda: build(kind, config, dtype, build_on, options))
        where = device or own_device(coor)
        shards = mesh if grid.along("dp_shard") > 1 else None
        styles = read_plan(model, tp_plan) if grid.along("tp") > 1 else {}
        splits = splits_of(model, styles, grid.along("tp"))
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        together(coor, lambda: compute_buffers(model, where))
        if shards is not None:
            _shard(model, splits, grid, coor.rank, shards)
        done = load_into(
            model,
            path,
            coor,
            mesh=grid,
            reader=reader,
            splits=splits,
            shapes=shapes,
            sources=lambda index: sources_of(model, index),
            device=where,
        )
        team = coor.split(grid.group(coor.rank, "tp")) if styles else None
        if team is not None:
            connect(model, styles, stack.enter_context(Communicator(stack.enter_context(team))))
        if generation is not None:
            model.generation_config = generation
        return _dress(model.eval(), grid, done, team, stack.pop_all())


def refuse_max_memory(max_memory: Any) -> None:
    """A mesh says which rank holds what, however much room there is."""
    if max_memory is not None:
        raise PlanError(
            f"max_memory={max_memory!r} says how to spread whole layers, and a mesh without stages "
            'cuts all of them alike, so it would change nothing; add device_map="auto" for stages '
            "of ranks that cut their layers, or leave it out."
        )


def _dress(
    model: Any, mesh: Mesh, done: Loaded, team: Coordinator | None, stack: contextlib.ExitStack
) -> Any:
    kind = type(model)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    model.__class__ = type(kind.__name__, (OverMesh, kind), names)
    model.mesh, model.loaded, model._tp = mesh, done, team
    model._leave = weakref.finalize(model, _leave, stack)
    return model


def _leave(stack: contextlib.ExitStack) -> None:
    """Wait for the others, unless this rank is on its way out with an error."""
    if getattr(sys, "last_value", None) is None:
        stack.close()


def _grid(mesh: Any, tp: int | None, world_size: int) -> Mesh:
    if mesh is None:
        size = world_size if tp is None else tp
        if size < 1 or world_size % size:
            raise PlanError(
                f"tp={tp} does not divide the {world_size} ranks of the launch, so some would "
                f"have no part; start a multiple of {tp} ranks."
            )
        return Mesh({"dp_replicate": world_size // size, "tp": size})
    grid = read_mesh(mesh, world_size)
    if tp is not None and tp != grid.along("tp"):
        raise PlanError(f"tp={tp} contradicts the mesh {dict(grid.axes)}; give one of them.")
    if grid.along("pp") > 1:
        raise PlanError(
            f"the mesh {dict(grid.axes)} has stages along 'pp', whose ranks serve the first one, "
            "and here every rank calls the model; use inference.load, or load_into with only=."
        )
    if grid.along("dp_shard") > 1 and not hasattr(mesh, "mesh_dim_names"):
        raise PlanError(
            f"the mesh {dict(grid.axes)} shards parameters along 'dp_shard', which FSDP2 brings "
            "together again over process groups of torch; pass a torch DeviceMesh, not sizes."
        )
    return grid


def own_device(coor: Coordinator) -> str:
    return f"cuda:{coor.local_rank}" if torch.cuda.is_available() else "cpu"


def read_configs(coor: Coordinator, path: str | Path) -> tuple[Any, Any]:
    """config.json and generation_config.json as rank 0 has them: others may have no file."""
    mine = together(coor, lambda: read_configs_here(path) if coor.rank == 0 else b"")
    model, generation = json.loads(coor.broadcast(mine if coor.rank == 0 else None))
    config = transformers.CONFIG_MAPPING[model["model_type"]].from_dict(model)
    if generation is None:
        return config, None
    return config, transformers.GenerationConfig.from_dict(generation)


def read_configs_here(path: str | Path) -> bytes:
    config = transformers.AutoConfig.from_pretrained(path)
    generation = None
    if (Path(path) / "generation_config.json").is_file():
        generation = json.loads((Path(path) / "generation_config.json").read_text())
    return json.dumps([json.loads(config.to_json_string(use_diff=False)), generation]).encode()


def build(
    kind: type[Any], config: Any, dtype: torch.dtype | str | None, build_on: str, options: Any
) -> Any:
    if build_on not in ("meta", "cpu"):
        raise PlanError(f'build_on={build_on!r}: a model is built on "meta" or on "cpu".')
    if isinstance(dtype, str):
        dtype = None if dtype == "auto" else getattr(torch, dtype.removeprefix("torch."))
    chosen = dtype or getattr(config, "dtype", None) or torch.float32
    with building, torch.device(build_on):
        model = kind._from_config(config, dtype=chosen, **options)
    wide = kept_wide(model, chosen)
    empty = {id(t): empty_like(t, t.shape, wide.get(name)) for name, t in named_tensors(model)}
    replace(model, empty)  # the buffers that no file holds stay as they were built
    return model


def empty_like(tensor: torch.Tensor, shape: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    empty = torch.empty(shape, dtype=dtype or tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def compute_buffers(model: Any, device: str) -> None:
    """Give the buffers that are in no checkpoint the values their module's code computes."""
    for name, module in model.named_modules():
        buffers = module._buffers
        todo = [key for key in module._non_persistent_buffers_set if buffers[key] is not None]
        for key in todo:
            if buffers[key].is_meta:
                buffers[key] = torch.full_like(buffers[key], _unset(buffers[key]), device=device)
            else:
                buffers[key] = buffers[key].to(device)
        if todo:
            model._init_weights(module)
        for key in todo:
            if _is_unset(buffers[key]):
                raise InferenceError(
                    f"the buffer {name}.{key} is in no checkpoint, and {type(model).__name__} "
                    'computes it in its constructor only; load with build_on="cpu".'
                )


def _unset(buffer: torch.Tensor) -> Any:
    """A value that no module computes."""
    if buffer.is_floating_point() or buffer.is_complex():
        return math.nan
    return True if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).max


def _is_unset(buffer: torch.Tensor) -> bool:
    """Is every element still what it was filled with?"""
    if not buffer.numel():
        return False
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.isnan().any())
    return bool((buffer == _unset(buffer)).all())


def _shard(model: nn.Module, splits: Splits, grid: Mesh, rank: int, mesh: Any) -> None:
    """Give what tensor parallelism has cut to FSDP2, which cuts it again, layer by layer."""
    from torch.distributed.fsdp import fully_shard

    cut = {
        id(p): empty_like(p, local_shape(p.shape, splits[name], grid, rank))
        for name, p in model.named_parameters()
        if splits[name]
    }
    replace(model, cut)
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    outer = mesh[names] if names and names != tuple(mesh.mesh_dim_names) else mesh
    for name in list(layer_names(model)):
        fully_shard(model.get_submodule(name), mesh=outer)
    fully_shard(model, mesh=outer)
