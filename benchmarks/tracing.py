"""What a call costs in a launch that is traced, beside the same call in one that is not.

    python -m benchmarks.tracing
    python -m benchmarks.tracing --repeats 50

Both kinds of call are made in the same two processes, in turns. In a launch that is not traced the
recorder is not there: the calls are the methods themselves, and "off" is their cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

import launcher
from benchmarks.table import Table, spread
from communicator import Communicator
from coordinator import Coordinator

COLUMNS = ("call", "right", "on (us)", "off (us)", "added (us)", "on / off")
NOTE = (
    "Two ranks of one machine, over shared memory; median and middle half of a call on rank 0, in "
    "batches. right: every traced call was recorded."
)
METHODS = {
    "coordinator.barrier": "barrier",
    "coordinator.broadcast, 16 B": "broadcast",
    "communicator.barrier": "barrier",
    "communicator.allreduce, 8 B": "allreduce",
    "communicator.allreduce, 1 MiB": "allreduce",
}
BATCH = 20
Calls = dict[str, Callable[[], object]]
Times = dict[str, dict[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = (folder, arguments.repeats)
        found: Times = launcher.launch(measure, nprocs=2, args=work, timeout_s=300)[0]
        recorded = counts(Path(folder))
    table = Table("tracing", COLUMNS, NOTE, keep=arguments.save)
    for name, times in found.items():
        off, on = (statistics.median(times[kind]) for kind in ("off", "on"))
        right = recorded[METHODS[name]] >= arguments.repeats * (BATCH + 1)
        cells = spread(times["on"]), spread(times["off"]), on - off, on / off
        table.add(name, "yes" if right else "NO", *cells)
    table.end()


def counts(folder: Path) -> Counter[str]:
    """How many calls of each method rank 0 has recorded."""
    files = [path.read_text().splitlines() for path in folder.glob("rank-0-*.jsonl")]
    events = [json.loads(line) for lines in files for line in lines]
    return Counter(event["name"] for event in events if "name" in event)


def measure(folder: str, repeats: int) -> Times:
    """Microseconds of each call, traced ("on") and not ("off")."""
    torch.set_num_threads(1)
    info = launcher.current()
    traced = replace(info, extras={**info.extras, "trace": folder})
    with ExitStack() as stack:
        calls = {kind: opened(stack, each) for kind, each in (("off", info), ("on", traced))}
        return {name: in_turns(calls, name, repeats) for name in calls["off"]}


def opened(stack: ExitStack, info: launcher.LaunchInfo) -> Calls:
    coor = stack.enter_context(Coordinator(info))
    comm = stack.enter_context(Communicator(coor))
    small, large = torch.zeros(2), torch.zeros(1 << 18)
    calls: list[Callable[[], object]] = [
        coor.barrier,
        lambda: coor.broadcast(b"x" * 16),
        comm.barrier,
        lambda: comm.allreduce(small),
        lambda: comm.allreduce(large),
    ]
    return dict(zip(METHODS, calls, strict=True))


def in_turns(calls: dict[str, Calls], name: str, repeats: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {kind: [] for kind in calls}
    for _ in range(repeats):
        for kind, times in found.items():
            call = calls[kind][name]
            call()  # finds the other rank awake
            start = time.perf_counter_ns()
            for _ in range(BATCH):
                call()
            times.append((time.perf_counter_ns() - start) / BATCH / 1000)
    return found


if __name__ == "__main__":
    main()
