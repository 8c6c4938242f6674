"""The profile of a model and the device map planned for it: data, no torch and no communication.

layers = (ModulePart("layers.0", 12), ModulePart("layers.1", 12))
model = ModelProfile(layers, others=(ModulePart("head", 6),))
print(DeviceMap({"layers.0": (0, "cpu")}, {"layers.0": 12}, {(0, "cpu"): 20}))
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drumline.errors import PlanError

Place = tuple[int, str]
"""The location of a module: a rank, and a device such as "cuda:1" or "cpu", or "disk".

Modules on "disk", and on "cpu" of a rank with an accelerator, are offloaded: their weights are
loaded to the rank's first device while they run.
"""

KINDS_OF_DEVICE = ("cpu", "disk")
DEVICE = re.compile(r"[a-z]\w*(:[0-9]{1,9})?")


def place_of(value: Any, places: Iterable[Place], setting: str) -> Place:
    """The place that is meant by it, by a device of rank 0, or by a rank: its first device.

    places: of all ranks. setting: what has the value, for the PlanError if it means none.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return next((place for place in places if place[0] == value), (value, "cpu"))
    try:
        rank, device = (0, value) if isinstance(value, str) else value
        if DEVICE.fullmatch(str(device)) and not isinstance(rank, bool):
            return operator.index(rank), str(device)
    except (TypeError, ValueError):
        pass
    raise PlanError(
        f"{setting} has {value!r:.99}, which is not a place; give a rank, a device of rank 0 "
        'such as "cpu", or both: (1, "cuda:0").'
    )


def sort_places(free_nbytes: Mapping[Place, int]) -> dict[Place, int]:
    """Sort by rank; within a rank its accelerators, then its CPU, then its disk."""

    def key(place: Place) -> tuple[int, int, str, int]:
        kind, _, number = place[1].partition(":")
        level = KINDS_OF_DEVICE.index(kind) + 1 if kind in KINDS_OF_DEVICE else 0
        return place[0], level, kind, int(number or 0)

    return {place: free_nbytes[place] for place in sorted(free_nbytes, key=key)}


def first_device(devices: Iterable[str]) -> str:
    """The device of a rank on which its offloaded modules run."""
    return next((device for device in devices if device not in KINDS_OF_DEVICE), "cpu")


def offload_level(place: Place, free_nbytes: Iterable[Place]) -> int:
    """The level of offloading at a place: 0 for none, 1 on the CPU, 2 on disk."""
    rank, device = place
    if device == "disk":
        return 2
    own = [other for owner, other in free_nbytes if owner == rank]
    return int(device == "cpu" and first_device(own) != "cpu")


@dataclass(frozen=True)
class ModulePart:
    """One module that is never split: its name and the bytes it needs (weights and KV cache).

    `unread_nbytes` of them are not read when a token passes: a table in which rows are looked up,
    or experts; another token leaves `unread_share` of these unread, too. `kept_nbytes` of them are
    for the cache. `unpacked_nbytes` are needed beside them while it runs, for the largest weight
    that it keeps packed. `num_calls`: of functions of torch, in a pass.
    `weights_a_byte`: 0 if it is not known; more than the dtype says where weights are packed.
    """

    name: str
    nbytes: int
    unread_nbytes: int = 0
    kept_nbytes: int = 0
    unpacked_nbytes: int = 0
    num_calls: int = 0
    unread_share: float = 1
    weights_a_byte: float = 0

    @property
    def read_nbytes(self) -> int:
        """The bytes that a token's pass through the model has to read."""
        return self.nbytes - self.unread_nbytes


@dataclass(frozen=True)
class ModelProfile:
    """A model as the planner sees it: sizes and constraints.

    layers: in the order they run. others: embeddings, norms and heads.
    ties: groups of parts with a weight in common, which must be on one place; the weight is counted
        once, with the part that loads it.
    kv_sharing: groups of layers that pass each other keys and values; they stay on one place.
    workspace_nbytes: needed on every place beside weights and cache, to run a layer.
    root_tensors: those of `others` that the model reads by itself, as it does with those that are
        tensors and not modules. It reads them where its inputs are, so they must be there too.
    """

    layers: tuple[ModulePart, ...]
    others: tuple[ModulePart, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    kv_sharing: tuple[tuple[str, ...], ...] = ()
    root_tensors: tuple[str, ...] = ()
    workspace_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.layers, *self.others))


@dataclass(frozen=True)
class DeviceMap:
    """The place of each module, in the order the modules run; prints as a picture.

    free_nbytes: the memory of every place that the plan may use, places without modules too.
    kept_nbytes: of the bytes of a module, those for its cache.
    read_nbytes_a_second: of places, if the plan weighed how fast each of them reads weights.
    """

    places: dict[str, Place]
    nbytes: dict[str, int]
    free_nbytes: dict[Place, int]
    kept_nbytes: dict[str, int] = field(default_factory=dict)
    read_nbytes_a_second: dict[Place, int] = field(default_factory=dict)

    @classmethod
    def of_parts(
        cls,
        parts: Sequence[ModulePart],
        places: Mapping[str, Place],
        free_nbytes: Mapping[Place, int],
    ) -> DeviceMap:
        """The map of parts, in their order, to the places that they are given."""
        nbytes = {part.name: part.nbytes for part in parts}
        kept = {part.name: part.kept_nbytes for part in parts}
        return cls({name: places[name] for name in nbytes}, nbytes, dict(free_nbytes), kept)

    def of(self, rank: int) -> dict[str, str]:
        """The modules of one rank, and the device of each."""
        return {name: device for name, (owner, device) in self.places.items() if owner == rank}

    def device_of(self, rank: int) -> str:
        """The device for a rank's inputs and its offloaded modules."""
        return first_device(self.of(rank).values())

    def runs_on(self, rank: int) -> dict[str, str]:
        """The modules of one rank, and the device on which each runs."""
        main = self.device_of(rank)
        return {
            name: main if device in KINDS_OF_DEVICE else device
            for name, device in self.of(rank).items()
        }

    def holds(self, rank: int) -> str:
        """The modules of a rank as text."""
        return abbreviate_names(self.of(rank)) or "no module"

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for rank, _ in self.places.values()})

    def used_places(self) -> set[Place]:
        """The places of modules, and those that run the offloaded ones."""
        running = {(rank, device) for rank in self.ranks for device in self.runs_on(rank).values()}
        return {*self.places.values()} | running

    def used(self, place: Place) -> int:
        """The bytes of a place: those of its modules, and the caches of what runs there."""
        own = [name for name, where in self.places.items() if where == place]
        weights = sum(self.nbytes[name] - self.kept_nbytes.get(name, 0) for name in own)
        return weights + self.used_by_caches(place)

    def used_by_caches(self, place: Place) -> int:
        """The bytes of the caches of the modules that run there, offloaded ones too."""
        running = self.runs_on(place[0]).items()
        return sum(self.kept_nbytes.get(name, 0) for name, device in running if device == place[1])

    def needed(self, place: Place, workspace_nbytes: int = 0) -> int:
        """The bytes of a place with those of the two largest layers that come there to run, and of
        the workspace if it runs any."""
        running = [name for name, d in self.runs_on(place[0]).items() if d == place[1]]
        moved = sorted(
            self.nbytes[name] - self.kept_nbytes.get(name, 0)
            for name in running
            if self.places[name] != place
        )
        return self.used(place) + sum(moved[-2:]) + workspace_nbytes * bool(running)

    def free_for_tokens(self, place: Place) -> tuple[int, int]:
        """The bytes of a place that were planned for caches, and those beyond what it needs."""
        return self.used_by_caches(place), self.free_nbytes.get(place, 0) - self.needed(place)

    def picture(self, width: int = 24) -> str:
        """One line per place: a bar of its memory, the bytes, and what it holds."""
        places = sort_places({**dict.fromkeys(self.places.values(), 0), **self.free_nbytes})
        return "\n".join(self._line(place, width) for place in places)

    def _line(self, place: Place, width: int) -> str:
        used, free_nbytes = self.used(place), self.free_nbytes.get(place, 0)
        filled = min(width, -(-used * width // free_nbytes)) if free_nbytes else 0
        bar = "█" * filled + "░" * (width - filled)
        names = abbreviate_names([name for name, where in self.places.items() if where == place])
        sizes = f"{format_nbytes(used):>10} of {format_nbytes(free_nbytes):<10}"
        if speed := self.read_nbytes_a_second.get(place):
            sizes += f" at {format_nbytes(speed):>10}/s "
        return f"rank {place[0]} {place[1]:<7} {bar} {sizes} {names or '(nothing)'}"

    def __str__(self) -> str:
        return self.picture()

    def to_json(self) -> str:
        """The map as text, to be compared between ranks, or sent."""
        places = [[name, *place, self.nbytes[name]] for name, place in self.places.items()]
        return json.dumps([places, [[*p, nbytes] for p, nbytes in self.free_nbytes.items()]])


def format_nbytes(nbytes: int) -> str:
    """12.3 MiB for 12897484."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def abbreviate_names(names: Iterable[str]) -> str:
    """model.layers.0-3 for four neighbours; other names as they are."""
    runs: list[tuple[str, list[int]]] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        if number.isdigit():
            if runs and runs[-1][0] == stem and runs[-1][1] and runs[-1][1][-1] + 1 == int(number):
                runs[-1][1].append(int(number))
            else:
                runs.append((stem, [int(number)]))
        else:
            runs.append((name, []))
    return ", ".join(
        stem + (f".{numbers[0]}" if numbers else "") + (f"-{numbers[-1]}" if numbers[1:] else "")
        for stem, numbers in runs
    )
