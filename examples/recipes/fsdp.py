"""FSDP2 over our backend: parameters are sharded, loaded by shards, whole only while a block runs.

drumline run -n 2 examples/recipes/fsdp.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from model import Model, device_of, loss_of, make_batch, make_model
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import communicator.torch_interop.process_group  # noqa: F401  registers "drumline"
import drumline
from coordinator import Coordinator

with Coordinator() as coor, tempfile.TemporaryDirectory() as folder:
    device = device_of(coor)
    alone = make_model(device)
    if coor.is_master():  # nobody else has the file
        save_file(alone.state_dict(), Path(folder) / "model.safetensors")
    store = coor.store("process group")
    dist.init_process_group("drumline", store=store, rank=coor.rank, world_size=coor.world_size)
    if device != "cpu":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(
        device[:4].rstrip(":"), (coor.world_size,), mesh_dim_names=("dp_shard",)
    )
    with torch.device("meta"):
        model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    done = drumline.load_into(model, folder, coor, mesh=mesh, reader="rank0")

    inputs, targets = make_batch(24, device)
    loss_of(alone(inputs), targets).backward()
    mine = [whole.chunk(coor.world_size)[coor.rank] for whole in (inputs, targets)]
    share = len(mine[0]) * coor.world_size / len(inputs)  # FSDP averages over ranks, not over rows
    (loss_of(model(mine[0]), mine[1]) * share).backward()
    error = 0.0
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        error = max(error, (found.grad.full_tensor() - expected.grad).abs().max().item())
    assert error < 1e-5, error
    if coor.is_master():
        whole = sum(p.nbytes for p in alone.parameters())
        print(f"gradients equal one process's within {error:.0e}")
        print(f"rank 0 holds {done.share} of {whole} bytes, and sent {done.nbytes_sent}")
    dist.destroy_process_group()
