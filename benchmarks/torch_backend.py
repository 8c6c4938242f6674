"""torch.distributed on "drumline", beside gloo and beside torch's "fake", which moves nothing.

    python -m benchmarks.torch_backend

Two ranks make groups of all three and call them in turns, so what disturbs one disturbs the others.
First with the machine to themselves, then with two busy processes a core.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  registers "fake"

import communicator.torch_backend  # noqa: F401
from benchmarks.collectives import MARK, from_rank_0
from benchmarks.table import Table, alternate, spread
from coordinator import Coordinator

BACKENDS = ("drumline", "gloo", "fake")
SIZES = (8, 64 << 10, 1 << 20, 16 << 20)
BUSY = "while True: pass"
LAYERS, WIDTH, BATCH = 20, 1024, 8  # 21 M parameters
NOTE = (
    "Two ranks; microseconds on rank 0, median and middle half of turns. fake: torch's backend "
    "that returns at once, so what torch itself costs. oversubscribed: with two busy processes a "
    "core. new_group: gloo's always beside a default group of gloo, ours beside one of ours, or of "
    "gloo: there ranks that meet in a first group need not meet in later ones. right: sums and "
    "gradients are those of gloo. ratio: ours divided by gloo's."
)
COLUMNS = (
    *(
        "what",
        "machine",
        "right",
        "drumline (us)",
        "gloo (us)",
        "fake (us)",
        "drumline / fake",
        "ratio",
    ),
)
Groups = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return be_rank(arguments.repeats)
    table = Table("torch-backend", COLUMNS, NOTE, keep=arguments.save)
    for row in rows(arguments.repeats):
        ours, gloo = row["times"]["drumline"], row["times"]["gloo"]
        fake = row["times"].get("fake")
        beside = ("", "") if fake is None else (spread(fake), ratio(ours, fake))
        right = "yes" if row["right"] else "NO"
        cells = (spread(ours), spread(gloo), *beside, ratio(ours, gloo))
        table.add(row["what"], row["machine"], right, *cells)
    table.end()


def ratio(ours: list[float], others: list[float]) -> float:
    return statistics.median(ours) / statistics.median(others)


def rows(repeats: int) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "launcher", "run", "-n", "2", "-m", "benchmarks.torch_backend"]
    return from_rank_0([*command, "--rank", "--repeats", str(repeats)])


def be_rank(repeats: int) -> None:
    torch.set_num_threads(1)
    with Coordinator() as coor, ExitStack() as stack:
        stores = (coor.store("benchmark") for _ in itertools.count())
        init = partial(dist.init_process_group, rank=coor.rank, world_size=coor.world_size)
        for what, cases in new_group_cases(lambda name: init(name, store=next(stores))):
            for machine in on_machines(coor.rank):
                tell(coor.rank, what, machine, True, alternate(cases, repeats))
        init("gloo", store=next(stores))
        stack.callback(dist.destroy_process_group)
        groups = {name: dist.new_group(backend=name) for name in BACKENDS}
        for machine in on_machines(coor.rank):
            for what, right, cases in cases_of(groups):
                tell(coor.rank, what, machine, right, alternate(cases, repeats))


def on_machines(rank: int) -> Iterator[str]:
    for machine in ("idle", "oversubscribed"):
        with busy(machine == "oversubscribed" and rank == 0):
            yield machine


def tell(rank: int, what: str, machine: str, right: bool, times: dict[str, list[float]]) -> None:
    if rank == 0:
        row = {"what": what, "machine": machine, "right": right, "times": times}
        print(MARK + json.dumps(row), flush=True)


@contextmanager
def busy(is_wanted: bool) -> Iterator[None]:
    """Two processes a core that do nothing else."""
    count = 2 * len(os.sched_getaffinity(0)) if is_wanted else 0
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


Cases = dict[str, Callable[[], float]]


def cases_of(groups: Groups) -> Iterator[tuple[str, bool, Cases]]:
    for nbytes in SIZES:
        cases = {name: partial(all_reduce_us, group, nbytes) for name, group in groups.items()}
        yield f"all_reduce {nbytes} B", sums_are_right(groups, nbytes), cases
    both = {name: groups[name] for name in ("drumline", "gloo")}
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for what, wrap in (("DDP step", in_ddp), ("FSDP2 step", in_fsdp)):
        models = {name: wrap(copy.deepcopy(model), group) for name, group in both.items()}
        steps = {name: partial(step_us, wrapped) for name, wrapped in models.items()}
        yield what, steps_agree(models), steps


def all_reduce_us(group: Any, nbytes: int) -> float:
    tensor, calls = torch.zeros(nbytes // 4), 100 if nbytes < 1 << 20 else 3
    dist.all_reduce(tensor, group=group)
    dist.barrier(group=group)
    start = time.perf_counter_ns()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    return (time.perf_counter_ns() - start) / 1000 / calls


def sums_are_right(groups: Groups, nbytes: int) -> bool:
    tensor = torch.ones(nbytes // 4)
    dist.all_reduce(tensor, group=groups["drumline"])
    return bool((tensor == dist.get_world_size()).all())


def new_group_cases(init: Callable[[str], None]) -> Iterator[tuple[str, Cases]]:
    """init: makes a default group of a backend."""

    def took_us(default: str, backend: str, before: int, calls: int) -> float:
        init(default)
        groups = [dist.new_group(backend=backend) for _ in range(before)]
        dist.barrier()
        start = time.perf_counter_ns()
        groups.append(dist.new_group(backend=backend))
        for _ in range(calls):
            dist.all_reduce(torch.ones(1), group=groups[-1])
        took = (time.perf_counter_ns() - start) / 1000
        dist.barrier()  # gloo fails where one rank closes while another still connects
        dist.destroy_process_group()
        return took

    for what, default, before in (
        ("new_group", "drumline", 0),
        ("first new_group beside gloo", "gloo", 0),
        ("later new_group beside gloo", "gloo", 1),
    ):
        for calls, more in enumerate(("", " and its first call")):
            ours = partial(took_us, default, "drumline", before, calls)
            gloo = partial(took_us, "gloo", "gloo", before, calls)
            yield what + more, {"drumline": ours, "gloo": gloo}


def in_ddp(model: nn.Module, group: Any) -> nn.Module:
    return DistributedDataParallel(model, process_group=group)


def in_fsdp(model: nn.Module, group: Any) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step_us(model: nn.Module) -> float:
    """Forward and backward, straight after a barrier."""
    model.zero_grad()
    dist.barrier()
    start = time.perf_counter_ns()
    model(torch.ones(BATCH, WIDTH)).sum().backward()
    return (time.perf_counter_ns() - start) / 1000


def steps_agree(models: dict[str, nn.Module]) -> bool:
    for model in models.values():
        step_us(model)
    pairs = zip(*(model.parameters() for model in models.values()), strict=True)
    return all(torch.allclose(local(one.grad), local(other.grad)) for one, other in pairs)


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


if __name__ == "__main__":
    main()
