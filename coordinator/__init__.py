"""How the ranks of a launch agree: small bytes, on the CPU, always with a deadline.

with Coordinator() as coor:
    config = coor.broadcast(b"lr=0.1" if coor.is_master() else None)
"""

from coordinator.coordinator import Coordinator
from coordinator.errors import CoordinatorError, CoordinatorTimeout, PeerLost
from coordinator.peers import Peer, nodes

__all__ = ["Coordinator", "CoordinatorError", "CoordinatorTimeout", "Peer", "PeerLost", "nodes"]
