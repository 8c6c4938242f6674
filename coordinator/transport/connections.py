"""Connections between any two ranks of a group, authenticated at both ends.

The higher rank of a pair connects to the lower, which listens for as long as this takes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from coordinator.call_site import PendingCall
from coordinator.control.framing import Connection, pack, unpack
from coordinator.errors import CoordinatorError
from coordinator.peers import Peer
from coordinator.timings import MEETING_SHARE
from coordinator.transport.tree import ChildListener, connect_to_parent
from launcher import Credentials, NoMessage, linux

Exchange = Callable[[bytes], list[bytes]]


@dataclass(eq=False)
class PeerConnector:
    """Connects this rank to all its peers. Errors name ranks as in the launch.

    address: of this host, by which the peers reach it. rank: its place among the peers.
    name: of this set of connections, the same on all ranks. check: raises CoordinatorError if a
    peer will not come.
    """

    address: str
    credentials: Credentials
    rank: int
    peers: Sequence[Peer]
    name: str
    check: Callable[[], None]
    connections: dict[int, Connection] = field(default_factory=dict)

    def connect(self, exchange: Exchange, call: PendingCall) -> dict[int, socket.socket]:
        """The connections, by rank. exchange: an allgather over the peers. Collective."""
        higher = range(self.rank + 1, len(self.peers))
        purpose, credentials = self._purpose(self.rank), self.credentials
        listener = ChildListener(self.address, credentials, purpose, len(higher))
        try:
            with closing(listener):
                addresses = [unpack(data) for data in exchange(pack(list(listener.address)))]
                meeting = call.restarted(MEETING_SHARE * call.left_s)
                problem = self._connect(addresses, listener, meeting)
            problems = [data.decode() for data in exchange(problem.encode()) if data]
            if problems:
                me = self.peers[self.rank].rank
                raise CoordinatorError(
                    problem or f"rank {me} has no connections, for another has none: {problems[0]}"
                )
        except BaseException:
            for connection in (*self.connections.values(), *listener.accepted.values()):
                connection.close()
            raise
        for connection in self.connections.values():
            linux.left_to_children(connection, connection.socket)
        return {rank: connection.socket for rank, connection in self.connections.items()}

    def _purpose(self, listener: int) -> str:
        return f"connections/{self.name}/{listener}"

    def _connect(
        self, addresses: list[tuple[str, int]], listener: ChildListener, meeting: PendingCall
    ) -> str:
        """Connect to the lower ranks, and accept the higher; the problem, or nothing."""
        higher = range(self.rank + 1, len(self.peers))
        me, credentials = self.peers[self.rank], self.credentials
        try:
            for rank in range(self.rank):
                purpose, peer = f"{self._purpose(rank)}/{self.rank}", self.peers[rank]
                self.connections[rank] = connect_to_parent(
                    addresses[rank], credentials, me, peer, purpose, meeting.deadline, self.check
                )
            self.connections.update(listener.wait(higher, meeting.deadline, self.check))
        except CoordinatorError as error:
            return str(error)
        except NoMessage:
            late = [str(self.peers[rank]) for rank in higher if rank not in listener.accepted]
            return f"{me} waited {meeting.waited_s:.1f} s for {' and '.join(late)} to connect"
        return ""
