"""How much room every device of every rank has, each device counted once.

room = get_max_memory(coor)     # {(0, "cuda:0"): 84906147840, (0, "cpu"): 33554432000, ...}
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import torch

from inference.plan import Place

CPU_SHARE = 0.9
"""The part of the free memory that weights and cache may take; the rest is for activations."""


def get_max_memory(coor: Any) -> dict[Place, int]:
    """Bytes free on every place of the cluster, accelerators first. Collective.

    The ranks of a node share its CPU memory equally. An accelerator belongs to the rank whose
    local_rank has its number, so that ranks which see the same devices do not count them twice.
    """
    reports = [json.loads(data) for data in coor.allgather(json.dumps(_report(coor)).encode())]
    sharers = [sum(other["node"] == mine["node"] for other in reports) for mine in reports]
    room: dict[Place, int] = {}
    for rank, report in enumerate(reports):
        for device, nbytes in report["accelerators"].items():
            room[(rank, device)] = nbytes
    with_accelerator = {rank for rank, _ in room}
    for rank, report in enumerate(reports):
        if rank not in with_accelerator:
            room[(rank, "cpu")] = int(report["cpu"] * CPU_SHARE) // sharers[rank]
    return dict(sorted(room.items()))


def _report(coor: Any) -> dict[str, Any]:
    return {"node": _node(), "cpu": available_cpu(), "accelerators": _accelerators(coor.local_rank)}


def _node() -> str:
    """The same for the ranks that draw on the same memory: one boot of one host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _accelerators(local_rank: int) -> dict[str, int]:
    if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        return {}
    free, _ = torch.cuda.mem_get_info(local_rank)
    return {f"cuda:{local_rank}": free}


def available_cpu() -> int:
    """Bytes that can still be taken here: the kernel's estimate, or the cgroup's if less."""
    return min([_meminfo_available(), *_cgroup_room()])


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_room(root: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> list[int]:
    """What each cgroup above this process still allows, in version 2 or 1 of cgroups."""
    files = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    room = []
    for folder in _cgroup_folders(root, _own_cgroup() if own is None else own):
        for limit_name, used_name in files:
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None:
                room.append(max(0, limit - used + _reclaimable(folder)))
    return room


def _cgroup_folders(root: Path, own: str) -> list[Path]:
    folder = root / own.lstrip("/")
    return [
        folder,
        *[parent for parent in folder.parents if parent.is_relative_to(root)],
        root / "memory",
    ]


def _own_cgroup() -> str:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), "")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(folder: Path) -> int:
    """Page cache counts as used in a cgroup, but the kernel gives it back before it refuses."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
