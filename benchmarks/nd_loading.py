"""Loads one checkpoint into FSDP2 shards in four ways, in one run.

python -m benchmarks.nd_loading [--save] [--ranks 4]

ours          drumline.load over a DeviceMesh, reader "each" and "rank0"
torch         set_model_state_dict(full_state_dict=True, broadcast_from_rank0=True)
transformers  from_pretrained(distributed_config=DistributedConfig(fsdp_size=...))
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import drumline
import launcher
from benchmarks.table import Table, spread
from coordinator import Coordinator

SIZES = {
    "vocab_size": 16000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
}
RUNS = 5
MIB = 1 << 20
COLUMNS = (
    *("way", "ranks", "right", "seconds", "peak rank 0 (MiB)", "peak others (MiB)", "sent (MiB)"),
    "torch / this",
)


class Peak(threading.Thread):
    """The most memory, its own and of files, that this process had in the body, above the start."""

    def __enter__(self):
        self.base, self.peak, self.on = self.now(), 0, True
        self.start()
        return self

    def now(self):
        status = Path("/proc/self/status").read_text()
        kinds = ("RssAnon:", "RssFile:")
        return sum(int(status.split(kind)[1].split()[0]) * 1024 for kind in kinds)

    def run(self):
        while self.on:
            self.peak = max(self.peak, self.now() - self.base)
            time.sleep(0.002)

    def __exit__(self, *error):
        self.peak = max(self.peak, self.now() - self.base)
        self.on = False
        self.join()


def by_torch(mesh, folder, coor):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh).to_empty(device="cpu")
    full = load_file(folder / "model.safetensors") if coor.is_master() else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    whole = sum(tensor.nbytes for tensor in full.values())
    return model, whole * (coor.world_size - 1) if coor.is_master() else 0


def by_transformers(mesh, folder, coor):
    """Each rank reads; what it has read is used once, as it may be no more than mapped."""
    config = DistributedConfig(fsdp_size=coor.world_size)
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=config)
    for tensor in model.state_dict().values():
        tensor.to_local().sum()
    return model, 0


def by_us(reader):
    def load(mesh, folder, coor):
        model = drumline.load(folder, coor=coor, mesh=mesh, reader=reader)
        return model, model.loaded.nbytes_sent

    return load


WAYS = {
    "drumline, each": by_us("each"),
    "drumline, rank0": by_us("rank0"),
    "torch, broadcast_from_rank0": by_torch,
    "transformers, DistributedConfig": by_transformers,
}


def right(model, folder, coor):
    full = load_file(folder / "model.safetensors")
    return all(
        torch.equal(tensor.to_local(), full[name].chunk(coor.world_size)[coor.rank])
        for name, tensor in model.state_dict().items()
    )


def load_once(way, mesh, folder, coor):
    """By rank: seconds, peak, bytes sent, correctness. Collective."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # so that this one pays for its memory, too
    coor.barrier()
    start = time.monotonic()
    with Peak(daemon=True) as peak:
        model, sent = WAYS[way](mesh, folder, coor)
    mine = [time.monotonic() - start, peak.peak, sent, right(model, folder, coor)]
    return [json.loads(data) for data in coor.allgather(json.dumps(mine).encode())]


def measure(mesh, folder, coor):
    """By way, what `summed_up` says; in turns, after a round that finds everything imported."""
    found = {way: [] for way in WAYS}
    for turn in range(RUNS + 1):
        for way in WAYS:
            told = load_once(way, mesh, folder, coor)
            if turn:
                found[way].append(told)
    return {way: summed_up(told) for way, told in found.items()}


def summed_up(told):
    """Seconds (the slowest rank), peak of rank 0 and of the others, bytes sent, correctness."""
    seconds = [max(one[0] for one in ranks) for ranks in told]
    first = max(ranks[0][1] for ranks in told)
    others = max(one[1] for ranks in told for one in ranks[1:])
    sent = sum(one[2] for one in told[-1])
    return seconds, first, others, sent, all(one[3] for ranks in told for one in ranks)


def rank():
    """What measure() says, and how large the checkpoint was. Collective."""
    with Coordinator() as coor, tempfile.TemporaryDirectory() as own:
        torch.set_num_threads(1)
        folder = Path(coor.broadcast(own.encode()).decode())  # one machine: all read rank 0's
        if coor.is_master():
            LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
        coor.barrier()
        here = {"RANK": coor.rank, "LOCAL_RANK": coor.local_rank, "WORLD_SIZE": coor.world_size}
        os.environ.update({name: str(value) for name, value in here.items()})  # transformers asks
        store = coor.store("process group")
        dist.init_process_group("gloo", store=store, rank=coor.rank, world_size=coor.world_size)
        mesh = init_device_mesh("cpu", (coor.world_size,), mesh_dim_names=("dp_shard",))
        found = measure(mesh, folder, coor)
        nbytes = (folder / "model.safetensors").stat().st_size
        coor.barrier()
        dist.destroy_process_group()
    return found, nbytes


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results")
    arguments = parser.parse_args()
    found, nbytes = launcher.launch(rank, nprocs=arguments.ranks, timeout_s=600)[0]
    share = nbytes / MIB / arguments.ranks
    note = (
        f"A checkpoint of {nbytes / MIB:.0f} MiB, so a share of {share:.0f} MiB a rank. seconds: "
        "of the slowest rank, building the model included, in turns after a first round. peak: of "
        "memory, its own and mapped from files, above the start; torch's rank 0 and whoever reads "
        "map the file."
    )
    table = Table("nd_loading", COLUMNS, note, keep=arguments.save)
    theirs = statistics.median(found["torch, broadcast_from_rank0"][0])
    for way, (seconds, first, others, sent, ok) in found.items():
        sizes = [size / MIB for size in (first, others, sent)]
        ratio = theirs / statistics.median(seconds)
        right = "yes" if ok else "NO"
        table.add(way, arguments.ranks, right, spread(seconds), *sizes, ratio)
    table.end()


if __name__ == "__main__":
    main()
