"""Agreement of the ranks of a launch: small bytes, on the CPU, always with a deadline.

with Coordinator() as coor:
    config = coor.broadcast(b"lr=0.1" if coor.is_master() else None)
"""

import launcher
from coordinator.coordinator import Coordinator
from coordinator.errors import (
    CoordinatorError,
    CoordinatorTimeout,
    DrumlineError,
    FailureReason,
    PeerLost,
    RankFailure,
    RemoteError,
)
from coordinator.failure.subscription import Subscription
from coordinator.peers import Peer, group_by_node
from coordinator.timings import CoordinatorTimings

__all__ = [
    "Coordinator",
    "CoordinatorError",
    "CoordinatorTimeout",
    "CoordinatorTimings",
    "DrumlineError",
    "FailureReason",
    "Peer",
    "PeerLost",
    "RankFailure",
    "RemoteError",
    "Subscription",
    "group_by_node",
]

__version__ = launcher.__version__
