"""CPU sets of ranks on machines with several NUMA nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.local import cpu_affinity

NO_MACHINE = Path("/no/such/machine")


def machine(folder, nodes, threads_per_core):
    """A folder like /sys/devices/system of a machine with these NUMA nodes."""
    for number, cpus in enumerate(nodes):
        node = folder / "node" / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cpu_affinity.format_cpu_list(cpus) + "\n")
    all_cpus = sorted(cpu for cpus in nodes for cpu in cpus)
    half = len(all_cpus) // threads_per_core
    for cpu in all_cpus:
        topology = folder / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        siblings = range(cpu % half, len(all_cpus), half)
        (topology / "thread_siblings_list").write_text(cpu_affinity.format_cpu_list(siblings))
    return folder


def test_ranks_fill_numa_nodes_with_whole_cores(tmp_path):
    nodes = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    cpu_sets = cpu_affinity.assign_cpus(4, range(16), machine(tmp_path, nodes, threads_per_core=2))
    assert [cpu_set.cpus for cpu_set in cpu_sets] == [
        (0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15),
    ]  # fmt: skip
    assert [(cpu_set.numa_node, cpu_set.num_cores) for cpu_set in cpu_sets] == [
        (0, 2),
        (0, 2),
        (1, 2),
        (1, 2),
    ]


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_core_is_in_one_cpu_set(nprocs, count):
    if nprocs > count:
        with pytest.raises(ValueError, match=f"{count} cores"):
            cpu_affinity.assign_cpus(nprocs, range(count), system=NO_MACHINE)
        return
    cpu_sets = cpu_affinity.assign_cpus(nprocs, range(count), system=NO_MACHINE)
    assert sorted(cpu for cpu_set in cpu_sets for cpu in cpu_set.cpus) == list(range(count))
    assert all(cpu_set.num_cores >= 1 for cpu_set in cpu_sets)


@given(st.sets(st.integers(0, 200)))
def test_cpu_lists_are_formatted_as_by_the_kernel(numbers):
    assert cpu_affinity.parse_cpu_list(cpu_affinity.format_cpu_list(numbers)) == sorted(numbers)
