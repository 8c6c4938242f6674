"""One model over the devices of every rank.

model = drumline.load("checkpoint", device_map="auto")
print(model.generate(tokens))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import launcher
from coordinator import Coordinator
from drumline.checkpoint.json_files import gguf_path
from drumline.core.device_map import Place
from drumline.errors import short_traceback
from drumline.model_packages import warn_of_unread
from drumline.planner.load_options import LoadOptions
from drumline.planner.memory import Memory
from drumline.planner.sizes import nbytes
from drumline.strategies.auto import load_fastest
from drumline.strategies.mesh_parallel import load_mesh
from drumline.strategies.opening import checkpoint_dtype
from drumline.strategies.pipeline_parallel import load_pipeline
from drumline.strategies.pipeline_tp import load_pipeline_tp
from drumline.strategies.replanning import load_replanning

__all__ = ["Memory", "checkpoint_dtype", "load", "nbytes"]


@short_traceback
def load(
    path: str | Path,
    device_map: str | Mapping[str, Place | int] | None = None,
    coor: Coordinator | None = None,
    *,
    max_memory: Memory | None = None,
    dtype: torch.dtype | str | None = None,
    cls: type[Any] | None = None,
    config: Any = None,
    backend: str | None = None,
    batch: int = 1,
    length: int = 0,
    pass_tokens: int = 0,
    cuda_graphs: bool = False,
    progress: bool | None = None,
    tp: int | None = None,
    mesh: Any = None,
    tp_plan: Any = None,
    reader: str | None = None,
    build_on: str | None = None,
    device: str | None = None,
    adapter: str | Path | None = None,
    dequantize: bool = False,
    trust_remote_code: bool = False,
    gguf_file: str | None = None,
    revision: str | None = None,
    disable_mmap: bool = False,
    on_failure: str = "raise",
    **options: Any,
) -> Any:
    """The model of a transformers checkpoint, its layers spread over every rank. Collective.

    On the master it is an ordinary transformers model whose call and generate() work unchanged.
    Every other rank serves inside this call until the master leaves and then raises WorkerExit, a
    SystemExit: the rest of the script is the master's alone, and the same script runs with a world
    of one.

    What to load:

    path: a directory with config.json and .safetensors files, the same on every rank that has it.
        Ranks without it are sent their part by the master, which must have it. Or the id of a model
        on the Hub, such as "Qwen/Qwen3-0.6B", which the master downloads into the cache of
        huggingface_hub.
    revision: a branch, tag or commit of that model; the newest of its main branch if not given.
    dtype: of the weights; what the checkpoint says if not given.
    cls: the class of the model; the one that config.json names if not given.
    config: of the model, an object, the same on every rank, which is copied; what config.json says
        if not given.
    adapter: the folder of a LoRA adapter, as peft saves it, on ranks that have the model's files.
        Each rank merges the part of its own layers while it reads them.
    dequantize: read quantized weights as weights in dtype, each rank its own; see
        `weight_formats.dequantized` for the formats. Otherwise they stay as transformers has them.
        Those of a GGUF file, and those that transformers cannot load on every rank, stay as they
        are stored, and each operation computes what it needs of them.
    gguf_file: the name of a GGUF file in `path`, which may also be that file itself.
    trust_remote_code: run the Python files of the checkpoint, on every rank, which must have them.
        Each rank logs their names.
    options: for from_pretrained, such as attn_implementation.

    Where it goes:

    device_map: how to plan, see `plan`: "auto" (the default), which gives slow machines fewer
        layers, "balanced", by memory alone, "sequential", or "fastest", which first measures what
        devices and links do, and splits layers over ranks of a node, as tp= does, where that is a
        tenth faster; or a module (or prefix) to rank, or to (rank, device). On the device "disk",
        weights are read whenever a layer runs, the next layer's meanwhile.
    coor: who the ranks are; made from the launch, and closed with the model, if not given;
        one that is given closes the model before itself.
    max_memory: bytes (or "2GiB") by place {(rank, "cpu"): ..., (rank, "disk"): ...}, by rank
        {0: ...}, by device of the master {"cpu": ...}, or a list by rank; what is free if not
        given, and nothing on disk.
    batch, length: of the tokens whose keys and values must fit beside the weights.
    pass_tokens: how many of them one pass runs over at most, where sequences are batched over
        pages; all if not given, as generate() runs over all prompts at once.
    tp, mesh: shard the layers themselves instead: every rank gets the model, and all make the same
        calls, see `MeshModel`. tp is how many ranks share one; a mesh is {"dp_replicate": 2,
        "tp": 2}, or a torch DeviceMesh, which `dp_shard` needs (its parameters are those of FSDP2).
        With a device_map as well, or an axis `pp` in the mesh, stages are TP groups that shard
        their layers, a rank of the device_map being a stage, and the master alone calls the model.
    tp_plan: "auto" for the plan that the model carries; "ep" for the same with the experts of a
        mixture whole, each on one rank; "sequence" for the same with the tokens partitioned between
        norms; or styles by module name, see `read_plan`.
    device: of this rank, where layers are split; cuda:{local_rank} if there is one, otherwise cpu.

    How it is read and run:

    reader: "each", "node" or "rank0" reads for the others, which need no file then.
    disable_mmap: read weights into memory, in huge pages, where whole layers on the CPU would
        otherwise be pages of the files, as in transformers: it takes longer, then a token takes
        up to an eighth less, and the files may change.
    progress: a bar on the master that counts the bytes of all ranks; on a terminal only, if None.
        There is none where layers are sharded.
    backend: what moves the hidden states, see Communicator; the best that every rank has, which
        between GPUs is one that moves them from device to device.
    cuda_graphs: let the ranks beside the master launch their layers for one token at once, as a
        CUDA graph, where keys and values lie in a StaticCache (cache_implementation="static") and
        all layers of a rank are on one GPU. Layers that cannot be captured run without, with a
        warning.
    on_failure: "replan" lets the model outlive the loss of any rank but the master. The call in
        flight raises PeerLost; before the next one, the ranks that are left plan and load anew,
        into the same object. "raise": every later call raises, too.
    build_on: without effect, for calls that pass "meta" or "cpu": buffers that no file holds are
        computed as from_pretrained does.

    Which of them may go together is a table: RULES in planner/load_options.py.

    Raises PlanError or CheckpointError on every rank before serving starts.
    """
    arguments = {k: v for k, v in locals().items() if k not in ("path", "coor", "options")}
    return load_as(path, coor, LoadOptions(**arguments, rest=options))


@short_traceback
def load_as(path: str | Path, coor: Coordinator | None, request: LoadOptions) -> Any:
    """The model, as `load` makes it of its arguments."""
    request = replace(request, gguf=gguf_path(path, request.gguf_file))
    if (launcher.current() if coor is None else coor).rank == 0:
        warn_of_unread()
    request.check_together()
    strategy: Any = load_mesh
    if request.on_failure == "replan":
        strategy = load_replanning
    elif not request.shards_layers:
        strategy = load_fastest if request.device_map == "fastest" else load_pipeline
    elif request.has_stages:
        strategy = load_pipeline_tp
    model = strategy(path, coor, request)
    return model if coor is None else coor.close_first(model)
