"""Move tensors among ranks, over whatever carries them best.

with Communicator(Coordinator()) as comm:
    comm.allreduce(torch.ones(4))
"""

from communicator.base import Communicator
from communicator.errors import CommunicatorError, CommunicatorTimeout, PeerLost, Unsupported
from communicator.selection import backend_class, backend_names

__all__ = [
    "Communicator",
    "CommunicatorError",
    "CommunicatorTimeout",
    "PeerLost",
    "Unsupported",
    "backend_class",
    "backend_names",
]
