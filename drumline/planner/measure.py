"""What the devices and links of all ranks do in a second, measured in a moment.

speeds = measure_speeds(coor, room, torch.bfloat16)       # the same numbers on every rank
plan(layout, room, "fastest", speeds=speeds, step=PassShape(width=4096, itemsize=2))
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from statistics import median

import torch

from communicator import Communicator, Unsupported
from coordinator import Coordinator
from drumline.core.device_map import Place, first_device
from drumline.planner.cost_model import DeviceSpeed, DeviceSpeeds, GroupSpeed, LinkSpeed

BUDGET_S = 0.05
"""How long each measurement goes on, after one round to warm up."""

WEIGHTS = 32 << 20
"""Bytes of the matrix that is read: more than caches hold, and little beside a model."""

TOKENS = 256
NOISE = 0.15
"""Devices of one make differ by up to this in such short measurements."""

SMALL, LARGE = 64, 1 << 20
"""Bytes of the messages that give latency and bandwidth."""

OfRounds = Callable[[list[float]], float]
"""What a series of times comes to: its min, or median."""

ROUNDS = 8
PAUSE_S = 2e-3
"""Before a message: the one who waits for it has gone to sleep by then, as between tokens."""

OPERATIONS = 16
"""Before a sum: ranks reach it as unevenly as after the many small operations of a layer."""

DISK_BYTES_A_SECOND = 1e9
"""Assumed, not measured: what is read from disk is slower than anything else."""


def measure_speeds(
    coor: Coordinator, room: Iterable[Place], dtype: torch.dtype, backend: str | None = None
) -> DeviceSpeeds:
    """The speed of every place in `room`, and of the links of the ring. Collective.

    The ranks of a node take turns, as they do when they serve one conversation. Takes about a
    quarter of a second for each of them, and 32 MiB of memory for a moment. The numbers are
    exchanged, so that every rank has the same.
    """
    mine = [device for rank, device in room if rank == coor.rank]
    found: dict[str, DeviceSpeed] = {}
    for turn in range(max(json.loads(n) for n in coor.allgather(_number(coor.local_world_size)))):
        if turn == coor.local_rank:
            found = {device: measure_place(device, first_device(mine), dtype) for device in mine}
        coor.barrier()
    told = coor.allgather(json.dumps({d: astuple(speed) for d, speed in found.items()}).encode())
    places = {
        (rank, device): DeviceSpeed(*numbers)
        for rank, data in enumerate(told)
        for device, numbers in json.loads(data).items()
    }
    return DeviceSpeeds(equalize_similar_devices(places), measure_links(coor, backend))


def equalize_similar_devices(places: Mapping[Place, DeviceSpeed]) -> dict[Place, DeviceSpeed]:
    """The same speed for devices of a kind that differ by little: those are alike, and one of them
    was disturbed. A layer is not worth sending away for that."""
    found = {}
    for place, speed in places.items():
        kind = place[1].partition(":")[0]
        like = [other for (_, name), other in places.items() if name.partition(":")[0] == kind]
        numbers = zip(astuple(speed), *map(astuple, like), strict=True)
        found[place] = DeviceSpeed(*(_snapped(mine, max(others)) for mine, *others in numbers))
    return found


def _snapped(mine: float, best: float) -> float:
    return best if mine > (1 - NOISE) * best else mine


def _number(value: int) -> bytes:
    return json.dumps(value).encode()


def measure_place(device: str, main: str, dtype: torch.dtype) -> DeviceSpeed:
    """Of weights that lie on `device` of this rank, whose first device is `main`."""
    if device == "disk":
        return DeviceSpeed(measure_device(main, dtype).flops, DISK_BYTES_A_SECOND)
    if device == "cpu" and main != "cpu":
        weights = torch.ones(WEIGHTS, dtype=torch.uint8)
        copying_s = min(_rounds(lambda: weights.to(main), main))
        return DeviceSpeed(measure_device(main, dtype).flops, WEIGHTS / copying_s)
    return measure_device(device, dtype)


def measure_device(device: str, dtype: torch.dtype, of_rounds: OfRounds = min) -> DeviceSpeed:
    """Of one device of this process: a matrix times a vector for bytes, times many for FLOPs.

    of_rounds: which of the times counts; what disturbs can only make one longer.
    """
    rows = WEIGHTS // (1024 * dtype.itemsize)
    weights = torch.ones(rows, 1024, dtype=dtype, device=device)
    vector = torch.ones(1024, 1, dtype=dtype, device=device)
    tokens = torch.ones(1024, TOKENS, dtype=dtype, device=device)
    reading_s = of_rounds(_rounds(lambda: weights @ vector, device))
    square = weights[:1024]
    multiplying_s = of_rounds(_rounds(lambda: square @ tokens, device))
    return DeviceSpeed(2.0 * square.numel() * TOKENS / multiplying_s, weights.nbytes / reading_s)


@torch.inference_mode()
def _rounds(work: Callable[[], object], device: str) -> list[float]:
    """Seconds of each round."""
    work()
    took: list[float] = []
    deadline = time.perf_counter() + BUDGET_S
    while not took or time.perf_counter() < deadline:
        _wait_for(device)
        start = time.perf_counter()
        work()
        _wait_for(device)
        took.append(time.perf_counter() - start)
    return took


def _wait_for(device: str) -> None:
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(torch.device(device))


def measure_links(coor: Coordinator, backend: str | None = None) -> dict[int, LinkSpeed]:
    """The link from each rank to the next of the ring, over what carries hidden states."""
    if coor.world_size == 1:
        return {}
    with Communicator(coor, backend, device_type="cpu") as comm:
        mine = None
        for rank in range(coor.world_size):
            mine = _pair(comm, rank, (rank + 1) % coor.world_size) or mine
            coor.barrier()
    told = coor.allgather(json.dumps(astuple(mine) if mine else None).encode())
    return {rank: LinkSpeed(*json.loads(data)) for rank, data in enumerate(told)}


def measure_group_speeds(coor: Coordinator, device: str, dtype: torch.dtype) -> list[GroupSpeed]:
    """What ranks of a node do at once, by every number of them that divides all nodes. Collective.

    They share memory and what moves their sums, so that two are not twice as fast as one. The teams
    of a node take turns. device: of this rank. The same answer on every rank: none, where nothing
    could move their sums.
    """
    try:
        return [_as_team(coor, size, device, dtype) for size in _team_sizes(coor.nodes)]
    except Unsupported:
        return []


def _team_sizes(nodes: Sequence[Sequence[int]]) -> list[int]:
    """How many ranks can be a team, as ranks in a row and within one node."""
    in_a_row = all(list(node) == [*range(node[0], node[0] + len(node))] for node in nodes)
    most = min(len(node) for node in nodes) if in_a_row else 1
    return [n for n in range(2, most + 1) if not any(len(node) % n for node in nodes)]


def _as_team(coor: Coordinator, size: int, device: str, dtype: torch.dtype) -> GroupSpeed:
    first = coor.rank - coor.rank % size
    mine: tuple[DeviceSpeed, LinkSpeed] | None = None
    group = coor.split(tuple(range(first, first + size)))
    assert group is not None, "this rank is one of them"
    with group, Communicator(group, device_type=torch.device(device).type) as comm:
        for turn in range(max(map(len, coor.nodes)) // size):
            if turn == coor.local_rank // size:
                group.barrier()
                mine = measure_device(device, dtype, median), _sums(comm, device, dtype)
            coor.barrier()
    assert mine is not None, "every team had its turn"
    told = coor.allgather(json.dumps([astuple(part) for part in mine]).encode())
    found = [json.loads(data) for data in told]
    speeds, sums = zip(*found, strict=True)
    return GroupSpeed(
        size,
        DeviceSpeed(*(min(column) for column in zip(*speeds, strict=True))),
        LinkSpeed(max(latency for latency, _ in sums), min(nbytes for _, nbytes in sums)),
    )


def _sums(comm: Communicator, device: str, dtype: torch.dtype) -> LinkSpeed:
    """Between sums each rank computes, as in a model, so they do not come at the same moment."""
    small, large = [_sum_s(comm, device, dtype, nbytes) for nbytes in (SMALL, LARGE)]
    return LinkSpeed(small, LARGE / max(large - small, 1e-9))


@torch.inference_mode()
def _sum_s(comm: Communicator, device: str, dtype: torch.dtype, nbytes: int) -> float:
    hidden = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
    small = torch.zeros(64, dtype=dtype, device=device)
    took = []
    for _ in range(4 * ROUNDS):
        for _ in range(OPERATIONS):
            small = torch.nn.functional.silu(small) + 1
        _wait_for(device)
        start = time.perf_counter()
        comm.allreduce(hidden)
        _wait_for(device)
        took.append(time.perf_counter() - start)
    return median(took)


def _pair(comm: Communicator, src: int, dst: int) -> LinkSpeed | None:
    """What `src` finds of its link to `dst`, which answers; None on all other ranks."""
    if comm.rank not in (src, dst):
        return None
    slept, small, large = (
        _echo(comm, src, dst, *how) for how in ((SMALL, PAUSE_S), (SMALL, 0), (LARGE, 0))
    )
    if comm.rank != src:
        return None
    return LinkSpeed(
        median(slept) - min(small) / 2, LARGE / max((min(large) - min(small)) / 2, 1e-9)
    )


def _echo(comm: Communicator, src: int, dst: int, nbytes: int, pause_s: float) -> list[float]:
    """Seconds of each round trip, sent after a pause."""
    message = torch.zeros(nbytes, dtype=torch.uint8)
    took = []
    for _ in range(ROUNDS):
        if comm.rank == src:
            time.sleep(pause_s)
        start = time.perf_counter()
        if comm.rank == src:
            comm.send(message, dst)
            comm.recv(message, dst)
        else:
            comm.recv(message, src)
            comm.send(message, src)
        took.append(time.perf_counter() - start)
    return took
