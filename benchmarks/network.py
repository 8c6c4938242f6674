"""Collectives between hosts, beside gloo, and beside what the links of the hosts can carry.

    python -m benchmarks.network
    python -m benchmarks.network --hosts 6 --rate 200mbit --sizes 65536 1048576

Hosts are network namespaces of this machine whose links are held to a rate by tc: what is measured
is how well a call uses a link that is slower than the processor. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.collectives import MARK
from benchmarks.libraries import ROWS, Call, Library, Ours, gloo, is_right, result
from benchmarks.table import Table, spread
from communicator import Communicator
from coordinator import Coordinator
from launcher import LaunchInfo
from tests.network_hosts import INTERFACE, NetworkHosts

OPERATIONS = ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast")
SIZES = (8, 64 << 10, 1 << 20, 4 << 20)
LEAD_S = 0.002  # from the barrier until all ranks begin
UNITS = {"mbit": 1e6, "gbit": 1e9}
NOTE = (
    "float32; the size is a row's where a call takes a row for each rank. Milliseconds until the "
    "last rank has its result, median and middle half of turns. limit: the bytes that must pass "
    "the busiest host's link in one direction, over its rate. right: all ranks had the right "
    "result from both. ratio: ours divided by gloo's."
)
COLUMNS = (
    *("operation", "bytes", "hosts", "ranks a host", "link", "right", "limit (ms)"),
    *("drumline (ms)", "gloo (ms)", "drumline / limit", "gloo / limit", "ratio"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 6])
    parser.add_argument("--per-host", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rate", default="200mbit", help="of a host's link, as tc writes it")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--operations", nargs="+", default=OPERATIONS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--rank", action="append", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return be_host(arguments)
    table = Table("network", COLUMNS, NOTE, keep=arguments.save)
    for count in arguments.hosts:
        for per_host in arguments.per_host:
            for row in rows(arguments, count, per_host):
                add(table, row, count, per_host, arguments.rate)
    table.end()


def add(table: Table, row: dict[str, Any], count: int, per_host: int, rate: str) -> None:
    limit_ms = busiest_nbytes(row["operation"], row["bytes"], count, per_host) / per_ms(rate)
    ours, peer = (spread(row["ms"][name]) for name in ("drumline", "gloo"))
    facts = (row["operation"], row["bytes"], count, per_host, rate, "yes" if row["right"] else "NO")
    of_limit = (ours.median / limit_ms, peer.median / limit_ms)
    table.add(*facts, limit_ms, ours, peer, *of_limit, ours.median / peer.median)


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
    unit = next(unit for unit in UNITS if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * UNITS[unit] / 8 / 1000


def rows(arguments: argparse.Namespace, count: int, per_host: int) -> Iterator[dict[str, Any]]:
    """What rank 0 measures on so many hosts, as it does."""
    with NetworkHosts(count, arguments.rate) as hosts:
        processes = [
            subprocess.Popen(
                hosts.command(k, command),
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for k, command in enumerate(commands(arguments, hosts, per_host))
        ]
        try:
            assert processes[0].stdout is not None
            for line in processes[0].stdout:
                _, mark, facts = line.partition(MARK)
                if mark:
                    yield json.loads(facts)
            if any(process.wait(60) for process in processes):
                sys.exit("a host failed")
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def commands(
    arguments: argparse.Namespace, hosts: NetworkHosts, per_host: int
) -> Iterator[list[str]]:
    """For each host the command that starts its ranks."""
    count, launch_id = len(hosts.addresses), uuid.uuid4().hex
    for node in range(count):
        command = [sys.executable, "-m", "benchmarks.network", "--repeats", str(arguments.repeats)]
        command += ["--operations", *arguments.operations]
        command += ["--sizes", *map(str, arguments.sizes)]
        for local_rank in range(per_host):
            info = LaunchInfo(
                launch_id,
                rank=node * per_host + local_rank,
                world_size=count * per_host,
                local_rank=local_rank,
                local_world_size=per_host,
                master_addr=hosts.addresses[0],
                master_port=29_455,
            )
            command += ["--rank", info.to_bytes().decode()]
        yield command


def be_host(arguments: argparse.Namespace) -> None:
    """Fork the ranks of one host, and wait for them."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    pids = [os.fork() or be_rank(arguments, info) for info in arguments.rank]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(max(map(abs, codes)))


def be_rank(arguments: argparse.Namespace, info: str) -> int:
    code = 1
    try:
        with Coordinator(LaunchInfo.from_bytes(info.encode()), timeout_s=120) as coor:
            measure_all(arguments, coor)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def measure_all(arguments: argparse.Namespace, coor: Coordinator) -> None:
    with Communicator(coor, device_type="cpu") as comm:
        libraries = [Ours("drumline", comm, comm.rank, comm.world_size), gloo(coor)]
        for operation in arguments.operations:
            for nbytes in arguments.sizes:
                row = measure(coor, libraries, operation, nbytes, arguments.repeats)
                if coor.rank == 0:
                    print(MARK + json.dumps(row), flush=True)
        dist.destroy_process_group()


def measure(
    coor: Coordinator, libraries: list[Library], operation: str, nbytes: int, repeats: int
) -> dict[str, Any]:
    total = nbytes * coor.world_size if operation in ROWS else nbytes
    right = all(is_right(library, operation, total, torch.float32) for library in libraries)
    tensor = torch.zeros(total // 4)
    tensor = tensor.view(coor.world_size, -1) if operation in ROWS else tensor
    out = result(operation, tensor, coor.world_size)
    ms: dict[str, list[float]] = {library.name: [] for library in libraries}
    for _ in range(repeats):
        for library in libraries:
            ms[library.name].append(timed(coor, library.call(operation, tensor, out)))
    is_right_everywhere = coor.all_true(right)
    return {"operation": operation, "bytes": nbytes, "right": is_right_everywhere, "ms": ms}


def timed(coor: Coordinator, call: Call) -> float:
    """Milliseconds from when all ranks begin until the last has its result; one clock for all."""
    begins_at = coor.broadcast_object(time.monotonic() + LEAD_S)
    while time.monotonic() < begins_at:
        pass
    call()
    ended_at: list[float] = coor.allgather_object(time.monotonic())
    return (max(ended_at) - begins_at) * 1000


if __name__ == "__main__":
    main()
