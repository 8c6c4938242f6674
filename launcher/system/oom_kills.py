"""Processes that the kernel kills because memory runs out (OOM): of a cgroup, or of the machine."""

from __future__ import annotations

from pathlib import Path

from launcher.system import free_memory, linux

# cgroups(7): where each version counts `oom_kill`, and has the limit in bytes.
COUNTERS = (("memory.events", "memory.max"), ("memory.oom_control", "memory.limit_in_bytes"))
CGROUPS = Path("/sys/fs/cgroup")


class OomKills:
    """The kills since this was made, of this process's cgroups and of the whole machine."""

    def __init__(self, root: Path = CGROUPS, own: str | None = None) -> None:
        own = linux.read_proc("self/cgroup") if own is None else own
        folders = free_memory.cgroup_folders(root, own)
        # The innermost first: those above count what is below them, too.
        folders.sort(key=lambda folder: len(folder.parts), reverse=True)
        self._files = [(f / events, f / limit) for f in folders for events, limit in COUNTERS]
        self._before = {events: _count(events) for events, _ in self._files}
        self._machine_before = _count_of_machine()

    def note(self, rank: int) -> str:
        """A sentence on a rank that SIGKILL has ended; empty if the kernel has killed none."""
        for events, limit in self._files:
            if (count := _count(events) - self._before[events]) > 0:
                return (
                    f"The kernel killed it for want of memory (OOM): {events} counts {count} more "
                    f"oom_kill, and {_limit(limit)}. Give the launch more memory, or rank {rank} "
                    "less to hold."
                )
        if _count_of_machine() > self._machine_before:
            return "The kernel killed processes meanwhile because memory ran out: see `dmesg`."
        return ""


def _count(events: Path) -> int:
    return linux.number_after("oom_kill", linux.read(events))


def _count_of_machine() -> int:
    return linux.number_after("oom_kill", linux.read_proc("vmstat"))


def _limit(file: Path) -> str:
    text = linux.read(file).strip()
    # Version 1 has a number near 2^63 for no limit.
    is_limited = 0 < (nbytes := linux.kernel_number(text)) < 1 << 60
    return f"{file.name} is {nbytes >> 20} MiB" if is_limited else f"{file.name} is not a limit"
