"""CPU sets for ranks: whole cores of one NUMA node, none shared between ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True)
class CpuSet:
    """cpus: the logical processors of a rank. num_cores: the cores that they belong to."""

    cpus: tuple[int, ...]
    num_cores: int
    numa_node: int

    def __str__(self) -> str:
        cpus = format_cpu_list(self.cpus)
        return f"cpus {cpus} of NUMA node {self.numa_node}, {self.num_cores} threads"


def assign_cpus(
    nprocs: int, allowed: Iterable[int] | None = None, system: Path = SYSTEM
) -> list[CpuSet]:
    """A CPU set for each local rank. Raises ValueError if there are more ranks than cores.

    The ranks fill the NUMA nodes in turn, each node's share as large as its share of the cores.
    """
    cores = _cores(set(os.sched_getaffinity(0) if allowed is None else allowed), system)
    if nprocs > len(cores):
        raise ValueError(
            f"{nprocs} ranks cannot be bound to {len(cores)} cores: two would share one and wait "
            f"for each other. Start at most {len(cores)}, or leave --bind away."
        )
    cpu_sets = []
    for rank in range(nprocs):
        share = cores[rank * len(cores) // nprocs : (rank + 1) * len(cores) // nprocs]
        cpus = tuple(sorted(cpu for _, siblings in share for cpu in siblings))
        cpu_sets.append(CpuSet(cpus, len(share), numa_node=share[0][0]))
    return cpu_sets


def _cores(allowed: set[int], system: Path) -> list[tuple[int, tuple[int, ...]]]:
    """(NUMA node, its logical processors) of each core that has an allowed one, node by node."""
    numa_nodes = {
        cpu: int(folder.name[len("node") :])
        for folder in (system / "node").glob("node[0-9]*")
        for cpu in parse_cpu_list((folder / "cpulist").read_text())
    }
    return sorted({(numa_nodes.get(cpu, 0), _siblings(cpu, allowed, system)) for cpu in allowed})


def _siblings(cpu: int, allowed: set[int], system: Path) -> tuple[int, ...]:
    file = system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    try:
        siblings = parse_cpu_list(file.read_text())
    except FileNotFoundError:
        siblings = [cpu]
    return tuple(sorted(allowed.intersection(siblings)))


def parse_cpu_list(text: str) -> list[int]:
    """The numbers of a kernel list such as "0-3,8"."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def format_cpu_list(cpus: Iterable[int]) -> str:
    """The inverse of parse_cpu_list."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
