"""A model that every rank has built, or has on meta, spread over the ranks.

model = dispatch(model, {"encoder": 0, "decoder": 1})
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coordinator import Coordinator
from inference.agreement import agree_on
from inference.device_map import DeviceMap, Layout, Place
from inference.devices import offloaded, place
from inference.errors import PlanError
from inference.fill import fill
from inference.layout import layout, owner_of
from inference.memory import Memory, cluster_memory, given_room
from inference.nd_load import aliases, named_alike, replace, share_index, together
from inference.over_stages import join
from inference.plan import plan
from inference.renaming import Description
from inference.shelf import shelf_of
from inference.source import Source

Map = str | Mapping[str, Place | int | str] | DeviceMap


def dispatch(
    model: nn.Module,
    device_map: Map = "auto",
    coor: Coordinator | None = None,
    *,
    checkpoint: str | Path | None = None,
    max_memory: Memory | None = None,
    uncut: Collection[str] | str | None = None,
) -> Any:
    """The model with its modules on the places of the map. Collective; ends as `load` does.

    model: any module, alike on every rank. Each rank keeps its own modules and lets go of the rest.
    device_map: as for `load`; modules that it names are kept whole.
    checkpoint: a folder or file of safetensors to fill the model from, named as in the model; the
        values that the model has, if not given.
    uncut: classes of modules that stay whole, see `layout`.

    Raises PlanError or CheckpointError on every rank before serving starts.
    """
    with contextlib.ExitStack() as stack:
        if coor is None:
            coor = stack.enter_context(Coordinator())
        room = given_room(cluster_memory(coor), max_memory)
        chosen = together(coor, lambda: _planned(model, device_map, room, uncut))
        agree_on(coor, {"plan": chosen.to_bytes().decode(), "torch": torch.__version__})
        if checkpoint is not None:
            _fill(model, chosen, coor, Path(checkpoint))
        together(coor, lambda: _keep_own(model, chosen, coor.rank))
        return join(coor, model, chosen, stack)


def _planned(
    model: nn.Module, device_map: Map, room: dict[Place, int], uncut: Collection[str] | str | None
) -> DeviceMap:
    if isinstance(device_map, DeviceMap):
        device_map = device_map.places
    if isinstance(device_map, str):
        return plan(layout(model, uncut), room, device_map)
    return plan(_parts(model, device_map), room, device_map)


def _parts(model: nn.Module, named: Collection[str]) -> Layout:
    """The modules that a map names, and the largest ones that hold none of those."""
    modules = dict(model.named_modules())
    tensors = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    strangers = [name for name in named if name not in modules and name not in tensors]
    if strangers:
        raise PlanError(
            f"device_map names {strangers}, which are not in {type(model).__name__}, so it may be "
            "that of another model; its modules are those of named_modules()."
        )
    whole = [n for n in named if n in modules and n and not _is_inside(n, named)]
    return layout(model, names=whole)


def _is_inside(name: str, named: Collection[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in named if other)


def _fill(model: nn.Module, chosen: DeviceMap, coor: Coordinator, path: Path) -> None:
    """Read the tensors of this rank; ranks that do not see the files get them from the master."""
    has_files = coor.allgather(b"yes" if path.exists() else b"")
    readers = [rank if has else 0 for rank, has in enumerate(has_files)]
    index = share_index(coor, path, readers[coor.rank] == coor.rank)
    pieces = together(coor, lambda: named_alike(model, index))
    names = aliases(model)
    everywhere = {name: pieces[first] for first in names for name in names[first]}
    found = Description(everywhere, frozenset(), frozenset(), {})
    source = Source(path, None, index, readers)
    fill(model, found, source, chosen.places, None, coor, None)


def _keep_own(model: nn.Module, chosen: DeviceMap, rank: int) -> None:
    """This rank's tensors on their devices and all others on meta, whatever they were before."""
    own, parts = chosen.of(rank), set(chosen.places)
    stays = [name for name, device in own.items() if device == "disk"]
    if stays:
        raise PlanError(
            f"rank {rank}: {stays[:5]} are to stay on disk, which only a transformers model that "
            "inference.load reads can do; give them another place."
        )
    new: dict[int, torch.Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        device = own.get(owner_of(name, parts), "meta")
        moved = tensor if device == str(tensor.device) else tensor.detach().to(device)
        is_weight = isinstance(tensor, nn.Parameter)
        new[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if is_weight else moved
    replace(model, new)
    away = {name: own[name] for name in offloaded(chosen, rank)}
    shelf = shelf_of(model, away, torch.device(chosen.device_of(rank)))
    model.__dict__["_shelf"] = shelf
    place(model, chosen, rank, shelf)
