"""How the ranks of a launch agree: small bytes, on the CPU, always with a deadline.

with Coordinator() as coor:
    config = coor.broadcast(b"lr=0.1" if coor.is_master() else None)
"""

from coordinator.coordinator import Coordinator
from coordinator.errors import CoordinatorError, CoordinatorTimeout, DrumlineError, PeerLost
from coordinator.peers import Peer, group_by_node

__all__ = [
    "Coordinator",
    "CoordinatorError",
    "CoordinatorTimeout",
    "DrumlineError",
    "Peer",
    "PeerLost",
    "group_by_node",
]
