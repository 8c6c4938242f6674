"""What the ranks of test_nd_load_processes.py run, one process each.

python -m launcher run -n 4 tests/drumline/checkpoint/shard_loader_ranks.py dtensor FOLDER
"""

import json
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaForCausalLM, T5ForConditionalGeneration

import drumline
from coordinator import Coordinator

MIB = 1 << 20


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Tower(nn.Module):
    def __init__(self, width, inner, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(depth))
        self.head = nn.Linear(width, 11, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(model, mesh):
    """Tensor parallel inside, FSDP2 outside, as PyTorch's own tutorials have it."""
    for block in model.blocks:
        if "tp" in mesh.mesh_dim_names:
            styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], styles)
        fully_shard(block, mesh=outer(mesh))
    return fully_shard(model, mesh=outer(mesh))


def outer(mesh):
    axes = tuple(name for name in mesh.mesh_dim_names if name != "tp")
    return mesh[axes] if len(axes) > 1 else mesh[axes[0]]


def dtensor(folder):
    """DTensors and fully_shard: shards bit for bit, outputs of a single process."""
    full = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    x = torch.randn(4, 10)
    alone = Tower(10, 18, 2)
    alone.load_state_dict(full)
    meshes = [(("dp_shard", "tp"), (2, 2)), (("dp_replicate", "dp_shard"), (2, 2))]
    with Coordinator() as coor:
        store = coor.store("torch")
        dist.init_process_group("gloo", store=store, rank=coor.rank, world_size=coor.world_size)
        for (names, shape), reader in zip(meshes, ("rank0", "each"), strict=True):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            with torch.device("meta"):
                model = sharded(Tower(10, 18, 2), mesh)
            drumline.load_into(model, folder, coor, mesh=mesh, reader=reader)
            for name, tensor in model.state_dict().items():
                assert isinstance(tensor, DTensor), name
                assert torch.equal(tensor.full_tensor(), full[name]), name
            error = (model(x) - alone(x)).abs().max().item()
            assert error < 1e-5, error
            if coor.is_master():
                print(f"{names} from {reader}: shards bitwise, outputs within {error:.1e}")
        transformers_over(folder / "llama", coor)
        kept_wide(folder / "t5", coor)
        dist.destroy_process_group()


def transformers_over(folder, coor):
    """drumline.load over torch meshes: FSDP2 around tensor parallel, and one axis without name."""
    plain = LlamaForCausalLM.from_pretrained(folder)
    ids = torch.arange(12).reshape(2, 6) + 5
    meshes = [
        (init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp")), "rank0"),
        (init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")), "node"),
        (init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp_shard", "dp_replicate")), "rank0"),
        (init_device_mesh("cpu", (4,)), "each"),
    ]
    for mesh, reader in meshes:
        model = drumline.load(folder, "meta", coor, mesh=mesh, reader=reader)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        loss = model(ids, labels=ids).loss
        loss.backward()
        error = abs(loss.item() - plain(ids, labels=ids).loss.item())
        assert error < 1e-4, error
        share, whole = model.loaded.share, sum(p.nbytes for p in plain.parameters())
        assert share < 0.6 * whole
        if "tp" in model.mesh.axes and model.mesh.axis_size("dp_shard") == 1:
            samples_are_equal(model, plain, ids, coor)
        if reader == "rank0":
            stopped_by_turns(model, plain, ids, coor)
        if coor.is_master():
            print(f"{dict(model.mesh.axes)} from {reader}: {share} of {whole} bytes, loss equal")


def kept_wide(folder, coor):
    """FSDP2 takes one dtype for each group, and T5 keeps a matrix of each layer in float32."""
    plain = T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float16)
    ids = torch.arange(12).reshape(2, 6) + 5
    for names, shape in ((("dp_shard",), (4,)), (("dp_replicate", "dp_shard"), (2, 2))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = drumline.load(folder, "meta", coor, mesh=mesh, dtype="float16")
        dtypes = {name: tensor.dtype for name, tensor in model.named_parameters()}
        assert dtypes == {name: tensor.dtype for name, tensor in plain.named_parameters()}
        error = abs(model(ids, labels=ids).loss.item() - plain(ids, labels=ids).loss.item())
        assert error < 1e-2, error
        if coor.is_master():
            print(f"float32 in {names}, loss equal")


def stopped_by_turns(model, plain, ids, coor):
    """Each rank needs the shards of the others for as long as any of them has words to say."""
    length = 2 + 2 * model.mesh.coordinate(coor.rank)["dp_shard"]
    tokens = model.generate(ids, max_new_tokens=length, do_sample=False)
    assert torch.equal(tokens, plain.generate(ids, max_new_tokens=length, do_sample=False))


def samples_are_equal(model, plain, ids, coor):
    """Ranks that would draw differently draw what the first one draws, and one process would."""
    torch.manual_seed(coor.rank)
    tokens = model.generate(ids, max_new_tokens=8, do_sample=True)
    torch.manual_seed(0)
    assert torch.equal(tokens, plain.generate(ids, max_new_tokens=8, do_sample=True))


def status_kib(*fields):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[field].split()[0]) for field in fields)


class Peak(threading.Thread):
    """The highest memory that is this process's own or a file's, seen while it runs."""

    def __enter__(self):
        self.base, self.peak, self.on = self.now(), 0, True
        self.start()
        return self

    def now(self):
        return status_kib("RssAnon", "RssFile") * 1024

    def run(self):
        while self.on:
            self.peak = max(self.peak, self.now() - self.base)
            time.sleep(0.001)

    def __exit__(self, *exc):
        self.peak = max(self.peak, self.now() - self.base)
        self.on = False
        self.join()


def memory(folder):
    """The share and the peak of each rank, by reader; "everything" is the wrong way."""
    shapes = json.loads((folder / "shapes.json").read_text())
    splits = {name: (drumline.ShardSpec("tp", n % 2),) for n, name in enumerate(shapes)}
    with Coordinator() as coor:
        for reader in ("each", "rank0", "everything"):
            coor.barrier()
            with Peak(daemon=True) as peak:
                if reader == "everything":
                    share = everything(folder, coor)
                else:
                    model = init_on_meta(shapes)
                    share = drumline.load_into(
                        model, folder, coor, mesh={"tp": 4}, reader=reader, splits=splits
                    ).share
                    del model
            told = coor.allgather(json.dumps([share, peak.peak]).encode())
            if coor.is_master():
                print(reader, json.dumps([json.loads(data) for data in told]))


def init_on_meta(shapes):
    model = nn.Module()
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))
    return model


def everything(folder, coor):
    """Load the whole, then take a shard: what must not pass for loading a share."""
    whole = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    kept = [tensor.chunk(4, 0)[coor.rank].clone() for tensor in whole.values()]
    return sum(tensor.nbytes for tensor in kept)


if __name__ == "__main__":
    torch.set_num_threads(1)
    work, folder, *rest = sys.argv[1:]
    {"dtensor": dtensor, "memory": memory}[work](Path(folder), *rest)
