"""The public names: for type checkers and editors, and for __init__.py, which imports them."""

from coordinator.coordinator import Coordinator as Coordinator
from coordinator.errors import CoordinatorError as CoordinatorError
from coordinator.errors import CoordinatorTimeout as CoordinatorTimeout
from coordinator.errors import DrumlineError as DrumlineError
from coordinator.errors import FailureReason as FailureReason
from coordinator.errors import PeerLost as PeerLost
from coordinator.errors import RankFailure as RankFailure
from coordinator.errors import RemoteError as RemoteError
from coordinator.failure import hosts_view as hosts_view
from coordinator.failure import rank_view as rank_view
from coordinator.failure.subscription import Subscription as Subscription
from coordinator.peers import Peer as Peer
from coordinator.peers import group_by_node as group_by_node
from coordinator.timings import CoordinatorTimings as CoordinatorTimings
from coordinator.transport import object_codec as object_codec
from launcher import EncryptedSocket as EncryptedSocket
from launcher import link_state as link_state

__version__: str
