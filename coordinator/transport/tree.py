"""A binomial tree over the first ranks of the nodes, for collective calls between nodes.

A call goes up the tree, each node adding the entries of its ranks, and comes down again, each node
getting the entries for its ranks. So a call costs every node a logarithm of messages, and the root
sees whether all nodes are in the same call.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

from coordinator.binomial_tree import parent_of, subtree_of
from coordinator.control.client import connect
from coordinator.control.framing import Connection
from coordinator.errors import CoordinatorError, CoordinatorTimeout
from coordinator.peers import Peer
from coordinator.timings import DEFAULT
from launcher import (
    MAX_PENDING,
    SMALL,
    AuthenticatedListener,
    ConnectionBroken,
    Credentials,
    Hello,
    NoMessage,
    NotReady,
    Rejected,
    host_addresses,
    listener_at,
    noop,
    purpose_of,
)

ALL_NODES = -1
"""The dst_node of an entry that every node needs."""


class Entry(NamedTuple):
    """Data that rank src, on node src_node, gives to rank dst (-1: to all ranks)."""

    src_node: int
    src: int
    dst: int
    data: bytes


def listed(entries: Iterable[Entry], most: int) -> list[tuple[Any, ...]]:
    """Entries as they are sent: in place of data of more than `most` bytes how many they are."""
    return [(*ranks, data if len(data) <= most else len(data)) for *ranks, data in entries]


def distinct(headers: list[Any]) -> list[Any]:
    """One of each kind: its node, and the header, whose first part is what must be equal."""
    kinds: dict[Any, Any] = {}
    for index, header in headers:
        kinds.setdefault(tuple(header[0]), (index, header))
    return list(kinds.values())


def _is_needed_in(nodes: Container[int], dst_node: int) -> bool:
    return dst_node == ALL_NODES or dst_node in nodes


class TreeLinkBroken(Exception):
    """The connection to a neighbour in the tree broke. index: its node, or -1 if nobody knows."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


class Tree:
    """This node's connections to its neighbours in the tree."""

    def __init__(
        self, index: int, size: int, parent: Connection | None, children: dict[int, Connection]
    ) -> None:
        self.index, self.size = index, size
        self._parent, self._children = parent, children

    def exchange(
        self,
        header: Any,
        entries: list[Entry],
        dst_node_of: Callable[[Entry], int],
        deadline: float,
        idle: Callable[[], None],
    ) -> tuple[list[Any], list[Entry]]:
        """The headers that differ, each with a node that gave it, and this node's entries.

        dst_node_of(entry): the node that needs it, or ALL_NODES. Of equal headers one goes on, so
        that a call in which all nodes agree has messages of one size, however many nodes there are.
        """
        headers = [(self.index, header)]
        for index, child in self._children.items():
            child_headers, child_entries = self._receive(index, child, deadline, idle)
            headers = distinct([*headers, *child_headers])
            entries = entries + child_entries
        if self._parent is not None:
            parent = parent_of(self.index)
            self._send(parent, self._parent, (headers, entries), deadline, idle)
            # The parent sends the entries of all nodes but this subtree's, which are here already.
            headers, from_above = self._receive(parent, self._parent, deadline, idle)
            entries = entries + from_above
        for index, child in self._children.items():
            subtree = subtree_of(index, self.size)
            others = [entry for entry in entries if entry.src_node not in subtree]
            for_child = [entry for entry in others if _is_needed_in(subtree, dst_node_of(entry))]
            self._send(index, child, (headers, for_child), deadline, idle)
        return headers, [
            entry for entry in entries if _is_needed_in((self.index,), dst_node_of(entry))
        ]

    def _send(
        self,
        index: int,
        connection: Connection,
        message: tuple[list[Any], list[Entry]],
        deadline: float,
        idle: Callable[[], None],
    ) -> None:
        """The small entries go within the message, the large after it: those are not copied."""
        headers, entries = message
        try:
            connection.send((headers, listed(entries, SMALL)), deadline, idle)
            for entry in entries:
                if len(entry.data) > SMALL:
                    connection.write(entry.data, deadline, idle)
        except ConnectionBroken as error:
            raise TreeLinkBroken(index, str(error)) from error

    def _receive(
        self, index: int, connection: Connection, deadline: float, idle: Callable[[], None]
    ) -> tuple[list[Any], list[Entry]]:
        try:
            headers, announced = connection.receive(deadline, idle)
            entries = []
            for fields in announced:
                if isinstance(fields[-1], int):
                    fields[-1] = connection.read_exactly(fields[-1], deadline, idle)
                entries.append(Entry(*fields))
            return headers, entries
        except (ConnectionBroken, NoMessage) as error:
            raise TreeLinkBroken(index, str(error)) from error

    def close(self) -> None:
        for connection in self._children.values():
            connection.close()
        if self._parent is not None:
            self._parent.close()


class ChildListener:
    """Accepts the connections of a node's children while a group is being made.

    most: of them. accepted: those that have come, by child.
    """

    def __init__(self, address: str, credentials: Credentials, purpose: str, most: int = 0) -> None:
        self._purpose = purpose
        self._children: dict[bytes, int] = {}  # by the purpose of their connections
        self._listener = listener_at((address, 0))
        max_pending = max(MAX_PENDING, most)  # who may all come at once
        self.address: tuple[Any, ...] = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._authenticator = AuthenticatedListener(
            self._listener, credentials, self._selector, self._add, max_pending=max_pending
        )
        self.accepted: dict[int, Connection] = {}

    def _add(self, connection: socket.socket, hello: Hello) -> None:
        child = self._children.get(hello.purpose)
        if child is None or child in self.accepted:
            connection.close()
        else:
            self.accepted[child] = Connection(connection)

    def wait(
        self, children: Iterable[int], deadline: float, idle: Callable[[], None]
    ) -> dict[int, Connection]:
        """The children's connections, once all are here. Raises NoMessage; those that are missing
        are not in `accepted`."""
        self._children = {purpose_of(f"{self._purpose}/{child}"): child for child in children}
        while len(self.accepted) < len(self._children):
            self._authenticator.handle(self._selector.select(DEFAULT.idle_s))
            self._authenticator.tick()
            idle()
            if time.monotonic() >= deadline:
                raise NoMessage("not all came")
        return {child: self.accepted[child] for child in sorted(self.accepted)}

    def close(self) -> None:
        self._authenticator.close()
        self._selector.close()
        self._listener.close()


def connect_to_parent(
    address: Sequence[Any],
    credentials: Credentials,
    me: Peer,
    parent: Peer,
    purpose: str,
    deadline: float,
    idle: Callable[[], None] = noop,
) -> Connection:
    """A connection to a peer whose ChildListener is at address; tries until the deadline."""
    hello = Hello(me.rank, purpose_of(purpose))
    target = (address[0], address[1])
    place = host_addresses.endpoint(*target)
    while True:
        try:
            return connect(target, credentials, hello, deadline, idle)
        except Rejected as error:
            raise CoordinatorError(
                f"rank {me.rank} was rejected by {parent} at {place}: {error}"
            ) from error
        except (NotReady, OSError) as error:
            why = str(error)
        if time.monotonic() >= deadline:
            raise CoordinatorTimeout(
                f"rank {me.rank} (host {me.host}, address {me.address}) cannot reach {parent} at "
                f"{place} ({why}), so the two nodes cannot exchange anything. "
                "Check the route and the firewall between those two addresses; ranks reach each "
                "other by the address by which they reach master_addr."
            )
        idle()
        time.sleep(DEFAULT.connect_retry_s)
