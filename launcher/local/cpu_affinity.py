"""Which cores each rank gets: neighbours of one NUMA node, whole cores, no rank on another's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True)
class Place:
    """cpus: the logical processors of a rank, none for all. num_cores: the cores they belong to."""

    cpus: tuple[int, ...] = ()
    num_cores: int = 0
    node: int = 0

    def __str__(self) -> str:
        return f"cpus {ranges(self.cpus)} of NUMA node {self.node}, {self.num_cores} threads"


def places(nprocs: int, allowed: Iterable[int] | None = None, system: Path = SYSTEM) -> list[Place]:
    """A place for each local rank. Raises ValueError if there are more ranks than cores.

    The ranks fill the NUMA nodes in turn, each node's share as large as its share of the cores.
    """
    cores = _cores(set(os.sched_getaffinity(0) if allowed is None else allowed), system)
    if nprocs > len(cores):
        raise ValueError(
            f"{nprocs} ranks cannot be bound to {len(cores)} cores: two would share one and wait "
            f"for each other. Start at most {len(cores)}, or leave --bind away."
        )
    found = []
    for rank in range(nprocs):
        mine = cores[rank * len(cores) // nprocs : (rank + 1) * len(cores) // nprocs]
        node = mine[0][0]
        cpus = tuple(sorted(cpu for _, siblings in mine for cpu in siblings))
        found.append(Place(cpus, len(mine), node))
    return found


def _cores(allowed: set[int], system: Path) -> list[tuple[int, tuple[int, ...]]]:
    """(NUMA node, its logical processors) of each core that has an allowed one, node by node."""
    nodes = _nodes(system)
    cores = {(nodes.get(cpu, 0), _siblings(cpu, allowed, system)) for cpu in allowed}
    return sorted(cores)


def _nodes(system: Path) -> dict[int, int]:
    found = {}
    for folder in (system / "node").glob("node[0-9]*"):
        for cpu in parse_ranges((folder / "cpulist").read_text()):
            found[cpu] = int(folder.name[len("node") :])
    return found


def _siblings(cpu: int, allowed: set[int], system: Path) -> tuple[int, ...]:
    file = system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
    try:
        together = parse_ranges(file.read_text())
    except FileNotFoundError:
        together = [cpu]
    return tuple(sorted(allowed.intersection(together)))


def parse_ranges(text: str) -> list[int]:
    """The numbers of a kernel list such as "0-3,8"."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.extend(range(int(first), int(last or first) + 1))
    return found


def ranges(numbers: Iterable[int]) -> str:
    """The inverse of parse_ranges."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
