"""The first ranks of each node, joined by connections of their own into a binomial tree.

A call goes up the tree, each node adding what its ranks gave, and comes down again, each node
getting what its ranks want. So a call costs every node a logarithm of messages, and the root sees
whether all are in the same call.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.addresses import shown
from coordinator.control.client import connect
from coordinator.control.framing import SMALL, Late, Link, LinkBroken, nothing
from coordinator.control.handshake import (
    MAX_VISITORS,
    Caller,
    Gate,
    NotAdmitted,
    Proof,
    TryAgain,
    purpose_of,
)
from coordinator.errors import CoordinatorError, CoordinatorTimeout
from coordinator.peers import Peer

EVERYWHERE = -1
RETRY_S = 0.05
TICK_S = 0.1


def parent_of(index: int) -> int:
    """The node above: without the lowest bit."""
    return index & (index - 1)


def children_of(index: int, size: int) -> list[int]:
    found, bit = [], 1
    while index | bit < size and not index & bit:
        found.append(index | bit)
        bit <<= 1
    return found


def subtree_of(index: int, size: int) -> range:
    """The nodes below, and itself: numbers that share its leading bits."""
    span = index & -index or size
    return range(index, min(index + span, size))


@dataclass(frozen=True)
class Entry:
    """What rank src, on node home, gives to rank dst (EVERYBODY: to all)."""

    home: int
    src: int
    dst: int
    data: bytes


def _distinct(headers: list[Any]) -> list[Any]:
    """One of each kind: who gave it, and the header, whose first part is what must be equal."""
    kinds: dict[Any, Any] = {}
    for index, header in headers:
        kinds.setdefault(tuple(header[0]), (index, header))
    return list(kinds.values())


def _is_for(goes_to: int, nodes: Container[int]) -> bool:
    return goes_to == EVERYWHERE or goes_to in nodes


class EdgeBroken(Exception):
    """The connection to a neighbour broke."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


class Tree:
    """This node's connections to its neighbours."""

    def __init__(self, index: int, size: int, parent: Link | None, children: dict[int, Link]):
        self.index, self.size = index, size
        self._parent, self._children = parent, children

    def exchange(
        self,
        header: Any,
        entries: list[Entry],
        goes_to: Callable[[Entry], int],
        deadline: float,
        idle: Callable[[], None],
    ) -> tuple[list[Any], list[Entry]]:
        """The headers that differ, each with a node that gave it; the entries this node wants.

        goes_to(entry): which node wants it, or EVERYWHERE. Of equal headers one goes on, so that a
        call in which all nodes agree has messages of one size, however many nodes there are.
        """
        headers = [(self.index, header)]
        for index, child in self._children.items():
            their_headers, theirs = self._receive(index, child, deadline, idle)
            headers = _distinct([*headers, *their_headers])
            entries = entries + theirs
        if self._parent is not None:
            above = parent_of(self.index)
            self._send(above, self._parent, (headers, entries), deadline, idle)
            headers, brought = self._receive(above, self._parent, deadline, idle)
            entries = entries + brought
        for index, child in self._children.items():
            below = subtree_of(index, self.size)
            theirs = [entry for entry in entries if entry.home not in below]
            for_them = [entry for entry in theirs if _is_for(goes_to(entry), below)]
            self._send(index, child, (headers, for_them), deadline, idle)
        return headers, [entry for entry in entries if _is_for(goes_to(entry), (self.index,))]

    def _send(
        self,
        index: int,
        link: Link,
        message: tuple[list[Any], list[Entry]],
        deadline: float,
        idle: Callable[[], None],
    ) -> None:
        """The small entries within the message, the large after it: those are not copied."""
        headers, entries = message
        large = [entry.data for entry in entries if len(entry.data) > SMALL]
        listed = [
            (
                entry.home,
                entry.src,
                entry.dst,
                len(entry.data) if len(entry.data) > SMALL else entry.data,
            )
            for entry in entries
        ]
        try:
            link.send((headers, listed), deadline, idle)
            for data in large:
                link.write(data, deadline, idle)
        except LinkBroken as error:
            raise EdgeBroken(index, str(error)) from error

    def _receive(
        self, index: int, link: Link, deadline: float, idle: Callable[[], None]
    ) -> tuple[list[Any], list[Entry]]:
        try:
            headers, listed = link.receive(deadline, idle)
            entries = []
            for home, src, dst, data in listed:
                if isinstance(data, int):
                    data = link.read_bytes(data, deadline, idle)
                entries.append(Entry(home, src, dst, data))
            return headers, entries
        except (LinkBroken, Late) as error:
            raise EdgeBroken(index, str(error)) from error

    def close(self) -> None:
        for link in [*self._children.values(), *([self._parent] if self._parent else [])]:
            link.close()


class Door:
    """Where the children of a node come in while a group is being made."""

    def __init__(self, address: str, proof: Proof, purpose: str, children: Sequence[int]) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._purposes = {purpose_of(f"{purpose}/{child}"): child for child in children}
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((address, 0))
        most = max(MAX_VISITORS, len(children))  # who may all come at once
        self._listener.listen(most)
        self.address: tuple[Any, ...] = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._gate = Gate(self._listener, proof, self._selector, self._admit, most=most)
        self.came: dict[int, Link] = {}

    def _admit(self, connection: socket.socket, caller: Caller) -> None:
        child = self._purposes.get(caller.purpose)
        if child is None or child in self.came:
            connection.close()
        else:
            self.came[child] = Link(connection)

    def wait(self, deadline: float, idle: Callable[[], None]) -> dict[int, Link]:
        """The children, once all are there. Raises Late; the missing are those not in `came`."""
        while len(self.came) < len(self._purposes):
            self._gate.handle(self._selector.select(TICK_S))
            self._gate.tick()
            idle()
            if time.monotonic() >= deadline:
                raise Late("not all came")
        return {child: self.came[child] for child in sorted(self.came)}

    def close(self) -> None:
        self._gate.close()
        self._selector.close()
        self._listener.close()


def climb(
    address: Sequence[Any],
    proof: Proof,
    me: Peer,
    to: Peer,
    purpose: str,
    deadline: float,
    idle: Callable[[], None] = nothing,
) -> Link:
    """The connection to the node above, whose Door is at address."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    caller = Caller(me.rank, purpose_of(purpose))
    while True:
        try:
            target = (address[0], address[1])
            return connect(family, target, proof, caller, deadline)
        except NotAdmitted as error:
            raise CoordinatorError(
                f"rank {me.rank} was not let in by {to} at {shown(target)}: {error}"
            ) from error
        except (TryAgain, OSError) as error:
            why = str(error)
        if time.monotonic() >= deadline:
            raise CoordinatorTimeout(
                f"rank {me.rank} (host {me.host}, address {me.address}) cannot reach {to} at "
                f"{shown(target)} ({why}), so the two nodes cannot exchange anything. Check the "
                "route and the firewall between those two addresses; ranks reach each other by the "
                "address by which they reach master_addr."
            )
        idle()
        time.sleep(RETRY_S)
