"""Memory that processes here can still take: the kernel's estimate, or what cgroups leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launcher.system import linux

# cgroups(7), version 2 and version 1
LIMIT_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def free_memory_nbytes() -> int:
    """Bytes that the kernel estimates to be available, or those that a cgroup leaves if fewer."""
    machine = 1024 * linux.number_after("MemAvailable:", linux.read_proc("meminfo"))
    return min([machine, *free_in_cgroups(Path("/sys/fs/cgroup"), linux.read_proc("self/cgroup"))])


def free_in_cgroups(root: Path, own: str) -> Iterator[int]:
    """The bytes that each cgroup above a process still allows; own: its /proc/self/cgroup.

    Page cache counts as used for a cgroup, but the kernel reclaims it before it refuses.
    """
    for folder in cgroup_folders(root, own):
        for limit_name, used_name in LIMIT_FILES:
            limit, used = linux.read(folder / limit_name), linux.read(folder / used_name)
            if limit.strip().isdigit() and used:
                cached = linux.number_after("inactive_file", linux.read(folder / "memory.stat"))
                yield max(0, int(limit) - int(used) + cached)


def cgroup_folders(root: Path, own: str) -> list[Path]:
    """The folders, in root, of the memory groups of a process; own: its /proc/self/cgroup.

    In a container, the group that the lines name may be mounted as the root itself.
    """
    folders = {root: None, root / "memory": None}
    for line in own.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            top = root if number == "0" else root / "memory"
            folder = top / path.lstrip("/")
            folders.update(dict.fromkeys([folder, *folder.parents]))
    return [folder for folder in folders if folder.is_relative_to(root)]
