"""Tensor parallel: every layer is cut; one allreduce per block makes the parts one model.

python -m launcher run -n 2 examples/recipes/tensor_parallel.py
"""

from model import PLAN, device_of, largest_error, loss_of, make_batch, make_model

import inference
from communicator import Communicator
from coordinator import Coordinator

with Coordinator() as coor, Communicator(coor) as comm:
    device = device_of(coor)
    alone, model = make_model(device), make_model(device)
    words, targets = make_batch(6, device)
    loss_of(expected := alone(words), targets).backward()

    splits = inference.parallelize(model, PLAN, comm)
    loss_of(logits := model(words), targets).backward()

    mesh = inference.Mesh({"tp": coor.world_size})
    parts = [
        inference.shard_of(p.grad, splits[name], mesh, coor.rank)
        for name, p in alone.named_parameters()
    ]
    error = (logits - expected).abs().max().item()
    slope = largest_error([p.grad for p in model.parameters()], parts)
    assert error < 1e-5 and slope < 1e-5, (error, slope)
    if coor.is_master():
        held, whole = (sum(p.numel() for p in m.parameters()) for m in (model, alone))
        print(f"logits within {error:.0e}, gradients within {slope:.0e}")
        print(f"each rank holds {held} of {whole} parameters")
