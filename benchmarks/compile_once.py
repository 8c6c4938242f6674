"""Compiles one model for every rank: each rank for itself, once for all, or one layer once for all.

python -m benchmarks.compile_once [--save] [--ranks 2 4]
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import drumline
import launcher
from benchmarks.table import Table
from coordinator import Coordinator
from drumline.compile_once.precompile import compile_weightless, load_compiled

WIDTH, HEADS, DEPTH, BATCH, LENGTH = 64, 4, 6, 2, 16
COLUMNS = (
    *("way", "ranks", "right", "compiled by", "wall (s)", "CPU, all ranks (s)"),
    *("wall, each / this", "CPU, each / this"),
)
NOTE = (
    "wall: of the slowest rank, until every rank can run. CPU: of all ranks and their compilers. "
    "right: within 1e-3 of the model uncompiled, and the same bits on all ranks."
)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def each(model, x, coor, folder):
    path = folder / f"{coor.rank}.pt2"
    path.write_bytes(compile_weightless(model, (x,)))
    return load_compiled(path, dict(model.named_parameters()), torch.device("cpu"))


def once(model, x, coor, folder):
    return drumline.precompile(model, (x,), coor, folder=folder / "cache")


def layer(model, x, coor, folder):
    runs = drumline.precompile_modules(list(model.layers), (x,), coor, folder=folder / "cache")

    def run(x):
        for one in runs:
            x = one(x)
        return x

    return run


WAYS = {
    "each rank for itself": each,
    "once for all": once,
    "once for all, found again": once,
    "one layer once for all": layer,
}


def spent():
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(way, coor, folder):
    """Wall and CPU seconds by rank, and whether what came out is right."""
    torch.manual_seed(0)
    model, x = Tower(), torch.randn(BATCH, LENGTH, WIDTH)
    with torch.no_grad(), fresh_cache():
        coor.barrier()
        start, before = time.monotonic(), spent()
        run = WAYS[way](model, x, coor, folder)
        took = [time.monotonic() - start, spent() - before]
        result = run(x)
        drumline.assert_identical_on_ranks(coor, result)
        took.append(bool(torch.allclose(result, model(x), rtol=1e-3, atol=1e-3)))
    return [json.loads(data) for data in coor.allgather(json.dumps(took).encode())]


def rank():
    """By way: what each rank took. Collective."""
    torch.set_num_threads(1)
    with Coordinator() as coor, tempfile.TemporaryDirectory() as own:
        folder = Path(coor.broadcast(own.encode()).decode())
        with torch.no_grad(), fresh_cache():  # what only the first compilation of a process pays
            compile_weightless(nn.Linear(2, 2), (torch.ones(1, 2),))
        found = {way: measure(way, coor, folder) for way in WAYS}
        coor.barrier()
    return found


def totals(told):
    return max(wall for wall, _, _ in told), sum(cpu for _, cpu, _ in told)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    arguments = parser.parse_args()
    note = f"{DEPTH} layers, CPU, AOTInductor. {NOTE}"
    for ranks in arguments.ranks:
        name = f"compile_once-{ranks}-ranks"
        table = Table(name, COLUMNS, note, keep=arguments.save)
        found = launcher.launch(rank, nprocs=ranks, timeout_s=900)[0]
        theirs = totals(found["each rank for itself"])
        builders = {"each rank for itself": f"{ranks} ranks", "once for all, found again": "nobody"}
        for way, told in found.items():
            ours = totals(told)
            right = "yes" if all(ok for _, _, ok in told) else "NO"
            ratios = [one / other for one, other in zip(theirs, ours, strict=True)]
            table.add(way, ranks, right, builders.get(way, "1 rank"), *ours, *ratios)
        table.end()


if __name__ == "__main__":
    main()
