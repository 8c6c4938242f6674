"""Data parallel training: every rank has the model and a share of the batch.

drumline run -n 2 examples/recipes/data_parallel.py
"""

from model import device_of, largest_error, loss_of, make_batch, make_model

from communicator import Communicator
from coordinator import Coordinator

BATCH = 24

with Coordinator() as coor, Communicator(coor) as comm:
    device = device_of(coor)
    model = make_model(device)
    batch = make_batch(BATCH, device)
    inputs, targets = (whole.chunk(coor.world_size)[coor.rank] for whole in batch)
    loss_of(model(inputs), targets).backward()
    share = len(inputs) / BATCH  # shares differ where the ranks do not divide the batch
    for parameter in model.parameters():
        comm.allreduce(parameter.grad.mul_(share))

    alone = make_model(device)
    loss_of(alone(batch[0]), batch[1]).backward()
    error = largest_error(
        [p.grad for p in model.parameters()], [p.grad for p in alone.parameters()]
    )
    assert error < 1e-5, error
    sent = sum(p.grad.nbytes for p in model.parameters())
    if coor.is_master():
        print(f"averaged gradients equal the full batch's within {error:.0e}")
        print(f"{sent} bytes of gradients reduced per step, whatever the batch")
