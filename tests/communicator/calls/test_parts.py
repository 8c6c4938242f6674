"""Parts of sizes that differ, as a backend of Python gets them."""

import torch

from communicator import Communicator
from communicator.backends.gloo import Gloo
from coordinator import Coordinator


class MovesParts(Gloo):
    def allgatherv(self, out, tensor, counts):
        for src, part in enumerate(torch.split(out, counts)):
            if src == self.rank:
                part.copy_(tensor.flatten())
            self.broadcast(part, src)

    def reduce_scatterv(self, out, tensor, counts, op):
        total = torch.empty_like(tensor)
        self.allreduce(total, tensor, op)
        out.copy_(torch.split(total, counts)[self.rank].view(out.shape))


def test_a_backend_of_python_gets_the_parts_flat_along_any_dim(ranks):
    """They had a shape that tells the dim, along whose first dim they cannot be split."""

    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, MovesParts) as comm:
            sizes, whole = [1, 2], torch.arange(6.0).view(2, 3)
            own = torch.split(whole, sizes, 1)[comm.rank]
            part = comm.reduce_scatter(whole, dim=1, sizes=sizes)
            return [
                comm.allgather(own.contiguous(), dim=1, sizes=sizes).equal(whole),
                part.equal(2 * own),
            ]

    assert ranks(body, 2) == [[True, True]] * 2
