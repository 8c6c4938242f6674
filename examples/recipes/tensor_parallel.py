"""Tensor parallel: every layer is cut; one allreduce per block makes the parts one model.

drumline run -n 2 examples/recipes/tensor_parallel.py
"""

from model import PLAN, device_of, largest_error, loss_of, make_batch, make_model

import drumline
from communicator import Communicator
from coordinator import Coordinator


def counted(collective, given):
    """The same collective, which writes down how many bytes this rank gives to it."""

    def call(tensor, **options):
        given.append(tensor.nbytes)
        return collective(tensor, **options)

    return call


with Coordinator() as coor, Communicator(coor) as comm:
    device = device_of(coor)
    alone, model = make_model(device), make_model(device)
    words, targets = make_batch(6, device)
    loss_of(expected := alone(words), targets).backward()

    given = []
    for name in ("allreduce", "allgather"):
        setattr(comm, name, counted(getattr(comm, name), given))
    splits = drumline.parallelize(model, PLAN, comm)
    logits = model(words)
    per_token, calls = sum(given) // words.numel(), len(given)
    loss_of(logits, targets).backward()

    mesh = drumline.Mesh({"tp": coor.world_size})
    parts = [
        drumline.local_shard(p.grad, splits[name], mesh, coor.rank)
        for name, p in alone.named_parameters()
    ]
    error = (logits - expected).abs().max().item()
    slope = largest_error([p.grad for p in model.parameters()], parts)
    assert error < 1e-5 and slope < 1e-5, (error, slope)
    if coor.is_master():
        held, whole = (sum(p.numel() for p in m.parameters()) for m in (model, alone))
        print(f"logits within {error:.0e}, gradients within {slope:.0e}")
        print(f"each rank holds {held} of {whole} parameters")
        print(f"{per_token} bytes per token into {calls} collectives of a forward pass")
