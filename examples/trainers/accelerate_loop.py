"""Accelerate on drumline: it uses the process group that is there, so make that before it.

torchrun --nproc-per-node 2 examples/trainers/accelerate_loop.py
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import communicator.torch_backend  # noqa: F401  only needed where drumline is not installed

dist.init_process_group("drumline")
accelerator = Accelerator(cpu=not torch.cuda.is_available())

torch.manual_seed(0)
model, truth = torch.nn.Linear(8, 1), torch.linspace(-1, 1, 8)
inputs = torch.randn(256, 8)
data = DataLoader(TensorDataset(inputs, inputs @ truth), batch_size=16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for _ in range(20):
    for features, target in data:
        loss = (model(features).squeeze(1) - target).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()

weights = accelerator.gather(next(model.parameters()).detach())
error = (weights - truth.to(weights)).abs().max().item()
assert accelerator.num_processes == dist.get_world_size()
assert error < 0.01, error
accelerator.print(f"{accelerator.num_processes} ranks agree; largest error {error:.1e}")
dist.destroy_process_group()
