"""The plan of a device map: arithmetic over module sizes and free memory, without torch.

layers = (ModulePart("layers.0", 12), ModulePart("layers.1", 12))
model = ModelProfile(layers, others=(ModulePart("head", 6),))
print(plan(model, {(0, "cpu"): 20, (1, "cpu"): 20}))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from drumline.core.device_map import (
    DeviceMap,
    ModelProfile,
    ModulePart,
    Place,
    abbreviate_names,
    format_nbytes,
    offload_level,
    sort_places,
)
from drumline.errors import PlanError, short_traceback
from drumline.planner.cost_model import (
    DeviceSpeeds,
    PartitionSearch,
    PassShape,
    equalize_similar_devices,
    estimate,
    part_time_s,
    uniform_speeds,
)
from drumline.planner.user_map import complete_user_map

BISECTIONS = 50
"""Enough to tell a kilobyte of a petabyte."""

UNEVEN = 0.4
"""The part by which a place must be slower than the best for "auto" to weigh it: what machines do
beside moves short measurements by less, and equal machines get equal parts."""

FULL, SLACK = 0.9, 1.02
"""The part of a fast place that "auto" fills where slow ones are spared, and how much longer than
the shortest a token may then take for places to be filled less."""

FILL_BISECTIONS = 8

CACHE_SHARES = tuple(n / 16 for n in range(17))
"""Parts of what caches of offloaded layers may need where these run, tried in turn."""

KINDS = ("auto", "balanced", "sequential", "fastest")
"""Plans by name, which a device_map may say."""


@short_traceback
def plan(
    model: ModelProfile,
    free_nbytes: Mapping[Place, int],
    device_map: str | Mapping[str, Place | int | str] = "auto",
    *,
    speeds: DeviceSpeeds | None = None,
    step: PassShape | None = None,
) -> DeviceMap:
    """The device map of `model` over `free_nbytes`, by place, in the order of its keys.

    "auto" and "balanced" fill every place to the same fraction of its memory; but "auto", where
    `speeds` says that some are slower by UNEVEN, lets a token take the shortest time for which no
    place is filled beyond FULL, or beyond that fraction. Places of one speed and kind work on
    different parts of a `step` with a batch at once, so there it gives them equal work in the same
    way. "sequential" fills one after the other; "fastest" gives the most tokens a second at these
    `speeds`, for passes such as `step`, and may leave slow places empty; a mapping of module names
    (or prefixes) to a place or rank is checked and completed. Layers stay contiguous; the parts
    around them go to the first place, where generate() runs, if they fit (a head elsewhere sends a
    vocabulary back per token), otherwise to the last one.

    The CPU of a rank that has an accelerator, and "disk", are used only if the model does not fit
    without; then memory for two layers is kept free where they run, one at work, one on its way,
    and for the caches of all of them.

    Raises PlanError, which says how many bytes are missing and where.
    """
    if isinstance(device_map, Mapping):
        return complete_user_map(model, dict(free_nbytes), device_map)
    if not isinstance(device_map, str):
        raise PlanError(
            f"device_map={device_map!r:.99} is neither the name of a plan nor a dict, so no layer "
            'has a place; write {"": 0} for all on rank 0, or a dict of module name to place.'
        )
    if device_map not in KINDS:
        raise PlanError(
            f"device_map={device_map!r} is not a plan, so no layer has a place; give one of "
            f"{', '.join(KINDS)}, or a dict of module name to (rank, device)."
        )
    if not free_nbytes:
        raise PlanError("no place has free memory, so no layer can be placed; give max_memory.")
    levels = {place: offload_level(place, free_nbytes) for place in free_nbytes}
    step, is_fastest = step or PassShape(), device_map == "fastest"
    has_caches = any(part.kept_nbytes for part in model.layers)
    for deepest in sorted(set(levels.values()))[-1 if is_fastest else 0 :]:
        for share in CACHE_SHARES if deepest and has_caches else CACHE_SHARES[:1]:
            planner = _Planner(model, free_nbytes, levels, deepest, share)
            make: Callable[[], DeviceMap | None] = partial(planner.plan, device_map, speeds, step)
            if is_fastest:
                make = partial(planner.fastest, speeds or DeviceSpeeds({}), step)
            chosen = make()
            if chosen is not None and planner.fits(chosen):
                return chosen
            if share == 0:
                plain = planner  # without memory for caches alone, which would be missing as well
    raise plain.impossible()


class _Planner:
    """Search for the lowest equal fill of all places at which every group of layers fits.

    Only places up to the level `deepest` are used; those that are nearer are filled up first.
    """

    def __init__(
        self,
        model: ModelProfile,
        free_nbytes: Mapping[Place, int],
        levels: Mapping[Place, int],
        deepest: int,
        cache_share: float,
    ):
        """cache_share: of the memory that caches of offloaded layers may need where they run."""
        used = {place: nbytes for place, nbytes in free_nbytes.items() if levels[place] <= deepest}
        self.model, self.free_nbytes, self.levels = model, dict(free_nbytes), levels
        self.order = list(sort_places(used) if deepest else used)
        self.deepest = deepest
        self.near = [place for place in self.order if levels[place] == 0] or self.order
        self.groups = _contiguous_groups(model)
        self.pinned: dict[str, Place] = {}
        self.cache_share = cache_share

    def plan(self, kind: str, speeds: DeviceSpeeds | None, step: PassShape) -> DeviceMap | None:
        """None if the model does not fit."""
        placed = self._fill_somehow()
        if placed is None:
            return None
        if kind == "sequential":
            return self._map(placed)
        fraction, placed = self._lowest_fill(placed)
        if kind != "auto":
            return self._map(placed)
        if uneven := self._uneven(speeds):
            read_nbytes = {place: int(speed.nbytes) for place, speed in uneven.places.items()}
            weighed_map = self._weighed(fraction, uneven, step)
            return replace(weighed_map, read_nbytes_a_second=read_nbytes)
        if step.batch > 1 and self._are_similar(speeds):
            even = uniform_speeds(self.order, nbytes=math.inf, flops=1.0)
            return self._weighed(fraction, even, replace(step, streams=len(self.order)))
        return self._map(placed)

    def _are_similar(self, speeds: DeviceSpeeds | None) -> bool:
        """True for places of one kind; accelerators that were not measured must be of one size."""
        kinds = {device.partition(":")[0] for _, device in self.order}
        free = [self.free_nbytes[place] for place in self.order]
        is_known = kinds == {"cpu"} or speeds is not None
        has_same_memory = min(free) >= (1 - UNEVEN) * max(free)
        return not self.deepest and len(kinds) == 1 and (is_known or has_same_memory)

    def _uneven(self, speeds: DeviceSpeeds | None) -> DeviceSpeeds | None:
        """The speeds of all places, without those of links, if these are not much the same."""
        places = {place: speeds.places.get(place) for place in self.order} if speeds else {}
        measured = {place: speed for place, speed in places.items() if speed is not None}
        evened = equalize_similar_devices(measured, UNEVEN)
        is_even = len(measured) < len(self.order) or len({*evened.values()}) == 1
        return None if is_even or self.deepest else DeviceSpeeds(evened)

    def _weighed(self, lowest: float, speeds: DeviceSpeeds, step: PassShape) -> DeviceMap:
        """The map with the most tokens a second, the least filled of those that are nearly as good.

        lowest: the fraction of all places that the model fills at least.
        """

        def at(fraction: float) -> tuple[float, DeviceMap]:
            placed = self._quickest(speeds, step, fraction)
            assert placed is not None, "it fits at the lowest fraction, and at any above"
            device_map = self._map(placed)
            estimated = estimate(self.model, device_map, speeds, step)
            return step.batch / estimated.tokens_a_second, device_map

        low, high = lowest, max(lowest, FULL)
        shortest_s, device_map = at(high)
        for _ in range(FILL_BISECTIONS):
            middle = (low + high) / 2
            batch_s, attempt = at(middle)
            if batch_s <= SLACK * shortest_s:
                high, device_map = middle, attempt
            else:
                low = middle
        return device_map

    def fastest(self, speeds: DeviceSpeeds, step: PassShape) -> DeviceMap | None:
        """None if the model does not fit."""
        if self._fill_somehow() is None:
            return None
        unknown = [place for place in self.order if place not in speeds.places]
        if unknown:
            raise PlanError(
                f'device_map="fastest", and nothing is known of the speed of {unknown}; give '
                "speeds for every place, as measure_speeds(coor, ...) finds them."
            )
        placed = self._quickest(speeds, step, 1.0)
        return None if placed is None else self._map(placed)

    def _quickest(
        self, speeds: DeviceSpeeds, step: PassShape, fraction: float
    ) -> list[Place] | None:
        """The place of each group for the most tokens a second, places filled to `fraction`."""
        spend = [speeds.places[place] for place in self.order]
        fixed = [0.0] * len(self.order)
        for part in self.model.others:
            number = self.order.index(self.pinned[part.name])
            fixed[number] += part_time_s(part, spend[number], step)
        ends = PartitionSearch(
            self.order,
            [[sum(part_time_s(p, speed, step) for p in g) for g in self.groups] for speed in spend],
            fixed,
            [sum(part.nbytes for part in group) for group in self.groups],
            [max(0, self._capacity(place, fraction)) for place in self.order],
        ).best(speeds, step)
        if ends is None:
            return None
        starts = [0, *ends[:-1]]
        return [place for n, place in enumerate(self.order) for _ in range(starts[n], ends[n])]

    def _fill_somehow(self) -> list[Place] | None:
        """The place of each group, with the parts around the layers where the layers still fit.

        That is the first place for as many as possible: generate() runs there. The others go behind
        the last layer or, if that is too small too, to any place where they fit.
        """
        first, last = self.near[0], self.near[-1]
        freest = max(self.near, key=lambda place: self.free_nbytes[place] - self._reserves[place])
        others = _other_groups(self.model)
        pins = (
            self._pin(others, [(first, *rest)] * num_first + [(*rest, first)] * len(others))
            for num_first in range(len(others), -1, -1)
            for rest in ((last, freest), *((place, freest) for place in self.near))
        )
        preferred: dict[str, Place] | None = None
        for self.pinned in pins:
            preferred = preferred or self.pinned
            placed = self._fill(1.0)
            if placed is not None:
                return placed
        self.pinned = preferred or {}
        return None

    def _pin(
        self, others: list[list[str]], wishes: Sequence[tuple[Place, ...]]
    ) -> dict[str, Place]:
        """Each group of parts on the first of its preferred places on which it fits."""
        free = {place: self.free_nbytes[place] - self._reserves[place] for place in self.order}
        sizes = {part.name: part.nbytes for part in self.model.others}
        pinned: dict[str, Place] = {}
        for names, places in zip(others, wishes, strict=False):
            need = sum(sizes[name] for name in names)
            is_loose = not set(names).isdisjoint(self.model.root_tensors)
            fitting = [place for place in places if need <= free[place]] or [places[0]]
            place = self.near[0] if is_loose else fitting[0]
            free[place] -= need
            pinned.update(dict.fromkeys(names, place))
        return pinned

    def _capacity(self, place: Place, fraction: float) -> int:
        """The bytes left for layers; less than none where the device that runs them is too full."""
        runs = self._runs.get(place[0], place)
        if self.levels[place] and not self.levels[runs] and self._capacity(runs, 1.0) < 0:
            return -1
        capacity = self._capacity_with_caches(place, fraction)
        return capacity - (self._for_caches(place, capacity) if place == runs else 0)

    def _for_caches(self, place: Place, capacity: int) -> int:
        """The bytes kept for caches of what is offloaded and runs at a place; one layer stays."""
        if not self.cache_share:
            return 0
        weights = [(part.nbytes - part.kept_nbytes, part.kept_nbytes) for part in self.model.layers]
        away = [at for at in self.order if at[0] == place[0] and self.levels[at]]
        num_away = sum(self.free_nbytes[at] for at in away) / max(1, min(weights)[0])
        most = int(min(num_away, len(weights)) * max(kept for _, kept in weights))
        largest = max(part.nbytes for part in self.model.layers)
        return int(self.cache_share * max(0, min(most, capacity - largest)))

    def _capacity_with_caches(self, place: Place, fraction: float) -> int:
        """The bytes left for layers, and for caches of those that are offloaded and run there."""
        pinned = sum(p.nbytes for p in self.model.others if self.pinned[p.name] == place)
        part = fraction if self.levels[place] == self.deepest else 1.0
        return int(self.free_nbytes[place] * part) - pinned - self._reserves[place]

    @cached_property
    def _reserves(self) -> dict[Place, int]:
        """Workspace; where offloaded layers run, also memory for one at work and one on its way."""
        largest = max((part.nbytes for part in self.model.layers), default=0)
        runs = {self._runs.get(place[0]) for place in self.order if self.levels[place]}
        workspace_nbytes = self.model.workspace_nbytes
        kept = {place: workspace_nbytes + 2 * largest * (place in runs) for place in self.near}
        return {place: 0 if self.levels[place] else kept[place] for place in self.order}

    @cached_property
    def _runs(self) -> dict[int, Place]:
        """By rank, the first of its devices, which runs what is offloaded there."""
        return {place[0]: place for place in reversed(self.near)}

    def fits(self, device_map: DeviceMap) -> bool:
        """False where caches, or what comes there to run, have too little room: "fastest" counts
        caches with the weights, and a rank whose accelerator has no layer runs on its CPU."""
        workspace_nbytes, used = self.model.workspace_nbytes, device_map.used_places()
        needed = {place: device_map.needed(place, workspace_nbytes) for place in used}
        return all(
            nbytes <= self.free_nbytes.get(place, nbytes) for place, nbytes in needed.items()
        )

    def _fill(self, fraction: float) -> list[Place] | None:
        """The place of each group if places are filled to `fraction`; None if some do not fit."""
        if any(self._capacity(place, 1.0) < 0 for place in self.pinned.values()):
            return None
        placed: list[Place] = []
        places = iter(self.order)
        place = next(places)
        free = self._capacity(place, fraction)
        room = {rank: self._capacity_with_caches(at, fraction) for rank, at in self._runs.items()}
        for group in self.groups:
            need, running = self._needed(group, place)
            while need > free or running > room.get(place[0], running):
                after = next(places, None)
                if after is None:
                    return None
                place, free = after, self._capacity(after, fraction)
                need, running = self._needed(group, place)
            free -= need
            room[place[0]] = room.get(place[0], running) - running
            placed.append(place)
        return placed

    def _needed(self, group: Sequence[ModulePart], place: Place) -> tuple[int, int]:
        """The bytes of a group at a place, and on the device that runs what is offloaded there."""
        need, kept = sum(part.nbytes for part in group), sum(part.kept_nbytes for part in group)
        if self.levels[place]:
            return need - kept, kept
        return need, need if self._runs.get(place[0]) == place else 0

    def _lowest_fill(self, placed: list[Place]) -> tuple[float, list[Place]]:
        low, high = 0.0, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            attempt = self._fill(middle)
            if attempt is None:
                low = middle
            else:
                high, placed = middle, attempt
        return high, placed

    def _map(self, placed: list[Place]) -> DeviceMap:
        where = dict(self.pinned)
        for group, place in zip(self.groups, placed, strict=True):
            where.update({part.name: place for part in group})
        parts = [*self.model.others, *self.model.layers]
        return DeviceMap.of_parts(parts, where, self.free_nbytes)

    def impossible(self) -> PlanError:
        total, free = self.model.nbytes, sum(self.free_nbytes.values())
        if total > free:
            missing = f"{total - free} bytes ({format_nbytes(total - free)}) are missing in all"
        else:
            missing = f"the sum would do, but {self._shortage()}"
        workspace_nbytes, advice = self.model.workspace_nbytes, "Add a rank, raise max_memory"
        if workspace_nbytes:
            missing += f"; each place needs {workspace_nbytes} bytes more as workspace"
        if workspace_nbytes > max(self.free_nbytes[place] for place in self.near):
            advice = "Raise max_memory, plan for fewer tokens at a time"
        return PlanError(
            f"the model needs {total} bytes ({format_nbytes(total)}) and the places have {free} "
            f"bytes ({_free_text(self.free_nbytes)}): {missing}. {advice}, or "
            "load with a smaller dtype."
        )

    def _shortage(self) -> str:
        """The first module that does not fit, places filled in order, and the missing bytes."""
        free = [self._capacity(place, 1.0) for place in self.order]
        numbers = {self.order.index(place) for place in self.pinned.values()}
        least = min(numbers, key=lambda number: free[number], default=0)
        if numbers and free[least] < 0:
            around = [name for name, place in self.pinned.items() if place == self.order[least]]
            what = abbreviate_names(around)
            return f"{-free[least]} bytes are missing on {_named(self.order[least])} for {what}"
        at = 0
        for group in self.groups:
            needs = [self._needed(group, place)[0] for place in self.order]
            fits = [number for number in range(at, len(free)) if needs[number] <= free[number]]
            if not fits:
                best = max(range(at, len(free)), key=lambda number: free[number])
                name, need = abbreviate_names([part.name for part in group]), needs[best]
                return (
                    f"{name}, which is kept whole, needs {need} bytes and finds "
                    f"{max(0, free[best])} on {_named(self.order[best])}: "
                    f"{need - max(0, free[best])} bytes are missing there"
                )
            at = fits[0]
            free[at] -= needs[at]
        if self.deepest and any(part.kept_nbytes for part in self.model.layers):
            return "memory is missing for the caches of offloaded layers, where those run"
        return "not in this order"


def _named(place: Place) -> str:
    return f"rank {place[0]} {place[1]}"


def _free_text(free_nbytes: Mapping[Place, int]) -> str:
    """The free memory of each place as text; of neighbours with the same, once."""
    runs: list[tuple[list[int], str, int]] = []
    for (rank, device), nbytes in free_nbytes.items():
        if runs and runs[-1][1:] == (device, nbytes) and runs[-1][0][-1] == rank - 1:
            runs[-1][0].append(rank)
        else:
            runs.append(([rank], device, nbytes))
    return ", ".join(
        f"rank {ranks[0]} {device}: {format_nbytes(nbytes)}"
        if len(ranks) == 1
        else f"ranks {ranks[0]}-{ranks[-1]} {device}: {format_nbytes(nbytes)} each"
        for ranks, device, nbytes in runs
    )


def _contiguous_groups(model: ModelProfile) -> list[list[ModulePart]]:
    """The layers in order; those from the first to the last of a tie are one group."""
    index = {part.name: position for position, part in enumerate(model.layers)}
    together = (*model.ties, *model.kv_sharing)
    spans = [sorted(index[name] for name in names if name in index) for names in together]
    groups: list[list[ModulePart]] = []
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


def _other_groups(model: ModelProfile) -> list[list[str]]:
    """The parts around the layers, tied ones together, in the order of the model."""
    groups: list[list[str]] = []
    seen: set[str] = set()
    for part in model.others:
        if part.name in seen:
            continue
        tied = {name for tie in model.ties if part.name in tie for name in tie} | {part.name}
        group = [p.name for p in model.others if p.name in tied and p.name not in seen]
        seen.update(group)
        groups.append(group)
    return groups
