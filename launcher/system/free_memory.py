"""Memory that processes here can still take: the kernel's estimate, or what cgroups leave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launcher.system import linux

CGROUPS = Path("/sys/fs/cgroup")

# cgroups(7), version 2 and version 1; above memory.high processes are slowed down
LIMIT_FILES = (
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
)

# memory.stat: what is given back before memory is refused, and what of it is not, in both versions
RECLAIMED = ("inactive_file", "active_file", "slab_reclaimable")
UNWRITTEN = ("file_dirty", "file_writeback", "dirty", "writeback")

MACHINE = "machine"


def free_memory_nbytes() -> int:
    """Bytes that the kernel estimates to be available, or those that a cgroup leaves if fewer."""
    return min(free_memory_by_limit().values())


def free_memory_by_limit() -> dict[str, int]:
    """The bytes that each limit above this process leaves: of the machine, and of its cgroups.

    The name of a cgroup is the same in all containers of a kernel. Swap counts for nothing, and
    neither do huge pages, which the kernel sets apart.
    """
    machine = 1024 * linux.number_after("MemAvailable:", linux.read_proc("meminfo"))
    return {MACHINE: machine, **free_in_cgroups(CGROUPS, linux.read_proc("self/cgroup"))}


def free_in_cgroups(root: Path, own: str) -> dict[str, int]:
    """The bytes that each cgroup above a process still allows; own: its /proc/self/cgroup."""
    free_nbytes = {}
    for folder in cgroup_folders(root, own):
        if rests := list(_rests(folder)):
            status = folder.stat()
            free_nbytes[f"cgroup {status.st_dev}:{status.st_ino}"] = min(rests)
    return free_nbytes


def _rests(folder: Path) -> Iterator[int]:
    """The bytes that each limit of a cgroup leaves.

    Page cache counts as used for it, but the kernel reclaims it before it refuses, mapped files
    too; except for pages that are locked, which are on no list here, or that must be written first.
    """
    for limit_name, used_name in LIMIT_FILES:
        limit, used = linux.read(folder / limit_name), linux.read(folder / used_name)
        if (limit_nbytes := linux.kernel_number(limit.strip())) and used:
            stat = linux.read(folder / "memory.stat")
            cached = sum(_of_tree(name, stat) for name in RECLAIMED)
            cached -= sum(_of_tree(name, stat) for name in UNWRITTEN)
            yield max(0, limit_nbytes - linux.kernel_number(used.strip()) + max(0, cached))


def _of_tree(name: str, stat: str) -> int:
    """A number of memory.stat with that of cgroups below, which version 1 has beside it."""
    numbers = dict(line.split()[:2] for line in stat.splitlines() if " " in line)
    return linux.kernel_number(numbers.get(f"total_{name}", numbers.get(name, "")))


def cgroup_folders(root: Path, own: str) -> list[Path]:
    """The folders, in root, of the memory groups of a process; own: its /proc/self/cgroup.

    In a container, the group that the lines name may be mounted as the root itself.
    """
    folders = {root: None, root / "memory": None}
    for line in own.splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" or "memory" in controllers.split(","):
            top = root if number == "0" else root / "memory"
            folder = top / path.lstrip("/")
            folders.update(dict.fromkeys([folder, *folder.parents]))
    return [folder for folder in folders if folder.is_relative_to(root)]
