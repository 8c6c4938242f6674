"""Free memory of every device of every rank, each device counted once.

free_nbytes = cluster_memory(coor)     # {(0, "cuda:0"): 84906147840, (0, "cpu"): 33554432000, ...}
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from drumline.core.consistency import run_and_share, run_on_all_ranks
from drumline.core.device_map import KINDS_OF_DEVICE, Place, place_of, sort_places
from drumline.errors import PlanError
from drumline.planner.sizes import nbytes
from launcher import free_memory_by_limit

Memory = Mapping[Any, Any] | Sequence[Any]
"""Sizes by place, by rank, by device of the master, or as a list by rank."""

CPU_RESERVE_NBYTES = 96 << 20
"""Memory of a rank's process beside weights, cache and activations: buffers of messages, threads,
code that is loaded late."""

ACCELERATOR_RESERVE_NBYTES = 768 << 20
"""Memory of a GPU that a rank's process takes beside them: CUDA's context with the code of kernels,
and cuBLAS's workspace; 721 MiB on an H200."""


def cluster_memory(coor: Any) -> dict[Place, int]:
    """Bytes free on every place of the cluster, accelerators before the CPU. Collective.

    Ranks share the CPU memory of their machine equally, and what their cgroup leaves of it; see
    `share`. An accelerator belongs to one of the ranks that see it, so that it is counted once
    however many see it, see `assign_accelerators`.
    """
    _, reports = run_and_share(coor, lambda: _report(coor), lambda report: report)
    cpus = share([report["limits"] for report in reports])
    owned = assign_accelerators(reports)
    free_nbytes: dict[Place, int] = {}
    for rank, report in enumerate(reports):
        for device in owned[rank]:
            free = report["accelerators"][device]["free"]
            free_nbytes[(rank, device)] = max(0, free - ACCELERATOR_RESERVE_NBYTES)
        free_nbytes[(rank, "cpu")] = max(0, cpus[rank] - CPU_RESERVE_NBYTES)
    return sort_places(free_nbytes)


def allowed_memory(coor: Any, max_memory: Memory | None) -> dict[Place, int]:
    """The memory of the cluster that the user allows, by place. Collective.

    Raises PlanError on every rank for a device that its rank does not see. Several ranks may use
    one that they all see, though it is counted for one of them.
    """
    measured = cluster_memory(coor)

    def check() -> dict[Place, int]:
        allowed = limit_memory(measured, max_memory)
        devices = [str(device) for device in local_accelerators()]
        kinds = {device.partition(":")[0] for device in devices}  # "cuda" is the current one
        for rank, device in sorted(allowed.keys() - measured.keys()):
            if rank == coor.rank and device not in {*devices, *kinds, *KINDS_OF_DEVICE}:
                raise PlanError(
                    f"rank {rank}: max_memory names {device!r}, and this rank has "
                    f"{', '.join([*devices, *KINDS_OF_DEVICE])}; name one of these."
                )
        return allowed

    return run_on_all_ranks(coor, check)


def share(limits: Sequence[Mapping[str, int]]) -> list[int]:
    """By rank, the bytes that it may take at the same time as all others.

    limits: by rank, what each limit above it leaves, by name; the same name is the same memory.
    All get as much as the tightest limit allows, then those that are not under it more, and so on.
    """
    rest: dict[str, int] = {}
    for own in limits:
        for name, left in own.items():
            rest[name] = min(left, rest.get(name, left))
    shares = [0] * len(limits)
    growing = {rank for rank, own in enumerate(limits) if own}
    while growing:
        ranks = {name: [r for r in growing if name in limits[r]] for name in rest}
        step, tightest = min((rest[name] // len(r), name) for name, r in ranks.items() if r)
        for rank in growing:
            shares[rank] += step
        for name, under in ranks.items():
            rest[name] -= step * len(under)
        growing -= set(ranks[tightest])
    return shares


def assign_accelerators(reports: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """By rank, the accelerators that it owns, by its own names for them.

    A rank first gets the one with its local_rank; the rest go to the rank that sees them and has
    the fewest. An accelerator that two ranks see is one if it has the same id on the same node.
    """
    seen: dict[Any, dict[int, str]] = {}
    for rank, report in enumerate(reports):
        for device, gpu in report["accelerators"].items():
            seen.setdefault((report["node"], gpu["id"]), {})[rank] = device
    owned: list[list[str]] = [[] for _ in reports]
    own_first = [dict(enumerate(r["accelerators"])).get(r["local_rank"]) for r in reports]
    for first in (True, False):
        for unit, names in list(seen.items()):
            ranks = [r for r, name in names.items() if not first or own_first[r] == name]
            if ranks:
                rank = min(ranks, key=lambda r: (len(owned[r]), r))
                owned[rank].append(names[rank])
                del seen[unit]
    return owned


def limit_memory(free_nbytes: Mapping[Place, int], max_memory: Memory | None) -> dict[Place, int]:
    """The memory that the user allows, by place; places that are not named get nothing."""
    if max_memory is None:
        return dict(free_nbytes)
    if isinstance(max_memory, str) or not isinstance(max_memory, (Mapping, Sequence)):
        raise PlanError(f"max_memory={max_memory!r} names no place; give a dict or a list by rank.")
    pairs = max_memory.items() if isinstance(max_memory, Mapping) else enumerate(max_memory)
    limits: dict[Place, int] = {}
    for key, value in pairs:
        place = place_of(key, free_nbytes, "max_memory")
        if place in limits:
            raise PlanError(
                f"max_memory names {place} twice, the second time as {key!r:.99}, so it is unknown "
                "which size is meant; leave one of them out."
            )
        limits[place] = nbytes(value)
    ranks = {rank for rank, _ in free_nbytes}
    unknown = sorted({rank for rank, _ in limits} - ranks)
    if unknown:
        raise PlanError(
            f"max_memory names ranks {unknown}, but the ranks are {sorted(ranks)}; leave "
            "them out, or start more ranks."
        )
    return sort_places(limits)


def sizes_of_ranks(
    sizes: list[str] | None, num_ranks: int, option: str = "--memory"
) -> list[str] | None:
    """A size for each rank, of as many as there are ranks, or of one for all."""
    if sizes is None or len(sizes) == num_ranks:
        return sizes
    if len(sizes) == 1:
        return sizes * num_ranks
    raise PlanError(
        f"{option} has {len(sizes)} sizes for {num_ranks} ranks; give one size for each rank, or "
        "one for all."
    )


def _report(coor: Any) -> dict[str, Any]:
    node = coor.peers[coor.rank].boot_id
    return {
        "node": node,
        "local_rank": coor.local_rank,
        "limits": {f"{node} {name}": free for name, free in free_memory_by_limit().items()},
        "accelerators": accelerators(),
    }


def accelerators() -> dict[str, dict[str, Any]]:
    """By name: the free bytes, and an id that every process on the node has for the device."""
    ids = {device: unit_id(device) for device in local_accelerators()}
    return {str(d): {"id": unit, "free": _free(d, unit)} for d, unit in ids.items()}


def local_accelerators() -> list[torch.device]:
    """The devices that this process sees of the one kind that torch was built for: "cuda" for GPUs
    of NVIDIA and AMD, or "xpu", "npu", "mps"."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    return [torch.device(kind.type, n) for n in range(torch.accelerator.device_count())]


def unit_id(device: torch.device) -> str:
    """The device's UUID, or its name where there is none: then all processes must see the same."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return str(getattr(properties(device), "uuid", device) if properties else device)


def _free(device: torch.device, uuid: str) -> int:
    """From NVML if it knows the device: asking CUDA would take memory on it for a context."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
        finally:
            pynvml.nvmlShutdown()
    return int(torch.accelerator.get_memory_info(device)[0])
