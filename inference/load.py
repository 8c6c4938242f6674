"""One model over the devices of every rank.

model = inference.load("checkpoint", device_map="auto")
print(model.generate(tokens))
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from communicator import Communicator
from coordinator import Coordinator
from inference.checkpoint import load_shard, read_config
from inference.errors import CheckpointError, InferenceError, PlanError, Served
from inference.layout import cache_nbytes, layout, model_class, skeleton, with_cache
from inference.memory import get_max_memory
from inference.model import distribute
from inference.over_mesh import load_over_mesh, refuse_stages
from inference.plan import DeviceMap, Layout, Place, plan
from inference.ring import FOREVER_S, Ring
from inference.session import Session
from inference.stage import Stage

Memory = Mapping[Any, Any] | Sequence[Any]


def load(
    path: str | Path,
    device_map: str | Mapping[str, Place | int] = "auto",
    coor: Coordinator | None = None,
    *,
    max_memory: Memory | None = None,
    dtype: torch.dtype | str | None = None,
    cls: type[Any] | None = None,
    backend: str | None = None,
    batch: int = 1,
    length: int = 0,
    tp: int | None = None,
    mesh: Any = None,
    tp_plan: Any = None,
    reader: str | None = None,
    build_on: str | None = None,
    **options: Any,
) -> Any:
    """The model of a transformers checkpoint, its layers spread over every rank. Collective.

    On the master it is an ordinary transformers model whose call and generate() work unchanged.
    Every other rank serves inside this call until the master leaves and then raises Served, a
    SystemExit: the rest of the script is the master's alone, and the same script runs with a world
    of one.

    path: a directory with config.json and .safetensors files, the same on every rank.
    device_map: how to plan, see `plan`; or a module (or prefix) to rank, or to (rank, device).
    coor: who the ranks are; made from the launch, and closed with the model, if not given.
    max_memory: bytes (or "2GiB") by place {(rank, "cpu"): ...}, by rank {0: ...}, or a list by
        rank; what is free if not given.
    dtype: of the weights; what the checkpoint says if not given.
    cls: the class of the model; the one that config.json names if not given.
    batch, length: of the tokens whose keys and values must find room beside the weights.
    backend: what moves the hidden states, see Communicator; the best that every rank has.
    tp, mesh: cut the layers themselves instead: every rank gets the model and calls it alike, see
        `load_over_mesh`, which takes tp_plan, reader and build_on too.
    options: for from_pretrained, such as attn_implementation.

    Raises PlanError or CheckpointError on every rank before serving starts.
    """
    if (tp, mesh, tp_plan, reader, build_on) != (None,) * 5:
        refuse_stages(device_map, max_memory)
        how = {"tp": tp, "tp_plan": tp_plan, "reader": reader, "build_on": build_on}
        how = {key: value for key, value in how.items() if value is not None}
        return load_over_mesh(path, coor, mesh=mesh, dtype=dtype, cls=cls, **how, **options)
    with contextlib.ExitStack() as stack:
        if coor is None:
            coor = stack.enter_context(Coordinator())
        config = _together(coor, lambda: read_config(path))
        kind = _together(coor, lambda: cls or model_class(config))
        real_dtype = checkpoint_dtype(dtype, config)
        cache = cache_nbytes(config, real_dtype, batch, length) if length else 0
        parts = _together(coor, lambda: layout(skeleton(kind, config, real_dtype)))
        parts = with_cache(parts, cache)
        chosen = _agree(coor, parts, device_map, max_memory, config, real_dtype)
        model = _together(coor, lambda: _shard(kind, path, chosen, coor.rank, real_dtype, options))
        if coor.world_size == 1:
            return distribute(model, chosen, None)
        outward, homeward = [stack.enter_context(_frames(coor, backend)) for _ in range(2)]
        holds = {rank: chosen.holds(rank) for rank in range(coor.world_size)}
        ring = Ring(outward, homeward, holds, stack.pop_all().close)
    if coor.is_master():
        return distribute(model, chosen, Session(ring, torch.device(chosen.device_of(0))))
    with contextlib.closing(ring):
        code = Stage(model, ring, torch.device(chosen.device_of(coor.rank))).serve()
    raise Served(code)


def _frames(coor: Coordinator, backend: str | None) -> Communicator:
    """What moves the frames, which are packed in the memory of the CPU wherever layers run."""
    return Communicator(coor, backend, timeout_s=FOREVER_S, device_type="cpu")


def _shard(
    kind: type[Any], path: str | Path, chosen: DeviceMap, rank: int, dtype: Any, options: Any
) -> Any:
    return load_shard(kind, path, {"": "meta", **chosen.of(rank)}, dtype, **options)


def _agree(
    coor: Coordinator,
    parts: Layout,
    device_map: str | Mapping[str, Place | int],
    max_memory: Memory | None,
    config: Any,
    dtype: torch.dtype,
) -> DeviceMap:
    """The plan, which every rank computes for itself, and all must have come to the same."""
    room = get_max_memory(coor)
    chosen: DeviceMap = _together(
        coor, lambda: plan(parts, given_room(room, max_memory), device_map)
    )
    mine = {
        "plan": chosen.to_bytes().decode(),
        "config": config.to_json_string(),
        "dtype": str(dtype),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for rank, data in enumerate(coor.allgather(json.dumps(mine).encode())):
        theirs = json.loads(data)
        for what, value in mine.items():
            if theirs[what] != value:
                raise InferenceError(
                    f"rank {coor.rank}: {what} is {value[:200]} here and {theirs[what][:200]} on "
                    f"rank {rank}, so the parts would not make one model; give every rank the same "
                    "files and versions."
                )
    return chosen


def given_room(room: Mapping[Place, int], max_memory: Memory | None) -> dict[Place, int]:
    """What the user allows, by place; places that the user does not mention get nothing."""
    if max_memory is None:
        return dict(room)
    pairs = max_memory.items() if isinstance(max_memory, Mapping) else enumerate(max_memory)
    given: dict[Place, int] = {}
    for key, value in pairs:
        if isinstance(key, int):
            key = next((place for place in room if place[0] == key), (key, "cpu"))
        given[(int(key[0]), str(key[1]))] = nbytes(value)
    ranks = {rank for rank, _ in room}
    strangers = sorted({rank for rank, _ in given} - ranks)
    if strangers:
        raise PlanError(
            f"max_memory gives room to ranks {strangers}, but the ranks are {sorted(ranks)}; leave "
            "them out, or start more ranks."
        )
    return dict(sorted(given.items()))


def nbytes(size: int | str) -> int:
    """2 GiB as a number, from a number or "2GiB" (1024) or "2GB" (1000)."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)(i?)B?\s*", size, re.IGNORECASE)
    if match is None:
        raise PlanError(f'max_memory has {size!r}, which is no size; write bytes or "2GiB".')
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def checkpoint_dtype(dtype: torch.dtype | str | None, config: Any) -> torch.dtype:
    """The dtype that is asked for, else that of the checkpoint."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in (None, "auto"):
        return getattr(torch, str(dtype).removeprefix("torch."))  # type: ignore[no-any-return]
    return getattr(config, "dtype", None) or torch.float32


def _together(coor: Coordinator, work: Callable[[], Any]) -> Any:
    """Do local work on every rank, then all go on or all raise, so that nobody waits."""
    error: Exception | None = None
    result = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    told = coor.allgather(b"" if error is None else f"{type(error).__name__}: {error}".encode())
    if error is not None:
        raise error
    for rank, text in enumerate(told):
        if text:
            raise CheckpointError(
                f"rank {coor.rank}: rank {rank} could not load its part: {text.decode()}"
            )
    return result
