"""A script for `accelerate launch`: a training loop over a sharded data set."""

import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
world_size = int(os.environ["WORLD_SIZE"])
assert accelerator.num_processes == world_size > 1, accelerator.state
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
assert len(data) * world_size == 8
for inputs, labels in data:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), labels))
    optimizer.step()
weights = accelerator.gather(next(model.parameters()).detach())
assert torch.equal(weights[0], weights[-1])
print(f"trained as {accelerator.process_index} of {accelerator.num_processes}")
accelerator.end_training()
