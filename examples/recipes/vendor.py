"""A vendor's backend: a class with send and recv, swapped in by one argument.

drumline run -n 2 examples/recipes/vendor.py
"""

import torch
from model import device_of, largest_error, loss_of, make_batch, make_model

from communicator import Backend, Communicator
from coordinator import Coordinator


class Mailbox(Backend):
    """Carries tensors in the Coordinator's store: slow, and a dozen lines."""

    name = "mailbox"

    @classmethod
    def probe(cls, coor):
        return 1

    def open(self):
        self.store, self.counts = self.coor.store("mailbox"), {}

    def _next(self, src, dst):
        self.counts[src, dst] = number = self.counts.get((src, dst), 0) + 1
        return f"{src}/{dst}/{number}"

    def send(self, tensor, dst):
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        self.store.set(self._next(self.rank, dst), data)

    def recv(self, tensor, src):
        data = bytearray(self.store.get(self._next(src, self.rank)))
        tensor.view(-1).copy_(torch.frombuffer(data, dtype=tensor.dtype))


def gradients(coor, backend):
    device = device_of(coor) if backend is None else "cpu"
    with Communicator(coor, backend) as comm:
        model = make_model(device)
        inputs, targets = (b.chunk(coor.world_size)[coor.rank] for b in make_batch(12, device))
        loss_of(model(inputs), targets).backward()
        for parameter in model.parameters():
            comm.allreduce(parameter.grad, "avg")
        return comm.backend, [p.grad.cpu() for p in model.parameters()]


with Coordinator() as coor:
    (ours, expected), (theirs, found) = gradients(coor, None), gradients(coor, Mailbox)
    error = largest_error(found, expected)
    assert error < 1e-6, error
    if coor.is_master():
        print(f"{theirs!r} in place of {ours!r}: the same gradients within {error:.0e}")
