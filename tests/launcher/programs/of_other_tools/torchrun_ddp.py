"""A script for torchrun: its ranks train one model by DistributedDataParallel."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

backend = sys.argv[1] if len(sys.argv) > 1 else "gloo"
if backend == "drumline":
    import communicator.torch_backend  # noqa: F401

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
assert 0 <= local_rank < local_world_size <= world_size
assert int(os.environ["GROUP_RANK"]) == 0
dist.init_process_group(backend)
assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
assert dist.is_torchelastic_launched()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.full((2, 3), float(rank))).sum().backward()
optimizer.step()
weights = [torch.zeros(1, 3) for _ in range(world_size)]
dist.all_gather(weights, model.module.weight.detach())
assert all(torch.equal(weight, weights[0]) for weight in weights)
dist.barrier()
dist.destroy_process_group()
print(f"trained as {rank} of {world_size}")
