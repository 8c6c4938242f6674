"""Connections between any two ranks of a group, authenticated at both ends.

The higher rank of a pair connects to the lower, which listens for as long as this takes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from coordinator.control.framing import Connection, pack, unpack
from coordinator.errors import CoordinatorError
from coordinator.peers import Peer
from coordinator.transport.tree import ChildListener, connect_to_parent
from launcher import Credentials, NoMessage

Exchange = Callable[[bytes], list[bytes]]


class PeerConnector:
    """Connects this rank to all its peers. Errors name ranks as in the launch.

    address: of this host, by which the peers reach it. rank: its place among the peers.
    name: of this set of connections, the same on all ranks. check: raises CoordinatorError if a
    peer will not come.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        rank: int,
        peers: Sequence[Peer],
        name: str,
        check: Callable[[], None],
    ) -> None:
        self._address, self._credentials, self._check = address, credentials, check
        self._rank, self._peers, self._name = rank, peers, name
        self._connections: dict[int, Connection] = {}

    def connect(self, exchange: Exchange, timeout_s: float) -> dict[int, socket.socket]:
        """The connections, by rank. exchange: an allgather over the peers. Collective."""
        deadline = time.monotonic() + timeout_s
        higher = range(self._rank + 1, len(self._peers))
        purpose, credentials = self._purpose(self._rank), self._credentials
        with closing(ChildListener(self._address, credentials, purpose, len(higher))) as listener:
            addresses = [unpack(data) for data in exchange(pack(list(listener.address)))]
            problem = self._connect(addresses, listener, deadline, timeout_s)
        problems = [data.decode() for data in exchange(problem.encode()) if data]
        if problems:
            for connection in (*self._connections.values(), *listener.accepted.values()):
                connection.close()
            raise CoordinatorError(
                problem
                or f"rank {self._me.rank} has no connections, for another has none: {problems[0]}"
            )
        return {rank: connection.socket for rank, connection in self._connections.items()}

    def _purpose(self, listener: int) -> str:
        return f"connections/{self._name}/{listener}"

    @property
    def _me(self) -> Peer:
        return self._peers[self._rank]

    def _connect(
        self,
        addresses: list[tuple[str, int]],
        listener: ChildListener,
        deadline: float,
        timeout_s: float,
    ) -> str:
        """Connect to the lower ranks, and accept the higher; the problem, or nothing."""
        higher = range(self._rank + 1, len(self._peers))
        me, credentials = self._me, self._credentials
        try:
            for rank in range(self._rank):
                purpose, peer = f"{self._purpose(rank)}/{self._rank}", self._peers[rank]
                self._connections[rank] = connect_to_parent(
                    addresses[rank], credentials, me, peer, purpose, deadline, self._check
                )
            self._connections.update(listener.wait(higher, deadline, self._check))
        except CoordinatorError as error:
            return str(error)
        except NoMessage:
            late = [str(self._peers[rank]) for rank in higher if rank not in listener.accepted]
            return f"{me} waited {timeout_s:g} s for {' and '.join(late)} to connect"
        return ""
