"""Tracing of a tensor-parallel program once for all ranks; programs that depend on one are refused.

program = trace_portable(build, world_size=2)    # in a process that has no process group
program(*tensors, mesh)                          # on every rank, with its own DeviceMesh

A device is one of three things that a trace bakes in; hoist() moves that. The other two are the
rank's coordinate (an offset into a vocabulary, silently wrong elsewhere) and its process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from coordinator import torch_private
from drumline.compile_once.device_mapping import HoistError
from drumline.compile_once.precompile import all_tensors


def trace_portable(build: Callable[[], fx.GraphModule], world_size: int) -> fx.GraphModule:
    """The program that `build` traces, for every rank; its meshes become inputs behind the others.

    build: traces on a mesh that it makes itself, with symbolic shapes (make_fx with tracing_mode=
        "symbolic"), so that a coordinate stays a question. It is called as the first and as the
        last of `world_size` fake ranks: no other process takes part.

    Needs torch 2.12. Raises HoistError if the two graphs differ, or name a process group.
    """
    if torch.__version__ < "2.12":
        raise HoistError(
            f"trace_portable needs torch 2.12 or newer, and this is {torch.__version__}, whose "
            "traces name the process groups of one rank; pip install 'torch>=2.12'."
        )
    from torch.distributed import config

    graphs = []
    for rank in (0, world_size - 1):
        with _fake_process_group(rank, world_size), config.patch(compile_on_one_rank=True):
            graphs.append(build())
        check_no_process_groups(graphs[-1])
    first, last = graphs
    difference = _difference(first, last)
    if difference:
        raise HoistError(
            f"the program depends on the rank that traced it ({difference}), so it would be wrong "
            "elsewhere; trace with symbolic shapes, and ask the mesh and not dist.get_rank()."
        )
    return _meshes_as_inputs(first)


@contextmanager
def _fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """A fake process group: its other ranks do not exist, and its collectives do nothing."""
    if dist.is_initialized():
        raise HoistError(
            f"rank {dist.get_rank()}: this process has a process group already, so it cannot "
            "act as another rank; trace before init_process_group, or in a process apart."
        )
    dist.init_process_group(
        "fake", rank=rank, world_size=world_size, store=torch_private.fake_store()
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_no_process_groups(program: fx.GraphModule) -> None:
    """Raise HoistError if a collective of the program names a process group of the tracing rank."""
    graphs = [module.graph for module in program.modules() if isinstance(module, fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        schema = torch_private.schema_of(node.target)
        if schema is None or "c10d" not in schema.name:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.name == "group_name" and isinstance(value, str):
                raise HoistError(
                    f"node {node.name} names the process group {value!r}, which on another rank "
                    "is another group; trace under torch.distributed.config.compile_on_one_rank."
                )


def _difference(first: fx.GraphModule, last: fx.GraphModule) -> str:
    """The first line, or tensor, in which two graphs differ; empty if they are equal."""
    codes = [
        [line for m in program.modules() for line in getattr(m, "code", "").splitlines()]
        for program in (first, last)
    ]
    for line, other in zip_longest(*codes, fillvalue=""):
        if line != other:
            return f"{line.strip()} against {other.strip()}"
    counterparts = all_tensors(last)
    for name, tensor in all_tensors(first).items():
        twin = counterparts.get(name)
        if twin is None or twin.dtype != tensor.dtype or not torch.equal(twin, tensor):
            return f"constant {name}"
    return ""


def _meshes_as_inputs(program: fx.GraphModule) -> fx.GraphModule:
    """Turn each mesh that the trace keeps as a constant into an input, in order of first use."""
    graph = program.graph
    inputs: dict[str, fx.Node] = {}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.nodes):
        value = getattr(program, str(node.target), None) if node.op == "get_attr" else None
        # A DeviceMesh, or the wrapper of tracing around one.
        if isinstance(getattr(value, "real_obj", value), DeviceMesh):
            if node.target not in inputs:
                with graph.inserting_after(last):
                    last = inputs[node.target] = graph.placeholder(f"mesh_{len(inputs)}")
            node.replace_all_uses_with(inputs[node.target])
            graph.erase_node(node)
    for name in inputs:
        delattr(program, name)
    program.recompile()
    return program
