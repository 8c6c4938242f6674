"""A connection between any two ranks of a group, at whose ends both have proved who they are.

The higher rank of a pair calls the lower, which listens for as long as this takes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from coordinator.control.framing import Late, Link, pack, unpack
from coordinator.control.session import Session
from coordinator.errors import CoordinatorError, PeerLost
from coordinator.peers import Peer
from coordinator.transport.tree import Door, climb

Exchange = Callable[[bytes], list[bytes]]


class Crossing:
    """This rank among its peers, who all connect to each other.

    rank: its place among the peers. Errors name ranks as in the launch.
    """

    def __init__(self, session: Session, rank: int, peers: Sequence[Peer], name: str) -> None:
        self._session, self._rank, self._peers, self._name = session, rank, peers, name

    def connect(self, exchange: Exchange, timeout_s: float) -> dict[int, socket.socket]:
        """The connections, by rank. exchange: an allgather over the peers. Collective."""
        deadline = time.monotonic() + timeout_s
        found: dict[int, Link] = {}
        callers = range(self._rank + 1, len(self._peers))
        address = self._session.client.local_address
        with closing(
            Door(address, self._session.proof, self._purpose(self._rank), callers)
        ) as door:
            doors = [unpack(data) for data in exchange(pack(list(door.address)))]
            problem = self._meet(doors, door, found, deadline, timeout_s)
        problems = [data.decode() for data in exchange(problem.encode()) if data]
        if problems:
            for link in (*found.values(), *door.came.values()):
                link.close()
            raise CoordinatorError(
                problem
                or f"rank {self._me.rank} has no connections, for another has none: {problems[0]}"
            )
        return {rank: link.socket for rank, link in found.items()}

    def _purpose(self, listener: int) -> str:
        return f"connections/{self._name}/{listener}"

    @property
    def _me(self) -> Peer:
        return self._peers[self._rank]

    def _meet(
        self,
        doors: list[tuple[str, int]],
        door: Door,
        found: dict[int, Link],
        deadline: float,
        timeout_s: float,
    ) -> str:
        """Fill found; what went wrong, or nothing."""
        callers = range(self._rank + 1, len(self._peers))
        me, proof = self._me, self._session.proof
        try:
            for rank in range(self._rank):
                purpose, peer = f"{self._purpose(rank)}/{self._rank}", self._peers[rank]
                found[rank] = climb(
                    doors[rank], proof, me, peer, purpose, deadline, self._check_alive
                )
            found.update(door.wait(deadline, self._check_alive))
        except CoordinatorError as error:
            return str(error)
        except Late:
            late = [str(self._peers[rank]) for rank in callers if rank not in door.came]
            return f"{me} waited {timeout_s:g} s for {' and '.join(late)} to connect"
        return ""

    def _check_alive(self) -> None:
        lost = self._session.lost
        gone = [str(peer) for peer in self._peers if peer.rank in lost or peer.is_known_dead()]
        if gone:
            raise PeerLost(
                f"rank {self._me.rank} was connecting to its peers, but gone are "
                f"{', '.join(gone)}. Look at what they printed last."
            )
