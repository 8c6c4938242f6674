"""Tensor parallel inside, data parallel outside: a mesh of two axes, a communicator along each.

drumline run -n 4 examples/recipes/tensor_and_data.py
"""

from model import PLAN, device_of, largest_error, loss_of, make_batch, make_model

import drumline
from communicator import Communicator
from coordinator import Coordinator

BATCH = 24

with Coordinator() as coor:
    tp = 2 if coor.world_size % 2 == 0 else 1
    mesh = drumline.Mesh({"dp": coor.world_size // tp, "tp": tp})
    device, place = device_of(coor), mesh.coordinate(coor.rank)
    with (
        coor.split(mesh.group(coor.rank, "tp")) as tp_group,
        coor.split(mesh.group(coor.rank, "dp")) as dp_group,
        Communicator(tp_group) as along_tp,
        Communicator(dp_group) as along_dp,
    ):
        alone, model = make_model(device), make_model(device)
        inputs, targets = make_batch(BATCH, device)
        loss_of(alone(inputs), targets).backward()

        splits = drumline.parallelize(model, PLAN, along_tp)
        rows = [whole.chunk(mesh.axis_size("dp"))[place["dp"]] for whole in (inputs, targets)]
        loss_of(model(rows[0]), rows[1]).backward()
        for parameter in model.parameters():
            along_dp.allreduce(parameter.grad.mul_(len(rows[0]) / BATCH))

        parts = [
            drumline.local_shard(p.grad, splits[name], mesh, coor.rank)
            for name, p in alone.named_parameters()
        ]
        error = largest_error([p.grad for p in model.parameters()], parts)
        assert error < 1e-5, error
    if coor.is_master():
        print(f"{dict(mesh.axes)}: gradients equal one process's within {error:.0e}")
