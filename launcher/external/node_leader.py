"""The first node of a launch whose nodes have a command each: it has ranks started on all.

leader = NodeLeader(job)
launcher.Launch(leader.begin(leader.gather([0, 1], None, has_ended)))

Nobody is heard before having proved the token of the launch. A leader that stays starts ranks again
and again, with the nodes that are there. Both ends speak every few seconds then. A node whose ranks
have ended says so; one that has lost its connection ends them, and comes again, until it hears that
the leader ends.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import launcher
from launcher import ports, timings
from launcher.authentication.encryption import encryption_problem
from launcher.authentication.framed_connection import ConnectionBroken
from launcher.authentication.handshake import AuthenticatedListener, Handler, Hello
from launcher.errors import TIMEOUT_CODE, LaunchTimeout
from launcher.external.node_messages import (
    ASKS,
    NodeChannel,
    NodeDescription,
    notice,
    placed,
    token_of,
)
from launcher.job import LOOPBACK, Job, new_launch_id
from launcher.launch_info import MAX_PORT
from launcher.launch_secret import NBYTES
from launcher.system import host_addresses
from launcher.system.host_addresses import endpoint
from launcher.system.link_state import remote_host

MAX_NAMES = 16  # of nodes in a line
STRANGER_LINE_S = 1.0  # between two lines that strangers can cause
STRANGER_LINE_LENGTH = 500


@dataclass
class _NodeConnection:
    """A connection to the first node of one that has the token. node: what it launches, once it has
    said so. is_told: that all have come, or of the end. heard_s: when it last spoke."""

    channel: NodeChannel
    address: str
    node: NodeDescription | None = None
    is_told: bool = False
    heard_s: float = field(default_factory=time.monotonic)

    @property
    def is_open(self) -> bool:
        return self.channel.socket.fileno() >= 0

    def send(self, **message: Any) -> None:
        """Send a message; a node that has lost its connection will see so."""
        with contextlib.suppress(ConnectionBroken):
            self.channel.send(**message)


def listening_addresses(address: str, port: int) -> list[str]:
    """The addresses of this node that master_addr means: of a name, not the loopback."""
    with contextlib.suppress(socket.gaierror, UnicodeError):
        records = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        texts = [str(record[0]) for *_, record in records]
        if address not in texts:  # a name
            outside = [text for text in texts if not text.startswith("127.") and text != "::1"]
            routable = host_addresses.routable_addresses()
            return list(dict.fromkeys(outside or routable or texts))
    return [address]


class NodeLeader:
    """The first node: waits for the others once, or if it stays, whenever ranks are started again.

    It listens if the job has several nodes, and then needs the job's token. One thread at a time
    may use it, and calls step() at least every node_status_s. Raises OSError where it cannot listen
    or encrypt.

    ranks_of_nodes: on each node, as it last came; 0 before.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.port = job, job.master_port or ports.NODES_PORT
        self.me = NodeDescription.of(0, job.nnodes, job.nprocs, job.command)
        self.selector = selectors.DefaultSelector()
        self._begun: list[int] | None = None  # the other nodes whose ranks were started last
        self._holder: socket.socket | None = None  # keeps the port of these ranks
        self._status_at = time.monotonic() + timings.TIMINGS.node_status_s
        self.nodes: dict[int, _NodeConnection] = {}
        self.gone: set[int] = set()  # the nodes that have heard that all have come
        self.ranks_of_nodes = [job.nprocs] + [0] * (job.nnodes - 1)
        self._numbered: dict[int, tuple[str, int]] = {}  # host and pid, the oldest first
        self._last_line_s = 0.0  # when a stranger last caused one
        self._authenticators: list[AuthenticatedListener] = []
        with contextlib.ExitStack() as opened:
            for listener in self._listeners():
                opened.enter_context(listener)
            self._opened = opened.pop_all()

    def _listeners(self) -> Iterator[socket.socket]:
        if self.job.nnodes == 1:
            return
        credentials = token_of(self.job).credentials()
        if credentials.encrypts and (problem := encryption_problem()):
            raise OSError(None, f"{problem}, or start all nodes with --insecure")
        for address in listening_addresses(self.job.master_addr, self.port):
            listener = ports.listen(self.job.launch_id, address, self.port)
            yield listener
            self._authenticators.append(
                AuthenticatedListener(
                    listener, credentials, self.selector, self._welcome, timings=timings.TIMINGS
                )
            )

    @property
    def missing(self) -> list[int]:
        here = {*self.nodes, *self.gone}
        return [node for node in range(1, self.job.nnodes) if node not in here]

    def step(self, timeout_s: float, awaited: Sequence[int] = ()) -> None:
        """Hear the other nodes, for at most timeout_s; tell the user, and them, who is awaited."""
        ready = self.selector.select(max(0.0, min(self._status_at - time.monotonic(), timeout_s)))
        for authenticator in self._authenticators[:1]:  # it serves all that were registered
            authenticator.handle(ready)
        if time.monotonic() >= self._status_at:
            self._status_at = time.monotonic() + timings.TIMINGS.node_status_s
            text = f"waiting for {self._names(awaited)}; {self._seen()}" if awaited else ""
            if text:
                notice(text)
            for authenticator in self._authenticators:
                authenticator.tick()
            for connection in list(self.nodes.values()):
                connection.send(waiting=text)
                limit_s = timings.borne_s(3 * timings.TIMINGS.node_status_s)
                if time.monotonic() - connection.heard_s > limit_s:
                    self._drop(connection)

    def meet(self, limit_s: float) -> Job:
        """The job of this node's ranks, once all others have come, and have heard so."""
        deadline = time.monotonic() + limit_s
        launch_id, values = self.job.launch_id, None
        while len(self.gone) < self.job.nnodes - 1:
            awaited = self.missing or sorted(self.nodes)
            self.step(deadline - time.monotonic(), awaited)
            if not self.missing:
                values = values or self._values(
                    launch_id, range(self.job.nnodes), self.job.master_port
                )
                self._start(values, range(1, self.job.nnodes))
            if time.monotonic() >= deadline and (self.missing or self.nodes):
                self._give_up(limit_s)
        return placed(self.job, {**(values or {}), "node_rank": 0})

    def _give_up(self, limit_s: float) -> None:
        awaited = self._names(self.missing or sorted(self.nodes))
        can_join = token_of(self.job).is_secret  # it obeys nobody else
        join = f"`drumline join {self._place}` there, or " * can_join
        error = LaunchTimeout(
            f"{awaited} did not come within {limit_s:g} s ({self._seen()}). Type {join}the same "
            f"command with its own --node-rank, or check that a firewall lets it reach "
            f"{self._place}. --timeout SECONDS waits for another time.",
            (),
            TIMEOUT_CODE,
        )
        for connection in self.nodes.values():
            connection.send(end=str(error), code=error.exit_code)
        raise error

    def close(self) -> None:
        for authenticator in self._authenticators:
            authenticator.close()
        for key in list(self.selector.get_map().values()):  # the nodes
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()
        self._opened.close()
        self._release_port()

    # -- while it stays --

    def gather(
        self, nodes: Iterable[int], limit_s: float | None, has_ended: Callable[[], bool]
    ) -> list[int]:
        """All nodes without ranks, this one first, once these are, or at the limit, or at the end.

        limit_s: None for that of every launch, at which LaunchTimeout is raised.
        """
        deadline = time.monotonic() + (limit_s or timings.TIMINGS.node_wait_s)
        while (awaited := sorted({*nodes} - {*self._free()})) and not has_ended():
            if (left_s := deadline - time.monotonic()) <= 0:
                if limit_s is None:
                    self._give_up(timings.TIMINGS.node_wait_s)
                break
            self.step(min(left_s, timings.TIMINGS.backend_poll_s), awaited)
        return self._free()

    def _free(self) -> list[int]:
        return [0, *sorted(node for node in self.nodes if not self.nodes[node].is_told)]

    def begin(self, nodes: Sequence[int]) -> Job:
        """Have ranks started on these nodes, of which 0 is this one; the job for those here."""
        self._begun = [node for node in nodes if node]
        self._release_port()
        if not self._begun:
            place: Any = {"nnodes": 1, "master_addr": LOOPBACK, "master_port": 0}
            return replace(self.job, **place, launch_id=new_launch_id())
        later, earlier = range(self.port + 1, MAX_PORT + 1), range(ports.FIRST_PORT, self.port)
        self._holder = ports.reserve([*later, *earlier])
        values = self._values(new_launch_id(), nodes, self._holder.getsockname()[1])
        self._start(values, self._begun)
        return placed(self.job, {**values, "node_rank": 0})

    def _values(self, launch_id: str, nodes: Sequence[int], master_port: int) -> dict[str, Any]:
        """The facts about a launch over these nodes that each of them is told."""
        ranks = [self.ranks_of_nodes[node] for node in nodes]
        return {
            "launch_id": launch_id,
            "nnodes": len(ranks),
            **ports.of_nodes(launch_id, master_port),
            "ranks_of_nodes": ranks,
            "secret": os.urandom(NBYTES).hex(),
        }

    def _start(self, values: dict[str, Any], nodes: Iterable[int]) -> None:
        for number, node in enumerate(nodes, 1):
            connection = self.nodes.get(node)
            if connection is not None and not connection.is_told:
                connection.is_told = True
                connection.send(go={**values, "node_rank": number})

    def _release_port(self) -> None:
        if self._holder is not None:
            self._holder.close()
            self._holder = None

    def has_lost_a_node(self) -> bool:
        """True if a node whose ranks were started has gone, or its ranks have ended."""
        begun = self._begun or ()
        return any(node not in self.nodes or not self.nodes[node].is_told for node in begun)

    def stop(self) -> None:
        """Have the other nodes end the ranks that were started."""
        for connection in self.nodes.values():
            if connection.is_told:
                connection.send(stop=True)

    def end(self, text: str) -> None:
        """Tell all other nodes that this one ends, and wait a while for them to hear it.

        text: why; "" if that is not an error, and their commands end well, too.
        """
        deadline = time.monotonic() + timings.TIMINGS.node_end_s
        for connection in self.nodes.values():
            connection.is_told = False
        while self.nodes and (left_s := deadline - time.monotonic()) > 0:
            for connection in self.nodes.values():
                if not connection.is_told:
                    connection.is_told = True
                    connection.send(end=text, code=int(bool(text)))
            self.step(left_s)

    # -- the other nodes --

    @property
    def _place(self) -> str:
        return endpoint(self.job.master_addr, self.port)

    def _names(self, nodes: Sequence[int]) -> str:
        """The nodes that are awaited, and where: "node 1 of 2 at 10.0.0.1:29600"."""
        plural, names = "s" * (len(nodes) > 1), ", ".join(map(str, nodes[:MAX_NAMES]))
        names += f" and {len(nodes) - MAX_NAMES} others" * (len(nodes) > MAX_NAMES)
        return f"node{plural} {names} of {self.job.nnodes} at {self._place}"

    def _seen(self) -> str:
        return f"nodes seen: {len(self.nodes) + len(self.gone)}"

    def _welcome(self, accepted: socket.socket, _: Hello) -> None:
        """Take over the connection of a node that has proved that it knows the token."""
        connection = _NodeConnection(NodeChannel(accepted), remote_host(accepted))
        handler = Handler(lambda _: self._receive(connection), lambda: self._drop(connection))
        self.selector.register(accepted, selectors.EVENT_READ, handler)

    def _receive(self, connection: _NodeConnection) -> None:
        try:
            while connection.is_open and (message := connection.channel.next(0)) is not None:
                connection.heard_s = time.monotonic()
                self._hear(connection, message)
        except ConnectionBroken:
            self._drop(connection)

    def _hear(self, connection: _NodeConnection, message: dict[str, Any]) -> None:
        if connection.node is None:
            try:
                node = NodeDescription.from_json(message.get("node"))
            except ValueError as error:  # of another version, as it has the token
                connection.send(problem=f"{error} of drumline {launcher.__version__}")
                return self._drop(connection)
            self._greet(connection, node)
        elif "gone" in message:
            self.gone.add(connection.node.node_rank)
            self._drop(connection)
        elif "free" in message:
            connection.is_told = False
            if connection.node.node_rank not in (self._begun or ()):
                self._note_return(connection)

    def _greet(self, connection: _NodeConnection, node: NodeDescription) -> None:
        """Take in a node that belongs to this launch; tell it and the user if it does not."""
        old = self.nodes.get(node.node_rank)
        if old is not None and old.node == node:  # the link was cut, and this end has not seen it
            self._close(old)
        asks = node.nnodes == 0
        node = replace(node, node_rank=self._number(node)) if node.node_rank == ASKS else node
        problem = self.me.difference(node) or self._problem(node)
        answer = {"node_rank": node.node_rank, "nnodes": self.job.nnodes, "host": self.me.host}
        answer |= {"command": self.job.command} if asks else {}
        connection.send(**answer, problem=problem)
        if problem:
            self._tell(f"{node} came from {connection.address}, and was sent away: {problem}")
        if problem or asks:
            return self._drop(connection)
        connection.node = node
        self.nodes[node.node_rank] = connection
        self.ranks_of_nodes[node.node_rank] = node.nprocs
        self.gone.discard(node.node_rank)  # it comes again
        if old is None or old.node != node:
            self._note_return(connection)

    def _tell(self, text: str) -> None:
        """A line about a node: with --insecure anybody may be one, and have one short line told."""
        if not token_of(self.job).is_secret:
            if time.monotonic() < self._last_line_s + STRANGER_LINE_S:
                return
            self._last_line_s, text = time.monotonic(), text[:STRANGER_LINE_LENGTH]
        notice(text)

    def _number(self, node: NodeDescription) -> int:
        """The lowest number that is free; of those that were given away in vain, the oldest."""
        process, free = (node.host, node.pid), self.missing
        own = [number for number in free if self._numbered.get(number) == process]
        others = [number for number in free if number not in self._numbered]
        in_vain = [number for number in self._numbered if number in free]
        number = next(iter([*own, *others, *in_vain]), self.job.nnodes)  # or one too many
        self._numbered.pop(number, None)
        self._numbered[number] = process
        return number

    def _note_return(self, connection: _NodeConnection) -> None:
        if self._begun is not None:
            text = "has come, and is in the next restart"
            self._tell(f"{connection.node} at {connection.address} {text}")

    def _problem(self, node: NodeDescription) -> str:
        """Why there is no place for a node; "" if there is one."""
        if not 0 <= node.node_rank < self.job.nnodes:
            if self.missing:
                return f"--node-rank {node.node_rank} is not in [1, {self.job.nnodes - 1}]"
            return f"all {self.job.nnodes} nodes of the launch are there"
        if node.node_rank in self.nodes:
            self._receive(self.nodes[node.node_rank])  # it may have left
        other = self.nodes.get(node.node_rank)
        if node.node_rank == 0 or other is not None:
            here = f"host {self.me.host}" if other is None else f"at {other.address}"
            return f"--node-rank {node.node_rank} is {here} already, and this is {node}"
        return ""

    def _drop(self, connection: _NodeConnection) -> None:
        """Close a connection, and say so if it is that of a node that is needed."""
        node = connection.node
        if self._close(connection) and node is not None and node.node_rank not in self.gone:
            self._tell(f"{node} at {connection.address} has left")

    def _close(self, connection: _NodeConnection) -> bool:
        """Close a connection; False if it was closed before."""
        if not connection.is_open:
            return False
        self.selector.unregister(connection.channel.socket)
        connection.channel.close()
        if connection.node is not None:
            del self.nodes[connection.node.node_rank]
        return True
