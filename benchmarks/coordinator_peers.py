"""The Coordinator beside the plain calls of gloo and of every MPI that is installed.

    python -m benchmarks.coordinator_peers
    python -m benchmarks.coordinator_peers -n 4 --repeats 50

gloo moves tensors whose size all ranks know, mpi4py bytes objects, as we do. A peer is measured in
the same processes as we are, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.mpi import engines
from benchmarks.table import Table, spread
from coordinator import Coordinator

MARK = "measured: "  # opens the line that rank 0 prints for the process that started it
SIZES = {"16 B": 16, "1 KB": 1 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20}
COLUMNS = ("operation", "right", "drumline (us)", "peer", "(us)", "ratio")
NOTE = (
    "Median and middle half of a call on rank 0, straight after barriers. right: both gave what "
    "was sent."
)
Call = Callable[[], object]
Calls = dict[str, Call]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)  # given to the ranks
    arguments = parser.parse_args()
    if arguments.peer:
        return be_rank(arguments.peer, arguments.repeats)
    table = Table(f"coordinator-peers-{arguments.n}", COLUMNS, NOTE, keep=arguments.save)
    for name, kind, command in starts(arguments.n):
        for operation, found in measured([*command, "--repeats", str(arguments.repeats)], kind):
            ours, theirs = found["drumline"], found["theirs"]
            ratio = statistics.median(ours) / statistics.median(theirs)
            right = "yes" if found["right"] else "NO"
            table.add(operation, right, spread(ours), name, spread(theirs), ratio)
    table.end()


def starts(ranks: int) -> list[tuple[str, str, list[str]]]:
    """Peer, its kind, and the command that starts the ranks beside it."""
    count, module = ["-n", str(ranks)], ["-m", "benchmarks.coordinator_peers"]
    ours = [sys.executable, "-m", "launcher", "run", *count, *module]
    found = [("gloo, tensors", "gloo", ours)]
    for name, engine in engines().items():
        found.append((f"mpi4py, {name}", "mpi", [*engine, *count, sys.executable, *module]))
    return found


def measured(command: list[str], kind: str) -> list[tuple[str, dict[str, Any]]]:
    """Of each operation what rank 0 printed."""
    done = subprocess.run([*command, "--peer", kind], capture_output=True, text=True, timeout=300)
    said = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
    assert done.returncode == 0 and said, f"the ranks beside {kind} failed: {done.stderr}"
    return list(json.loads(said[0]).items())


def be_rank(kind: str, repeats: int) -> None:
    with Coordinator(timeout_s=120) as coor:
        ours, theirs = our_calls(coor), PEERS[kind](coor)
        found = {name: in_turns(coor, ours[name], theirs[name], repeats) for name in ours}
        if coor.is_master():
            print(MARK + json.dumps(found), flush=True)
        if kind == "gloo":  # left to the end of the process, its threads abort that at times
            import torch.distributed

            torch.distributed.destroy_process_group()


def in_turns(coor: Coordinator, ours: Call, theirs: Call, repeats: int) -> dict[str, Any]:
    """Microseconds of each call, and whether both gave the same."""
    times: dict[str, Any] = {"drumline": [], "theirs": [], "right": ours() == theirs()}
    for _ in range(repeats):
        for side, call in (("drumline", ours), ("theirs", theirs)):
            coor.barrier()
            coor.barrier()  # the first may have woken a sleeper, who is late for what follows
            start = time.perf_counter_ns()
            call()
            times[side].append((time.perf_counter_ns() - start) / 1000)
    return times


def our_calls(coor: Coordinator) -> Calls:
    calls: Calls = {"barrier": coor.barrier, "local_barrier": coor.local_barrier}
    for label, nbytes in SIZES.items():
        sent, mine = bytes(nbytes), bytes([coor.rank]) * nbytes
        calls[f"broadcast {label}"] = lambda sent=sent: coor.broadcast(
            sent if coor.rank == 0 else None
        )
        calls[f"allgather {label}"] = lambda mine=mine: list(coor.allgather(mine))
    return calls


def gloo_calls(coor: Coordinator) -> Calls:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = coor.store("peers")
    dist.init_process_group("gloo", store=store, rank=coor.rank, world_size=coor.world_size)
    calls: Calls = dict.fromkeys(("barrier", "local_barrier"), lambda: dist.barrier())
    for label, nbytes in SIZES.items():
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        mine = torch.full((nbytes,), coor.rank, dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(coor.world_size)]

        def broadcast(tensor: torch.Tensor = tensor) -> bytes:
            dist.broadcast(tensor, 0)
            return tensor.numpy().tobytes()

        def allgather(mine: torch.Tensor = mine, rows: list[torch.Tensor] = rows) -> list[bytes]:
            dist.all_gather(rows, mine)
            return [row.numpy().tobytes() for row in rows]

        calls[f"broadcast {label}"], calls[f"allgather {label}"] = broadcast, allgather
    return calls


def mpi_calls(coor: Coordinator) -> Calls:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    calls: Calls = {"barrier": lambda: world.Barrier(), "local_barrier": lambda: node.Barrier()}
    for label, nbytes in SIZES.items():
        sent, mine = bytes(nbytes), bytes([coor.rank]) * nbytes
        calls[f"broadcast {label}"] = lambda sent=sent: world.bcast(
            sent if coor.rank == 0 else None
        )
        calls[f"allgather {label}"] = lambda mine=mine: world.allgather(mine)
    return calls


PEERS: dict[str, Callable[[Coordinator], Calls]] = {"gloo": gloo_calls, "mpi": mpi_calls}

if __name__ == "__main__":
    main()
