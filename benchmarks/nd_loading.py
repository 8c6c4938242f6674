"""Loads one checkpoint into FSDP2 shards in three ways, in one run, and prints a table.

python -m launcher run -n 4 -m benchmarks.nd_loading

ours          inference.load_into, reader "each" and "rank0"
torch         set_model_state_dict(full_state_dict=True, broadcast_from_rank0=True)
"""

import json
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import inference
from coordinator import Coordinator

WIDTH, INNER, DEPTH, WORDS, RUNS = 1024, 2816, 6, 16000, 3
MIB = 1 << 20


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)) for _ in range(DEPTH)
        )


class Peak(threading.Thread):
    """The most memory of its own that this process had while the body ran, above the start."""

    def __enter__(self):
        self.base, self.peak, self.on = self.now(), 0, True
        self.start()
        return self

    def now(self):
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    def run(self):
        while self.on:
            self.peak = max(self.peak, self.now() - self.base)
            time.sleep(0.002)

    def __exit__(self, *error):
        self.on = False
        self.join()


def empty(mesh):
    with torch.device("meta"):
        model = Tower()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_torch(model, folder, coor):
    model.to_empty(device="cpu")
    full = load_file(folder / "model.safetensors") if coor.is_master() else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    whole = sum(tensor.nbytes for tensor in full.values())
    return whole * (coor.world_size - 1) if coor.is_master() else 0


def by_us(reader):
    def load(model, folder, coor):
        mesh = {"dp_shard": coor.world_size}
        return inference.load_into(model, folder, coor, mesh=mesh, reader=reader).nbytes_sent

    return load


WAYS = {
    "ours, each": by_us("each"),
    "ours, rank0": by_us("rank0"),
    "torch, broadcast_from_rank0": by_torch,
}


def right(model, folder, coor):
    full = load_file(folder / "model.safetensors")
    return all(
        torch.equal(tensor.to_local(), full[name].chunk(coor.world_size)[coor.rank])
        for name, tensor in model.state_dict().items()
    )


def measure(way, mesh, folder, coor):
    """Seconds (the slowest rank), peak of rank 0 and of the others, bytes sent, correctness."""
    seconds = []
    for _ in range(RUNS):
        model = empty(mesh)
        coor.barrier()
        start = time.monotonic()
        with Peak(daemon=True) as peak:
            sent = WAYS[way](model, folder, coor)
        mine = [time.monotonic() - start, peak.peak, sent, right(model, folder, coor)]
        told = [json.loads(data) for data in coor.allgather(json.dumps(mine).encode())]
        seconds.append(max(one[0] for one in told))
    others = max(one[1] for one in told[1:])
    return seconds, told[0][1], others, sum(one[2] for one in told), all(one[3] for one in told)


with Coordinator() as coor, tempfile.TemporaryDirectory() as own:
    torch.set_num_threads(1)
    folder = Path(coor.broadcast(own.encode()).decode())  # one machine: all read rank 0's folder
    if coor.is_master():
        save_file(Tower().state_dict(), folder / "model.safetensors")
    coor.barrier()
    store = coor.store("process group")
    dist.init_process_group("gloo", store=store, rank=coor.rank, world_size=coor.world_size)
    mesh = init_device_mesh("cpu", (coor.world_size,), mesh_dim_names=("dp_shard",))
    rows = {way: measure(way, mesh, folder, coor) for way in WAYS}
    if coor.is_master():
        nbytes = (folder / "model.safetensors").stat().st_size
        share = nbytes / MIB / coor.world_size
        print(f"{platform.machine()}, torch {torch.__version__}, {coor.world_size} ranks,", end=" ")
        print(f"{nbytes / MIB:.0f} MiB, share {share:.0f} MiB")
        print(
            "| way | s, median (spread) | peak rank 0, MiB | peak others, MiB | sent, MiB | right |"
        )
        print("|---|---|---|---|---|---|")
        for way, (seconds, first, others, sent, ok) in rows.items():
            spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
            memory = f"{first / MIB:.0f} | {others / MIB:.0f} | {sent / MIB:.0f}"
            print(f"| {way} | {spread} | {memory} | {'yes' if ok else 'NO'} |")
    dist.destroy_process_group()
    coor.barrier()
