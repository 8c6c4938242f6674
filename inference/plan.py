"""Who holds which layer: pure arithmetic over module sizes and room, no torch and no communication.

model = Layout(layers=(Part("layers.0", 12), Part("layers.1", 12)), others=(Part("head", 6),))
print(plan(model, {(0, "cpu"): 20, (1, "cpu"): 20}))
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from inference.errors import PlanError

BISECTIONS = 50
"""Enough to tell a kilobyte of a petabyte."""

Place = tuple[int, str]
"""A device of a rank, such as (1, "cuda:1") or (0, "cpu")."""


@dataclass(frozen=True)
class Part:
    """One module that is never cut: its name and the bytes it needs (weights and cache)."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """A model as the planner sees it.

    `layers` in the order they run; `others` are embeddings, norms and heads. `ties` name parts with
    a weight in common, which must be on one place; it is counted once, with the part that loads it.
    `sharers` name layers that hand each other keys and values, which had better be on one place.
    """

    layers: tuple[Part, ...]
    others: tuple[Part, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    sharers: tuple[tuple[str, ...], ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.layers, *self.others))


@dataclass(frozen=True)
class DeviceMap:
    """Which place holds each module, in the order the modules run; prints as a picture."""

    places: dict[str, Place]
    nbytes: dict[str, int]
    room: dict[Place, int]

    def of(self, rank: int) -> dict[str, str]:
        """The modules of one rank, and the device of each."""
        return {name: device for name, (owner, device) in self.places.items() if owner == rank}

    def device_of(self, rank: int) -> str:
        """The device a rank computes on: the first it holds anything on."""
        return next(iter(self.of(rank).values()), "cpu")

    def holds(self, rank: int) -> str:
        """The modules of a rank in words."""
        return abbreviate(self.of(rank)) or "no module"

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for rank, _ in self.places.values()})

    def used(self, place: Place) -> int:
        return sum(self.nbytes[name] for name, where in self.places.items() if where == place)

    def picture(self, width: int = 24) -> str:
        """One line per place: a bar of its room, the bytes, and what it holds."""
        places = sorted({*self.room, *self.places.values()})
        return "\n".join(self._line(place, width) for place in places)

    def _line(self, place: Place, width: int) -> str:
        used, room = self.used(place), self.room.get(place, 0)
        filled = min(width, -(-used * width // room)) if room else 0
        bar = "█" * filled + "░" * (width - filled)
        names = abbreviate([name for name, where in self.places.items() if where == place])
        sizes = f"{readable(used):>10} of {readable(room):<10}"
        return f"rank {place[0]} {place[1]:<7} {bar} {sizes} {names or '(nothing)'}"

    def __str__(self) -> str:
        return self.picture()

    def to_bytes(self) -> bytes:
        places = [[name, *place, self.nbytes[name]] for name, place in self.places.items()]
        room = [[*place, nbytes] for place, nbytes in self.room.items()]
        return json.dumps([places, room]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> DeviceMap:
        places, room = json.loads(data)
        return cls(
            {name: (rank, device) for name, rank, device, _ in places},
            {name: nbytes for name, _, _, nbytes in places},
            {(rank, device): nbytes for rank, device, nbytes in room},
        )


def plan(
    model: Layout,
    room: Mapping[Place, int],
    device_map: str | Mapping[str, Place | int] = "auto",
) -> DeviceMap:
    """The device map of `model` over `room` (bytes free on each place), in the order given there.

    "auto" and "balanced" fill every place to the same fraction of its room; "sequential" fills one
    after the other; a mapping of module names (or prefixes) to a place or rank is checked and
    completed. Layers stay contiguous; the parts around them go to the first place, where generate()
    runs, if they fit (a head elsewhere sends a vocabulary back per token), else to the last one.

    Raises PlanError, which says how many bytes are missing and where.
    """
    if not isinstance(device_map, str):
        return _explicit(model, dict(room), device_map)
    if device_map not in ("auto", "balanced", "sequential"):
        raise PlanError(
            f"device_map={device_map!r} is not a plan, so no layer has a place; "
            'give "auto", "balanced", "sequential", or a dict of module name to (rank, device).'
        )
    return _Planner(model, dict(room)).plan(sequential=device_map == "sequential")


class _Planner:
    """Finds the lowest equal fill of all places at which every group of layers finds room."""

    def __init__(self, model: Layout, room: dict[Place, int]):
        if not room:
            raise PlanError("no place has any room, so no layer can be placed; give max_memory.")
        self.model, self.room, self.order = model, room, list(room)
        self.groups = _contiguous_groups(model)
        self.pinned = self._pin_others()

    def plan(self, sequential: bool) -> DeviceMap:
        placed = self._fill(1.0)
        if placed is None:
            raise self._impossible()
        if not sequential:
            placed = self._lowest_fill(placed)
        return self._map(placed)

    def _pin_others(self) -> dict[str, Place]:
        """Every part around the layers: on the first place if it fits there, else the last."""
        first, last = self.order[0], self.order[-1]
        free = {place: self.room[place] for place in (first, last)}
        pinned: dict[str, Place] = {}
        for names in _other_groups(self.model):
            need = sum(part.nbytes for part in self.model.others if part.name in names)
            place = first if need <= free[first] else last
            free[place] -= need
            pinned.update(dict.fromkeys(names, place))
        return pinned

    def _capacity(self, place: Place, fraction: float) -> int:
        pinned = sum(p.nbytes for p in self.model.others if self.pinned[p.name] == place)
        return int(self.room[place] * fraction) - pinned

    def _fill(self, fraction: float) -> list[Place] | None:
        """The place of each group if places are filled to `fraction`; None if some do not fit."""
        if any(self._capacity(place, 1.0) < 0 for place in self.order):
            return None
        placed: list[Place] = []
        places = iter(self.order)
        place = next(places)
        free = self._capacity(place, fraction)
        for group in self.groups:
            need = sum(part.nbytes for part in group)
            while need > free:
                after = next(places, None)
                if after is None:
                    return None
                place, free = after, self._capacity(after, fraction)
            free -= need
            placed.append(place)
        return placed

    def _lowest_fill(self, placed: list[Place]) -> list[Place]:
        low, high = 0.0, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            attempt = self._fill(middle)
            if attempt is None:
                low = middle
            else:
                high, placed = middle, attempt
        return placed

    def _map(self, placed: list[Place]) -> DeviceMap:
        where = dict(self.pinned)
        for group, place in zip(self.groups, placed, strict=True):
            where.update({part.name: place for part in group})
        parts = [*self.model.others, *self.model.layers]
        sizes = {part.name: part.nbytes for part in parts}
        return DeviceMap({part.name: where[part.name] for part in parts}, sizes, self.room)

    def _impossible(self) -> PlanError:
        total, room = self.model.nbytes, sum(self.room.values())
        rooms = ", ".join(f"rank {r} {d}: {readable(n)}" for (r, d), n in self.room.items())
        if total > room:
            missing = f"{total - room} bytes ({readable(total - room)}) are missing in all"
        else:
            largest = max((sum(p.nbytes for p in g), g[0].name) for g in self.groups)
            missing = (
                "the sum would do, but whole layers do not fit into what is left of each place "
                f"(the largest, {largest[1]}, needs {largest[0]} bytes)"
            )
        return PlanError(
            f"the model needs {total} bytes ({readable(total)}) and the places have {room} bytes "
            f"({rooms}): {missing}. Add a rank, raise max_memory, or load with a smaller dtype."
        )


def _contiguous_groups(model: Layout) -> list[list[Part]]:
    """The layers in order; those from the first to the last of a tie are one group."""
    index = {part.name: position for position, part in enumerate(model.layers)}
    together = (*model.ties, *model.sharers)
    spans = [sorted(index[name] for name in names if name in index) for names in together]
    groups: list[list[Part]] = []
    reach = -1
    for position, part in enumerate(model.layers):
        if position <= reach:
            groups[-1].append(part)
        else:
            groups.append([part])
        for span in spans:
            if span and span[0] <= position < span[-1]:
                reach = max(reach, span[-1])
    return groups


def _other_groups(model: Layout) -> list[list[str]]:
    """The parts around the layers, tied ones together, in the order of the model."""
    groups: list[list[str]] = []
    seen: set[str] = set()
    for part in model.others:
        if part.name in seen:
            continue
        tied = {name for tie in model.ties if part.name in tie for name in tie} | {part.name}
        group = [
            other.name for other in model.others if other.name in tied and other.name not in seen
        ]
        seen.update(group)
        groups.append(group)
    return groups


def _explicit(
    model: Layout, room: dict[Place, int], device_map: Mapping[str, Place | int]
) -> DeviceMap:
    """The user's own map, prefixes spread over the parts they cover, checked against the room."""
    parts = [*model.others, *model.layers]
    places = {part.name: _lookup(part.name, device_map, room) for part in parts}
    result = DeviceMap(places, {part.name: part.nbytes for part in parts}, room)
    _check_ties(model, places)
    for place in result.room:
        if result.used(place) > room[place]:
            raise PlanError(
                f"rank {place[0]}: device_map puts {result.used(place)} bytes on {place[1]}, which "
                f"has room for {room[place]}: {result.used(place) - room[place]} bytes are "
                "missing. Move modules to another rank or raise max_memory."
            )
    return result


def _lookup(name: str, device_map: Mapping[str, Place | int], room: dict[Place, int]) -> Place:
    prefix = name
    while prefix not in device_map:
        if not prefix:
            raise PlanError(
                f"device_map has no place for {name!r}, so it would not be loaded; add {name!r} or "
                "a prefix of it (the empty name covers everything)."
            )
        prefix = prefix.rpartition(".")[0]
    place = device_map[prefix]
    if isinstance(place, int):
        place = next((known for known in room if known[0] == place), (place, "cpu"))
    place = (int(place[0]), str(place[1]))
    if place not in room:
        raise PlanError(
            f"device_map puts {name!r} on rank {place[0]} {place[1]}, which does not exist or has "
            f"no room; the places are {', '.join(f'{rank} {device}' for rank, device in room)}."
        )
    return place


def _check_ties(model: Layout, places: dict[str, Place]) -> None:
    for tie in model.ties:
        if len({places[name] for name in tie}) > 1:
            spread = ", ".join(
                f"{name} on rank {places[name][0]} {places[name][1]}" for name in tie
            )
            raise PlanError(
                f"device_map separates modules that share tensors ({spread}), so one of them would "
                "be left without its weights; put them on the same place."
            )


def readable(nbytes: int) -> str:
    """12.3 MiB for 12897484."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def abbreviate(names: Iterable[str]) -> str:
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
    return ", ".join(_run(stem, numbers) for stem, numbers in runs)


def _run(stem: str, numbers: Sequence[int]) -> str:
    if not numbers:
        return stem
    return f"{stem}.{numbers[0]}" + (f"-{numbers[-1]}" if len(numbers) > 1 else "")
