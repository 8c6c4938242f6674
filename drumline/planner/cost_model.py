"""The split of a model that gives the most tokens a second: pure arithmetic over measured speeds.

rank_0, rank_1 = DeviceSpeed(5e10, 1e10), DeviceSpeed(5e10, 1e10)
speeds = DeviceSpeeds({(0, "cpu"): rank_0, (1, "cpu"): rank_1}, {0: hop, 1: hop})
print(estimate(layout, plan(layout, free_nbytes, "fastest", speeds=speeds), speeds).tokens_a_second)

A place spends on a part of the model the time to read its weights or to multiply with them, the
longer of the two (the roofline of Williams et al., 2009), to bring them into the order in which a
library multiplies several tokens with them, and to call the functions that the code of the part
calls. A token passes all stages one after the other; with several passes in flight the slowest
stage sets the pace.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import median

from drumline.core.device_map import DeviceMap, ModelProfile, ModulePart, Place

NOISE = 0.15
"""Devices of one make differ by up to this in such short measurements."""


@dataclass(frozen=True)
class DeviceSpeed:
    """Work of one place in a second: floating point operations, bytes of weights read, and of
    weights brought into order for several tokens, and calls of functions of torch by the code of a
    model. The last two are for nothing on an accelerator, which is called ahead."""

    flops: float
    nbytes: float
    ordered_nbytes: float = math.inf
    calls: float = math.inf


@dataclass(frozen=True)
class LinkSpeed:
    """Speed from one rank to the next: latency of an empty message, and bytes a second."""

    latency_s: float
    nbytes: float

    def seconds(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.nbytes


@dataclass(frozen=True)
class DeviceSpeeds:
    """Measured or assumed: each place, and the link from each rank to the next one of the ring."""

    places: Mapping[Place, DeviceSpeed]
    links: Mapping[int, LinkSpeed] = field(default_factory=dict)


def equalize_similar_devices(
    places: Mapping[Place, DeviceSpeed], noise: float = NOISE
) -> dict[Place, DeviceSpeed]:
    """Give devices of one kind that are slower than the best by less than the noise one speed.

    They are equal, and one measurement was disturbed: no reason to send a layer to another rank. It
    is their median, for the best of three was up to a sixth faster than any was afterwards.
    """
    equalized = {}
    for place, speed in places.items():
        kind = place[1].partition(":")[0]
        similar = [other for (_, name), other in places.items() if name.startswith(kind)]
        columns = zip(*map(astuple, similar), strict=True)
        equal = [[n for n in column if n > (1 - noise) * max(column)] for column in columns]
        pairs = zip(astuple(speed), equal, strict=True)
        equalized[place] = DeviceSpeed(*(median(row) if n in row else n for n, row in pairs))
    return equalized


def uniform_speeds(
    places: Iterable[Place],
    *,
    nbytes: float,
    flops: float = math.inf,
    hop_s: float = 0.0,
    link_nbytes: float = math.inf,
) -> DeviceSpeeds:
    """Equal speeds for all places, for a plan of ranks that have not been started."""
    speeds = dict.fromkeys(places, DeviceSpeed(flops, nbytes))
    ranks = sorted({rank for rank, _ in speeds})
    links = dict.fromkeys(ranks, LinkSpeed(hop_s, link_nbytes)) if len(ranks) > 1 else {}
    return DeviceSpeeds(speeds, links)


@dataclass(frozen=True)
class PassShape:
    """One pass through the model: `batch` tokens with hidden states of `width` elements.

    itemsize: bytes of an element of weights and hidden states.
    streams: passes in flight at once, in the calls of several threads.
    ring_passes: times that a pass goes round the ring: 1, unless other parts than layers are on
        other ranks than the first; see the function of this name.
    """

    batch: int = 1
    width: int = 0
    itemsize: int = 4
    streams: int = 1
    ring_passes: int = 1


@dataclass(frozen=True)
class Estimate:
    """The expected speed of a device map, as right as the speeds are. Seconds are for one pass."""

    pass_s: float
    slowest_s: float
    hops_s: float
    tokens_a_second: float


def estimate(
    model: ModelProfile, device_map: DeviceMap, speeds: DeviceSpeeds, step: PassShape | None = None
) -> Estimate:
    """Estimate the speed of a device map: an upper bound, as only weights, calls and hops count."""
    step = step or PassShape()
    stages = stage_times(model, device_map, speeds, step)
    return _estimate(list(stages), list(stages.values()), speeds, step)


def stage_times(
    model: ModelProfile, device_map: DeviceMap, speeds: DeviceSpeeds, step: PassShape
) -> dict[Place, float]:
    """By place, the seconds that one pass spends on the parts there."""
    stages = dict.fromkeys(device_map.places.values(), 0.0)
    for part in (*model.others, *model.layers):
        place = device_map.places[part.name]
        stages[place] += part_time_s(part, speeds.places[place], step)
    return stages


def estimate_prompt(
    model: ModelProfile,
    device_map: DeviceMap,
    speeds: DeviceSpeeds,
    step: PassShape,
    length: int,
    chunks: int = 1,
) -> Estimate:
    """Estimate the pass from prompts to their first tokens, whose slowest stage may be a link.

    step: of a token. length: tokens of each prompt. chunks: the parts of a prompt that follow each
    other over the stages. Attention is left out, which grows with the square of the length.
    """
    prompt = replace(step, batch=step.batch * length)
    parts = tuple(replace(part, num_calls=part.num_calls * chunks) for part in model.layers)
    layers = stage_times(replace(model, others=(), layers=parts), device_map, speeds, prompt)
    around = stage_times(replace(model, layers=()), device_map, speeds, step)  # of the last tokens
    stages = [layers[place] + around[place] for place in layers]
    nbytes = prompt.batch * step.width * step.itemsize
    trips = step.ring_passes if any(rank for rank, _ in layers) else 0
    links = [nbytes / link.nbytes for link in speeds.links.values()] * trips
    delay_s = trips * sum(link.latency_s for link in speeds.links.values())
    work = [*stages, *links]
    slowest_s = max(work)
    whole_s = delay_s + (sum(work) + (chunks - 1) * slowest_s) / chunks
    rate = step.batch / whole_s if whole_s else math.inf
    return Estimate(whole_s, slowest_s, delay_s + sum(links), rate)


@dataclass(frozen=True)
class GroupSpeed:
    """`size` ranks of a node at work on the same layer: the slowest of them, and what it takes to
    add up what each has, a hidden state at a time."""

    size: int
    speed: DeviceSpeed
    sums: LinkSpeed


def estimate_tensor_parallel(
    model: ModelProfile, tp_group: GroupSpeed, speeds: DeviceSpeeds, step: PassShape | None = None
) -> Estimate:
    """Estimate the speed of the model with every layer sharded over a TP group of ranks.

    A layer adds up twice, after attention and after the feed-forward block (Megatron-LM, 2019), and
    the embedding and the head once. Stages of groups follow each other, equal in size.
    """
    step, size = step or PassShape(), tp_group.size
    nbytes = step.batch * step.width * step.itemsize
    parts = (*model.others, *model.layers)
    alone = sum(part_time_s(part, tp_group.speed, step, size) for part in parts)
    work = alone + 2 * (len(model.layers) + 1) * tp_group.sums.seconds(nbytes)
    lasts = range(size - 1, len(speeds.links), size)  # of each group, its last rank
    hops = sum(speeds.links[rank].seconds(nbytes) for rank in lasts) if len(lasts) > 1 else 0.0
    return _paced(work, work / max(1, len(lasts)), hops, step)


def part_time_s(
    part: ModulePart, speed: DeviceSpeed, step: PassShape, num_shards: int = 1
) -> float:
    """Seconds that one pass spends on a part of the model, or on one of its shards.

    Each token of the batch is multiplied with all weights that it reads, and with its own part of
    the cache. Experts are read if any of the tokens goes there.
    """
    read_nbytes = part.nbytes - part.unread_nbytes * part.unread_share ** (step.batch - 1)
    weights_nbytes = part.read_nbytes - part.kept_nbytes
    num_weights = weights_nbytes * max(part.weights_a_byte, 1 / step.itemsize)
    operations = 2 * (step.batch * num_weights + part.kept_nbytes / step.itemsize)
    ordering_s = (1 - 1 / step.batch) * (read_nbytes - part.kept_nbytes) / speed.ordered_nbytes
    work_s = max(read_nbytes / speed.nbytes, operations / speed.flops) + ordering_s
    return work_s / num_shards + part.num_calls / speed.calls


def ring_passes(ranks: Iterable[int]) -> int:
    """The times that a pass goes round the ring if its parts run on these ranks in this order."""
    count = last = 0
    for rank in ranks:
        count += rank > 0 and (last == 0 or rank < last)
        last = rank
    return count


def _estimate(
    places: Sequence[Place], stages: Sequence[float], speeds: DeviceSpeeds, step: PassShape
) -> Estimate:
    hops = _hops(speeds, step) if any(rank for rank, _ in places) else 0.0
    return _paced(sum(stages), max(stages), hops, step)


def _paced(work: float, slowest: float, hops: float, step: PassShape) -> Estimate:
    pace = max((work + hops) / step.streams, slowest)
    return Estimate(work + hops, slowest, hops, step.batch / pace if pace else math.inf)


def _hops(speeds: DeviceSpeeds, step: PassShape) -> float:
    """All trips round the ring, each of which passes every rank."""
    nbytes = step.batch * step.width * step.itemsize
    return step.ring_passes * sum(link.seconds(nbytes) for link in speeds.links.values())


class PartitionSearch:
    """Places groups of layers on places, in order, so that most tokens pass a second.

    times: of each group on each place. fixed: what each place spends on other parts anyway.
    needs, capacity: bytes of each group, and what each place has left for them.
    """

    def __init__(
        self,
        places: Sequence[Place],
        times: Sequence[Sequence[float]],
        fixed: Sequence[float],
        needs: Sequence[int],
        capacity: Sequence[int],
    ):
        self.places, self.fixed, self.capacity = places, fixed, capacity
        self.count = len(needs)
        self.passed = [list(itertools.accumulate(of_place, initial=0.0)) for of_place in times]
        self.filled = list(itertools.accumulate(needs, initial=0))

    def best(self, speeds: DeviceSpeeds, step: PassShape) -> list[int] | None:
        """The group at which each place ends; None if they do not fit."""
        near = sum(not rank for rank, _ in self.places)
        hops = _hops(speeds, step)
        cuts = [*self._candidates(len(self.places), step, hops), *self._candidates(near, step, 0)]
        return max(cuts, key=lambda ends: self._rate(ends, speeds, step), default=None)

    def _rate(self, ends: Sequence[int], speeds: DeviceSpeeds, step: PassShape) -> float:
        cuts = enumerate(zip([0, *ends], ends, strict=False))
        used = {n: cut for n, cut in cuts if cut[1] > cut[0] or self.fixed[n]}
        stages = [self._spent(n, *cut) for n, cut in used.items()]
        return _estimate([self.places[n] for n in used], stages, speeds, step).tokens_a_second

    def _candidates(self, num_places: int, step: PassShape, hops: float) -> Iterator[list[int]]:
        """Cuts over the first places, one of which is best among those that use only these.

        For a limit on the slowest stage, one cut has the shortest pass; as the limit falls the pass
        grows. So the best is on one side or the other of where they cross, found by bisection.
        """
        limits = self._limits(num_places) if step.streams > 1 else [math.inf]
        low, high = 0, len(limits) - 1
        while low <= high:
            middle = (low + high) // 2
            ends = self._shortest(num_places, limits[middle])
            if ends is not None:
                yield ends
            if ends is None or (self._pass_s(ends) + hops) / step.streams > limits[middle]:
                low = middle + 1
            else:
                high = middle - 1

    def _limits(self, num_places: int) -> list[float]:
        """Every time that a stage can take, in order."""
        cuts = [*itertools.combinations_with_replacement(range(self.count + 1), 2)]
        return sorted({self._spent(n, *cut) for n in range(num_places) for cut in cuts})

    def _spent(self, place: int, start: int, end: int) -> float:
        return self.fixed[place] + self.passed[place][end] - self.passed[place][start]

    def _pass_s(self, ends: Sequence[int]) -> float:
        cuts = zip([0, *ends], ends, strict=False)
        return sum(self._spent(n, *cut) for n, cut in enumerate(cuts))

    def _shortest(self, num_places: int, limit: float) -> list[int] | None:
        """The cut with the shortest pass whose stages take no longer than `limit`."""
        best: list[tuple[float, list[int]] | None] = [None] * (self.count + 1)
        best[0] = (0.0, [])
        for place in range(num_places):
            best = [self._extended(best, place, end, limit) for end in range(self.count + 1)]
        done = best[self.count]
        if done is None or any(spent > limit for spent in self.fixed[num_places:]):
            return None
        return [*done[1], *[self.count] * (len(self.places) - num_places)]

    def _extended(
        self, best: Sequence[tuple[float, list[int]] | None], place: int, end: int, limit: float
    ) -> tuple[float, list[int]] | None:
        """The shortest way to have the first `end` groups on the places up to this one."""
        shortest: tuple[float, list[int]] | None = None
        for start in range(end, -1, -1):
            spent = self._spent(place, start, end)
            if spent > limit or self.filled[end] - self.filled[start] > self.capacity[place]:
                break  # with more groups it only grows
            before = best[start]
            if before is not None and (shortest is None or before[0] + spent < shortest[0]):
                shortest = before[0] + spent, [*before[1], end]
        return shortest
