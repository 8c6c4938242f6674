"""Collectives between hosts, beside gloo and MPIs, and what the links of the hosts can carry.

    python -m benchmarks.network
    python -m benchmarks.network --hosts 6 --rates 200mbit --sizes 65536 1048576

Hosts are network namespaces of this machine whose links are held to a rate by tc: what is measured
is how well a call uses a link that is slower than the processor. Links that are as fast as the
machine show what a call takes of the processor. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import traceback
import uuid
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.libraries import Ours, gloo
from benchmarks.mpi import engines_over
from benchmarks.network_mpi import MARK, Cell, World, measure
from benchmarks.table import Table, spread
from communicator import Communicator
from coordinator import Coordinator
from launcher import LaunchInfo
from tests.network_hosts import INTERFACE, NetworkHosts

OPERATIONS = ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast")
SIZES = (8, 64 << 10, 1 << 20, 4 << 20)
UNITS = {"mbit": 1e6, "gbit": 1e9}
UNSHAPED = "unshaped"
UNSHAPED_PER_MS = 1e6  # bytes, about what a core can move
PEERS = ("gloo", "MPICH", "Open MPI")
MPI_S = 40  # for all calls of an MPI on one layout of hosts
NOTE = (
    "float32; the size is a row's where a call takes a row for each rank. Milliseconds until the "
    "last rank has its result, median and middle half; gloo in turns with us, each MPI after us on "
    "the same hosts. limit: the bytes that must pass the busiest host's link in one direction, "
    "over its rate; the columns after a time are that time over the limit. sent / limit: what the "
    "busiest host's interface has sent for drumline's call, with all headers, over those bytes. "
    "right: all ranks had the right result from all. ratio: drumline's time over the best peer's. "
    "drumline's first 32 calls, which the ranks compare before anything moves, are not among them. "
    f"Each MPI has {MPI_S} s for all its calls on a layout of hosts."
)
COLUMNS = (
    *("operation", "bytes", "hosts", "ranks a host", "link", "right", "limit (ms)"),
    *(cell for name in ("drumline", *PEERS) for cell in (f"{name} (ms)", f"{name} / limit")),
    *("sent / limit", "ratio"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--per-host", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--rates",
        nargs="+",
        default=["200mbit", UNSHAPED],
        help=f"of a host's link, as tc writes it; or {UNSHAPED}",
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--operations", nargs="+", default=OPERATIONS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--longest-ms", type=float, default=300, help="leave out what the link carries no sooner"
    )
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    arguments = parser.parse_args()
    table = Table("network", COLUMNS, NOTE, keep=arguments.save)
    layouts = itertools.product(arguments.rates, arguments.hosts, arguments.per_host)
    for rate, count, per_host in layouts:
        with NetworkHosts(count, "" if rate == UNSHAPED else rate) as hosts:
            for row in rows(arguments, hosts, per_host, rate):
                add(table, row, count, per_host, rate)
    table.end()


def rows(
    arguments: argparse.Namespace, hosts: NetworkHosts, per_host: int, rate: str
) -> list[dict[str, Any]]:
    """A row for each cell, with what every library has measured of it."""
    cells = [
        Cell(operation, nbytes, arguments.repeats if limit_ms < 50 else min(arguments.repeats, 3))
        for operation in arguments.operations
        for nbytes in arguments.sizes
        for limit_ms in [
            busiest_nbytes(operation, nbytes, len(hosts.names), per_host) / per_ms(rate)
        ]
        if limit_ms <= arguments.longest_ms
    ]
    found = {row["cell"]: row for row in ours(hosts, per_host, cells)}
    for name, command in engines_over(hosts, per_host).items():
        by_cell, end = of_mpi(hosts, command, cells)
        for row in found.values():
            for fact, values in by_cell.get(row["cell"], {"ms": {name: end}}).items():
                row[fact].update(values)
    return list(found.values())


def add(table: Table, row: dict[str, Any], count: int, per_host: int, rate: str) -> None:
    cell = Cell.read(row["cell"])
    least = busiest_nbytes(cell.operation, cell.nbytes, count, per_host)
    limit_ms = "" if rate == UNSHAPED else least / per_ms(rate)
    right = all(row["right"].values())
    cells: list[Any] = []
    medians = {}
    for name in ("drumline", *PEERS):
        ms = row["ms"].get(name, "")
        if ms and not isinstance(ms, str):
            ms = spread(ms)
            medians[name] = ms.median
        cells += [ms, medians[name] / limit_ms if limit_ms and name in medians else ""]
    own = medians.pop("drumline")
    facts = (cell.operation, cell.nbytes, count, per_host, rate, "yes" if right else "NO")
    ratio = own / min(medians.values())
    table.add(*facts, limit_ms, *cells, row["sent"]["drumline"] / least, ratio)


def busiest_nbytes(operation: str, nbytes: int, hosts: int, per_host: int) -> float:
    """The bytes that must pass the busiest host's link in one direction."""
    if operation == "allreduce":
        return 2 * (hosts - 1) / hosts * nbytes
    if operation == "broadcast":
        return nbytes
    rows = (hosts - 1) * per_host  # of other hosts, that each host must receive or send
    return rows * nbytes * (per_host if operation == "alltoall" else 1)


def per_ms(rate: str) -> float:
    """The bytes that a link carries in a millisecond."""
    if rate == UNSHAPED:
        return UNSHAPED_PER_MS
    unit = next(unit for unit in UNITS if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * UNITS[unit] / 8 / 1000


def ours(hosts: NetworkHosts, per_host: int, cells: list[Cell]) -> Iterator[dict[str, Any]]:
    """What rank 0 measures of us and gloo, as it does; the ranks are forked into the hosts."""
    read_end, write_end = os.pipe()
    pids = [
        os.fork() or be_rank(hosts, info, cells, write_end)
        for info in launch_infos(hosts, per_host)
    ]
    os.close(write_end)
    try:
        with os.fdopen(read_end) as lines:
            yield from map(json.loads, lines)
    finally:
        for pid in pids:
            if os.waitpid(pid, 0)[1]:
                sys.exit("a rank failed")


def launch_infos(hosts: NetworkHosts, per_host: int) -> Iterator[LaunchInfo]:
    count, launch_id = len(hosts.names), uuid.uuid4().hex
    for rank in range(count * per_host):
        place = (count * per_host, per_host, rank, rank % per_host)
        yield LaunchInfo(launch_id, *place, hosts.addresses[0], 29_455)


def be_rank(hosts: NetworkHosts, info: LaunchInfo, cells: list[Cell], write_end: int) -> int:
    code = 1
    try:
        hosts.enter(info.rank // info.local_world_size)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        torch.set_num_threads(1)
        with Coordinator(info, timeout_s=120) as coor:
            for row in measured(coor, cells):
                if coor.rank == 0:
                    os.write(write_end, json.dumps(row).encode() + b"\n")
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def measured(coor: Coordinator, cells: list[Cell]) -> Iterator[dict[str, Any]]:
    world = World(coor.broadcast_object, coor.allgather_object)
    with Communicator(coor, device_type="cpu") as comm:
        for _ in range(comm.capabilities.checked_calls):
            comm.barrier()
        libraries = [Ours("drumline", comm, comm.rank, comm.world_size), gloo(coor)]
        for cell in cells:
            yield measure(world, libraries, cell, lambda nbytes: torch.arange(nbytes / 4) % 7)
        dist.destroy_process_group()


def of_mpi(
    hosts: NetworkHosts, command: list[str], cells: list[Cell]
) -> tuple[dict[str, dict[str, Any]], str]:
    """The times that rank 0 of an MPI measures on the same hosts, by cell, and why others lack."""
    program = [sys.executable, "-m", "benchmarks.network_mpi", *map(str, cells)]
    with subprocess.Popen(
        hosts.command(0, [*command, *program]), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            out, _ = process.communicate(timeout=MPI_S)
            end = f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            hosts.kill_processes()
            out, _ = process.communicate()
            end = f"not measured in {MPI_S} s"
        finally:
            hosts.kill_processes()
    facts = [json.loads(line.partition(MARK)[2]) for line in out.splitlines() if MARK in line]
    return {row.pop("cell"): row for row in facts}, end


if __name__ == "__main__":
    main()
