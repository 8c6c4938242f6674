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
from coordinator.failure import hosts_view, rank_view
from coordinator.failure.subscription import Subscription
from coordinator.peers import Peer, group_by_node
from coordinator.timings import CoordinatorTimings
from coordinator.transport import object_codec
from launcher import EncryptedSocket, link_state

__all__ = [
    "Coordinator",
    "CoordinatorError",
    "CoordinatorTimeout",
    "CoordinatorTimings",
    "DrumlineError",
    "EncryptedSocket",
    "FailureReason",
    "Peer",
    "PeerLost",
    "RankFailure",
    "RemoteError",
    "Subscription",
    "group_by_node",
    "hosts_view",
    "link_state",
    "object_codec",
    "rank_view",
]


def __getattr__(name: str) -> str:
    """Read `__version__` only when asked for, as the launcher does."""
    if name == "__version__":
        return str(launcher.__version__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
