"""Ranks of one node, through shared memory.

comm = Communicator(coor, backend="shm")
comm.allreduce(torch.ones(4))
"""

from __future__ import annotations

import os

from communicator.backend import Capabilities
from communicator.backends.plugin import PluginBackend
from communicator.errors import Unsupported
from coordinator import Coordinator


class Shm(PluginBackend):
    """Ranks of one node through shared memory: processes or threads, any number of them.

    instructions: "plain", "avx2" or "avx512" for the code that adds, of what the processor has;
        the best if not given.
    stores: "ordinary" or "streaming" for those that hand tensors over; measured if not given. The
        results have the same bits with any.
    """

    name = "shm"
    path = os.path.join(os.path.dirname(__file__), "_shm.abi3.so")
    capabilities = Capabilities(compares_every_call=True)
    is_trusted = True
    agrees_in_init = True

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        score = super().probe(coor)
        if len({peer.memory for peer in coor.peers}) > 1:
            raise Unsupported("its ranks must be of one user and see each other in /proc")
        return score
