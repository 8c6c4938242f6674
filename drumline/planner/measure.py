"""Measurement of the speed of all devices and links, in about a second.

speeds = measure_speeds(coor, free_nbytes, torch.bfloat16)    # the same numbers on every rank
plan(profile, free_nbytes, "fastest", speeds=speeds, step=PassShape(width=4096, itemsize=2))
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import astuple
from statistics import median
from typing import Any

import torch

from communicator import Communicator, Unsupported
from coordinator import Coordinator
from drumline import timings
from drumline.contact import model_parts
from drumline.core.consistency import run_on_all_ranks
from drumline.core.cpu.products import linear
from drumline.core.device_map import Place, first_device, offload_level
from drumline.core.meta_pass import MetaPass
from drumline.planner.cost_model import (
    DeviceSpeed,
    DeviceSpeeds,
    GroupSpeed,
    LinkSpeed,
    equalize_similar_devices,
)
from launcher import free_memory_by_limit

WEIGHTS = 128 << 20
"""Bytes of the matrix that is read, little beside a model: of 32 MiB, a processor's cache of as
much held enough that memory seemed twice as fast as layers find it."""

TOKENS = 256
SMALL, LARGE = 64, 1 << 20
"""Bytes of the messages that give latency and bandwidth."""

WINDOW_S, NUM_WINDOWS = 0.2, 2
"""Twice the period of the kernel's quotas of CPU time: in less, a container with a third of a core
is as fast as a whole one, and then stands still."""

ROUNDS = 8

OPERATIONS = 16
"""Small operations before an allreduce: ranks arrive as unevenly as after a layer."""

DISK_BYTES_A_SECOND = 1e9
"""Assumed, not measured: what is read from disk is slower than anything else."""


def measure_speeds(
    coor: Coordinator, places: Iterable[Place], dtype: torch.dtype, backend: str | None = None
) -> DeviceSpeeds:
    """The speed of every place in `places`, and of the links of the ring. Collective.

    The ranks of a machine, of all its containers, take turns, as they do when they serve one
    request. Takes about a quarter of a second for each of them, and 128 MiB of memory for a moment.
    The numbers are exchanged, so that every rank has the same.
    """
    devices = [device for rank, device in places if rank == coor.rank]

    def measure() -> dict[str, Sequence[float]]:
        main = first_device(devices)
        return {device: astuple(measure_place(device, main, dtype)) for device in devices}

    speeds_by_rank = coor.allgather_object(_in_turn(coor, range(coor.world_size), measure))
    by_place = {
        (rank, device): DeviceSpeed(*numbers)
        for rank, by_device in enumerate(speeds_by_rank)
        for device, numbers in by_device.items()
    }
    return DeviceSpeeds(equalize_similar_devices(by_place), measure_links(coor, backend))


def measure_machines(
    coor: Coordinator, places: Collection[Place], dtype: torch.dtype
) -> DeviceSpeeds | None:
    """The speed of each place that is not offloaded, measured once for each machine. Collective.

    None where all ranks are on one machine, which are equal, or have other devices than the first
    rank of theirs. Takes a second and 128 MiB of memory, on all machines at once; containers of one
    kernel are machines that take turns, lest they share processors that they will not share later.
    """
    machines = [peer.machine for peer in coor.peers]
    if len({*machines}) == 1:
        return None
    firsts = [machines.index(machine) for machine in machines]
    devices = [first_device(d for owner, d in places if owner == rank) for rank in firsts]

    def measure() -> Sequence[float] | None:
        own = devices[coor.rank]
        return astuple(measure_device(own, dtype, NUM_WINDOWS)) if own else None

    speeds = coor.allgather_object(_in_turn(coor, sorted({*firsts}), measure))
    by_place = {
        place: DeviceSpeed(*speeds[firsts[place[0]]])
        for place in places
        if not offload_level(place, places)
        and place[1].partition(":")[0] == devices[place[0]].partition(":")[0]
    }
    return DeviceSpeeds(by_place)


def _in_turn(
    coor: Coordinator, ranks: Sequence[int], work: Callable[[], Any], first: int | None = None
) -> Any:
    """The result of `work`, which those of these ranks that share a kernel do one after the other,
    whatever containers they are in; None on other ranks. Collective.

    first: of the ranks, the one with which this rank works at the same time; by default itself.
    """
    kernels = [coor.peers[rank].boot_id for rank in ranks]
    turns = {rank: kernels[:n].count(kernels[n]) for n, rank in enumerate(ranks)}
    own_turn = turns.get(coor.rank if first is None else first)
    results = [
        run_on_all_ranks(coor, work if turn == own_turn else lambda: None)
        for turn in range(max(turns.values()) + 1)
    ]
    return None if own_turn is None else results[own_turn]


def best_window(took: list[float]) -> float:
    """The mean of the rounds in that window of WINDOW_S in which they were fastest."""
    means: list[float] = []
    window: list[float] = []
    for seconds in took:
        window.append(seconds)
        if sum(window) >= WINDOW_S:
            means.append(sum(window) / len(window))
            window = []
    return min(means, default=max(took))


def measure_place(device: str, main: str, dtype: torch.dtype) -> DeviceSpeed:
    """The speed for weights on `device` of this rank, whose first device is `main`."""
    if device == "disk":
        return DeviceSpeed(measure_device(main, dtype).flops, DISK_BYTES_A_SECOND)
    if device == "cpu" and main != "cpu":
        weights = torch.ones(_room(), dtype=torch.uint8)
        copying_s = min(_rounds(lambda: weights.to(main), main, timings.TIMINGS.round_s))
        return DeviceSpeed(measure_device(main, dtype).flops, weights.nbytes / copying_s)
    return measure_device(device, dtype)


def measure_device(device: str, dtype: torch.dtype, num_windows: int = 0) -> DeviceSpeed:
    """The speed of one device: a linear layer of one token for bytes, of many for FLOPs; a tiny
    model for calls, on a CPU.

    In bfloat16, a product in another order than a layer's is up to 8 times slower on a CPU.

    num_windows: for how many WINDOW_S each of them is done, of which the best counts. If 0, for a
    moment, and the median of the rounds counts: it is what layers need for as many bytes, in the
    median of tokens; the shortest of five took a seventh less.
    """
    of_rounds = best_window if num_windows else median
    round_s = num_windows * WINDOW_S or timings.TIMINGS.round_s
    calls = _calls_a_second(of_rounds, round_s) if device == "cpu" else math.inf
    room = _room() if device == "cpu" else WEIGHTS
    rows = max(1024, room // (1024 * dtype.itemsize))
    weights = torch.ones(rows, 1024, dtype=dtype, device=device)
    tokens = torch.ones(TOKENS, 1024, dtype=dtype, device=device)
    reading_s = of_rounds(_rounds(lambda: linear(tokens[:1], weights), device, round_s))
    square = weights[:1024]
    multiplying_s = of_rounds(_rounds(lambda: linear(tokens, square), device, round_s))
    flops = 2.0 * square.numel() * TOKENS / multiplying_s
    return DeviceSpeed(flops, weights.nbytes / reading_s, calls=calls)


def _room() -> int:
    """Bytes of a matrix on the CPU: on a host with little memory the kernel would kill the rank."""
    return min(WEIGHTS, min(free_memory_by_limit().values()) // 2)


def _calls_a_second(of_rounds: Callable[[list[float]], float], round_s: float) -> float:
    """The calls of torch by the code of transformers, with tensors that are too small to matter."""
    model, token = model_parts.build_tiny(), torch.ones(1, 1, dtype=torch.long)
    with torch.no_grad(), MetaPass() as counted:
        model(token)
    took_s = of_rounds(_rounds(lambda: model(token), "cpu", round_s))
    return float(counted.num_calls / took_s)


@torch.inference_mode()
def _rounds(work: Callable[[], object], device: str, round_s: float) -> list[float]:
    """Seconds of each round, all of which take round_s."""
    work()
    took: list[float] = []
    deadline = time.perf_counter() + round_s
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
    """The speed from each rank to the next of the ring, over the backend of hidden states."""
    if coor.world_size == 1:
        return {}
    with Communicator(coor, backend, device_type="cpu") as comm:
        own_link = None
        for rank in range(coor.world_size):
            own_link = _measure_link(comm, rank, (rank + 1) % coor.world_size) or own_link
            coor.barrier()
    assert own_link is not None, "every rank had its turn"
    links = coor.allgather_object(astuple(own_link))
    return {rank: LinkSpeed(*link) for rank, link in enumerate(links)}


def measure_group_speeds(coor: Coordinator, device: str, dtype: torch.dtype) -> list[GroupSpeed]:
    """Measure TP groups of every size that divides all nodes. Collective.

    The ranks of a node share its memory bandwidth, so two are not twice as fast as one. The groups
    of a node take turns. device: of this rank. The answer is the same on every rank: without sizes
    of which a group has no backend that can allreduce.
    """
    speeds = [_measure_group(coor, n, device, dtype) for n in _group_sizes(coor.nodes)]
    return [speed for speed in speeds if speed is not None]


def _group_sizes(nodes: Sequence[Sequence[int]]) -> list[int]:
    """The possible sizes of TP groups of consecutive ranks within one node."""
    in_a_row = all(list(node) == [*range(node[0], node[0] + len(node))] for node in nodes)
    most = min(len(node) for node in nodes) if in_a_row else 1
    return [n for n in range(2, most + 1) if not any(len(node) % n for node in nodes)]


def _measure_group(
    coor: Coordinator, size: int, device: str, dtype: torch.dtype
) -> GroupSpeed | None:
    first = coor.rank - coor.rank % size
    group = coor.split(tuple(range(first, first + size)))
    assert group is not None, "this rank is one of them"
    with group:

        def measure() -> list[Sequence[float]] | None:
            with contextlib.suppress(Unsupported), Communicator(group, device=device) as comm:
                group.barrier()
                speed = measure_device(device, dtype)
                small, large = [_allreduce_s(comm, device, dtype, n) for n in (SMALL, LARGE)]
                return [astuple(speed), (small, LARGE / max(large - small, 1e-9))]
            return None

        own_speeds = _in_turn(coor, range(0, coor.world_size, size), measure, first)
    speeds_by_rank = coor.allgather_object(own_speeds)
    if None in speeds_by_rank:
        return None
    speeds, sums = zip(*speeds_by_rank, strict=True)
    slowest, (latencies, rates) = map(min, zip(*speeds, strict=True)), zip(*sums, strict=True)
    return GroupSpeed(size, DeviceSpeed(*slowest), LinkSpeed(max(latencies), min(rates)))


@torch.inference_mode()
def _allreduce_s(comm: Communicator, device: str, dtype: torch.dtype, nbytes: int) -> float:
    """Seconds of an allreduce. Ranks compute in between, as in a model, and so arrive unevenly."""
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


def _measure_link(comm: Communicator, src: int, dst: int) -> LinkSpeed | None:
    """The speed from `src` to `dst`, which echoes; None on all ranks but `src`."""
    if comm.rank not in (src, dst):
        return None
    slept = _round_trips_s(comm, src, dst, SMALL, timings.TIMINGS.message_pause_s)
    small, large = [_round_trips_s(comm, src, dst, nbytes, 0.0) for nbytes in (SMALL, LARGE)]
    if comm.rank != src:
        return None
    awake_s = min(small) / 2  # one way; noise must not make the way from a rank that slept shorter
    latency_s = max(median(slept) - awake_s, awake_s)
    return LinkSpeed(latency_s, LARGE / max(min(large) / 2 - awake_s, 1e-9))


def _round_trips_s(
    comm: Communicator, src: int, dst: int, nbytes: int, pause_s: float
) -> list[float]:
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
