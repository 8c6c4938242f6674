"""What the devices and links of all ranks do in a second, measured in a moment.

speeds = measure_speeds(coor, room, torch.bfloat16)       # the same numbers on every rank
plan(layout, room, "fastest", speeds=speeds, step=Step(width=4096, itemsize=2))
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple

import torch

from communicator import Communicator
from coordinator import Coordinator
from inference.device_map import Place, first_device
from inference.fastest import Link, Speed, Speeds

BUDGET_S = 0.05
"""How long each measurement goes on, after one round to warm up."""

WEIGHTS = 32 << 20
"""Bytes of the matrix that is read: more than caches hold, and little beside a model."""

TOKENS = 256
SMALL, LARGE = 64, 1 << 20
"""Bytes of the messages that give latency and bandwidth."""

ROUNDS = 8
DISK_BYTES_A_SECOND = 1e9
"""Assumed, not measured: what is read from disk is slower than anything else."""


def measure_speeds(
    coor: Coordinator, room: Iterable[Place], dtype: torch.dtype, backend: str | None = None
) -> Speeds:
    """The speed of every place in `room`, and of the links of the ring. Collective.

    The ranks of a node take turns, as they do when they serve one conversation. Takes about a
    quarter of a second for each of them, and 32 MiB of memory for a moment. The numbers are
    exchanged, so that every rank has the same.
    """
    mine = [device for rank, device in room if rank == coor.rank]
    found: dict[str, Speed] = {}
    for turn in range(max(json.loads(n) for n in coor.allgather(_number(coor.local_world_size)))):
        if turn == coor.local_rank:
            found = {device: place_speed(device, first_device(mine), dtype) for device in mine}
        coor.barrier()
    told = coor.allgather(json.dumps({d: astuple(speed) for d, speed in found.items()}).encode())
    places = {
        (rank, device): Speed(*numbers)
        for rank, data in enumerate(told)
        for device, numbers in json.loads(data).items()
    }
    return Speeds(places, links(coor, backend))


def _number(value: int) -> bytes:
    return json.dumps(value).encode()


def place_speed(device: str, main: str, dtype: torch.dtype) -> Speed:
    """Of weights that lie on `device` of this rank, whose first device is `main`."""
    if device == "disk":
        return Speed(device_speed(main, dtype).flops, DISK_BYTES_A_SECOND)
    if device == "cpu" and main != "cpu":
        weights = torch.ones(WEIGHTS, dtype=torch.uint8)
        copying_s = _fastest_round(lambda: weights.to(main), main)
        return Speed(device_speed(main, dtype).flops, WEIGHTS / copying_s)
    return device_speed(device, dtype)


def device_speed(device: str, dtype: torch.dtype) -> Speed:
    """Of one device of this process: a matrix times a vector for bytes, times many for FLOPs."""
    rows = WEIGHTS // (1024 * dtype.itemsize)
    weights = torch.ones(rows, 1024, dtype=dtype, device=device)
    vector = torch.ones(1024, 1, dtype=dtype, device=device)
    tokens = torch.ones(1024, TOKENS, dtype=dtype, device=device)
    reading_s = _fastest_round(lambda: weights @ vector, device)
    square = weights[:1024]
    multiplying_s = _fastest_round(lambda: square @ tokens, device)
    return Speed(2.0 * square.numel() * TOKENS / multiplying_s, weights.nbytes / reading_s)


@torch.inference_mode()
def _fastest_round(work: Callable[[], object], device: str) -> float:
    """Seconds of the quickest round: what disturbs can only make it longer."""
    work()
    best, deadline = float("inf"), time.perf_counter() + BUDGET_S
    while time.perf_counter() < deadline:
        _wait_for(device)
        start = time.perf_counter()
        work()
        _wait_for(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait_for(device: str) -> None:
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(torch.device(device))


def links(coor: Coordinator, backend: str | None = None) -> dict[int, Link]:
    """The link from each rank to the next of the ring, over what carries hidden states."""
    if coor.world_size == 1:
        return {}
    with Communicator(coor, backend, device_type="cpu") as comm:
        mine = None
        for rank in range(coor.world_size):
            mine = _pair(comm, rank, (rank + 1) % coor.world_size) or mine
            coor.barrier()
    told = coor.allgather(json.dumps(astuple(mine) if mine else None).encode())
    return {rank: Link(*json.loads(data)) for rank, data in enumerate(told)}


def _pair(comm: Communicator, src: int, dst: int) -> Link | None:
    """What `src` finds of its link to `dst`, which answers; None on all other ranks."""
    if comm.rank not in (src, dst):
        return None
    small, large = [_echo(comm, src, dst, nbytes) for nbytes in (SMALL, LARGE)]
    return Link(small, LARGE / max(large - small, 1e-9)) if comm.rank == src else None


def _echo(comm: Communicator, src: int, dst: int, nbytes: int) -> float:
    """Seconds of one way: half of the quickest round trip."""
    message = torch.zeros(nbytes, dtype=torch.uint8)
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        if comm.rank == src:
            comm.send(message, dst)
            comm.recv(message, dst)
        else:
            comm.recv(message, src)
            comm.send(message, src)
        best = min(best, time.perf_counter() - start)
    return best / 2
