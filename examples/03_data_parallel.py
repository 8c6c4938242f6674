"""Train one model on all ranks: each takes its share of the batch, and the gradients are averaged.

drumline run -n 2 examples/03_data_parallel.py
"""

import torch

from communicator import Communicator
from coordinator import Coordinator

STEPS, BATCH, FEATURES = 200, 64, 8

with Coordinator() as coor, Communicator(coor, device_type="cpu") as comm:
    model = torch.nn.Linear(FEATURES, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            comm.broadcast(parameter)  # everybody starts from rank 0's
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    truth = torch.linspace(-1, 1, FEATURES)
    generator = torch.Generator().manual_seed(coor.rank)  # a share of its own
    for _ in range(STEPS):
        inputs = torch.randn(BATCH // coor.world_size, FEATURES, generator=generator)
        loss = (model(inputs).squeeze(1) - inputs @ truth).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            comm.allreduce(parameter.grad, "avg")
        optimizer.step()

    weights = comm.allgather(model.weight.detach())
    assert all(torch.equal(row, weights[0]) for row in weights), "the ranks drifted apart"
    error = (weights[0].squeeze() - truth).abs().max().item()
    assert error < 0.01, error
    if coor.is_master():
        print(f"{coor.world_size} ranks agree to the bit; largest error {error:.1e}")
