"""The user's own device map, checked and completed: pure arithmetic.

device_map = complete_user_map(model, free_nbytes, {"": 0, "model.layers.3": (1, "cuda:0")})
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from drumline.core.device_map import (
    DeviceMap,
    ModelProfile,
    ModulePart,
    Place,
    offload_level,
    place_of,
)
from drumline.errors import PlanError


def complete_user_map(
    model: ModelProfile, free_nbytes: dict[Place, int], device_map: Mapping[str, Place | int | str]
) -> DeviceMap:
    """The user's own map, prefixes spread over the parts they cover, checked against free memory.

    A place may be (rank, device), a rank (its first device), or a device (of the master).
    The space on disk is not known, so it is taken as enough.
    """
    parts = [*model.others, *model.layers]
    _check_names(parts, device_map)
    named = [place for place in device_map.values() if isinstance(place, (tuple, list, str))]
    disks = {place_of(place, free_nbytes, "device_map") for place in named}
    ranks = {rank for rank, _ in free_nbytes}
    for place in disks - set(free_nbytes):
        if place[1] == "disk" and place[0] in ranks:
            free_nbytes = {**free_nbytes, place: model.nbytes}
    places = {part.name: _lookup(part.name, device_map, free_nbytes) for part in parts}
    result = DeviceMap.of_parts(parts, places, free_nbytes)
    _check_ties(model, places)
    _check_loose(model, places, free_nbytes)
    for place in result.used_places() & free_nbytes.keys():
        used, needed = result.used(place), result.needed(place, model.workspace_nbytes)
        if needed > free_nbytes[place]:
            raise PlanError(
                f"rank {place[0]}: device_map puts {used} bytes on {place[1]}, which has "
                f"{free_nbytes[place]} bytes free, {needed - used} of them for its workspace and "
                f"offloaded layers that run there: {needed - free_nbytes[place]} bytes are "
                "missing. Move modules to another rank or raise max_memory."
            )
    return result


def _check_names(parts: Sequence[ModulePart], device_map: Mapping[str, Any]) -> None:
    """Raise for names that are not part of the model, nor around one."""
    names = {part.name for part in parts}
    prefixes = {name[:at] for name in names for at, letter in enumerate(name) if letter == "."}
    for name in device_map.keys() - names - prefixes - {""}:
        outer = next((part for part in names if name.startswith(f"{part}.")), None)
        why = f"a part of {outer}, which stays whole" if outer else "not in the model"
        near = difflib.get_close_matches(name, names | prefixes, 1)
        advice = f"give {outer!r} a place" if outer else "leave it out"
        raise PlanError(
            f"device_map names {name!r}, which is {why}, so it would have no effect; {advice}"
            + (f", or did you mean {near[0]!r}?" if near and not outer else ".")
        )


def _lookup(
    name: str, device_map: Mapping[str, Place | int | str], free_nbytes: dict[Place, int]
) -> Place:
    prefix = name
    while prefix not in device_map:
        if not prefix:
            raise PlanError(
                f"device_map has no place for {name!r}, so it would not be loaded; add {name!r} or "
                "a prefix of it (the empty name covers everything)."
            )
        prefix = prefix.rpartition(".")[0]
    place = place_of(device_map[prefix], free_nbytes, "device_map")
    if place not in free_nbytes:
        places = ", ".join(f"{rank} {device}" for rank, device in free_nbytes)
        raise PlanError(
            f"device_map puts {name!r} on rank {place[0]} {place[1]}, which does not exist or is "
            f"left out of max_memory; the places are {places}."
        )
    return place


def _check_ties(model: ModelProfile, places: dict[str, Place]) -> None:
    for tie in model.ties:
        if len({places[name] for name in tie}) > 1:
            spread = ", ".join(
                f"{name} on rank {places[name][0]} {places[name][1]}" for name in tie
            )
            raise PlanError(
                f"device_map separates modules that share tensors ({spread}), so one of them would "
                "be left without its weights; put them on the same place."
            )


def _check_loose(
    model: ModelProfile, places: Mapping[str, Place], free_nbytes: Mapping[Place, int]
) -> None:
    for name in model.root_tensors:
        rank, device = places[name]
        if rank or offload_level(places[name], free_nbytes):
            raise PlanError(
                f"device_map puts {name!r} on rank {rank} {device}, but the model reads or changes "
                "it by itself, outside of any call that could be sent there; put it on the first "
                "device of rank 0."
            )
