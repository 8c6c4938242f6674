"""The rendezvous of nodes that have a launch command each, before any rank starts.

Every other node tells the first, in a line of JSON, what it is about to launch, and waits for the
first to say that all have come. It answers that it goes, or gives up and comes again, and the first
stays until all have gone. Nothing secret is sent, and no rank depends on what is.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import launcher
from launcher import errors, ports, timings
from launcher.errors import LaunchError, LaunchTimeout
from launcher.job import Job
from launcher.records.pipe_records import LineBuffer
from launcher.system import host_addresses

# The first node listens there too, so that a node of another launch id, and so another port, hears
# which launches wait at this address.
COMMON_PORT = ports.candidates("the nodes of every launch")[0]
LINE_NBYTES = 4096
SAME_COMMAND = "Give the same command on every node, but for --node-rank."
MAX_STRANGERS = 64  # connections that have not said what they launch
COMPARED = {
    "launch_id": "--launch-id",
    "nnodes": "--nnodes",
    "nprocs": "-n",
    "version": "the version of drumline",
}


@dataclass(frozen=True)
class NodeDescription:
    """One node's part of a launch. host: its name."""

    launch_id: str
    nnodes: int
    nprocs: int
    version: str
    node_rank: int
    host: str

    @classmethod
    def of(cls, job: Job) -> NodeDescription:
        version, host = launcher.__version__, socket.gethostname()
        return cls(job.launch_id, job.nnodes, job.nprocs, version, job.node_rank, host)

    @classmethod
    def from_json(cls, values: Any) -> NodeDescription:
        """Raises ValueError for anything else than a description."""
        types = {"nnodes": int, "nprocs": int, "node_rank": int}
        fields = cls.__dataclass_fields__
        if not isinstance(values, dict) or values.keys() != fields.keys():
            raise ValueError("no description of a node")
        if any(type(values[name]) is not types.get(name, str) for name in fields):
            raise ValueError("no description of a node")
        if not all(str(value).isprintable() for value in values.values()):
            raise ValueError("what a terminal could take for a command")
        return cls(**values)

    def __str__(self) -> str:
        return f"node {self.node_rank} (host {self.host})"

    def differences(self, other: NodeDescription) -> str:
        """The values in which the launches of two nodes differ; "" if they belong together."""
        texts = [
            f"{name} is {getattr(self, field)!r} on {self} and {getattr(other, field)!r} on {other}"
            for field, name in COMPARED.items()
            if getattr(self, field) != getattr(other, field)
        ]
        return "; ".join(texts)


def meet(job: Job, port: int) -> None:
    """Return once the nodes of the job have all come to the first, at master_addr and port.

    Prints every few seconds which nodes are awaited. Raises LaunchTimeout at the deadline, which is
    the job's, and LaunchError if this node does not belong to the launch that it finds.
    """
    limit_s = timings.TIMINGS.node_wait_s if job.timeout_s is None else job.timeout_s
    try:
        (_lead if job.node_rank == 0 else _follow)(job, port, limit_s)
    except KeyboardInterrupt as error:
        raise errors.interrupted(signal.SIGINT) from error


def _notice(text: str) -> None:
    with contextlib.suppress(OSError, AttributeError):
        print(f"[launcher] {text}", file=sys.stderr, flush=True)


def _at(job: Job, port: int) -> str:
    return f"[{job.master_addr}]:{port}" if ":" in job.master_addr else f"{job.master_addr}:{port}"


def _missing(nodes: list[int], job: Job, port: int) -> str:
    """The nodes that are awaited, and where: "node 1 of 2 at 10.0.0.1:29500"."""
    plural, names = "s" * (len(nodes) > 1), ", ".join(map(str, nodes))
    return f"node{plural} {names} of {job.nnodes} at {_at(job, port)}"


def _too_late(
    job: Job, port: int, nodes: list[int], limit_s: float, why: str, difference: str
) -> LaunchTimeout:
    """why: no node was there. difference: of a node that came, but belongs to another launch."""
    late = f"{_missing(nodes, job, port)} did not come within {limit_s:g} s ({why})"
    other = f"Another launch did come: {difference}. " if difference else ""
    advice = (
        "Start the same command there, with its own --node-rank, or check that a firewall lets "
        f"it reach {_at(job, port)}. --timeout SECONDS waits for another time."
    )
    return LaunchTimeout(f"{late}. {other}{advice}", (), errors.TIMEOUT_CODE)


# ---- the first node ----


@dataclass
class _NodeConnection:
    """A connection to the first node, at its port. node: what it launches, once it has said so.
    is_told: that all have come."""

    socket: socket.socket
    address: str
    port: int
    lines: LineBuffer
    node: NodeDescription | None = None
    is_told: bool = False

    def send(self, **message: Any) -> None:
        """Send a line; a node that takes none in has lost its connection, which it will see."""
        with contextlib.suppress(OSError):
            self.socket.send(json.dumps(message).encode() + b"\n")


def _lead(job: Job, port: int, limit_s: float) -> None:
    with contextlib.ExitStack() as stack:
        listeners = list(_listeners(job, port))
        for listener in listeners:
            stack.enter_context(listener)
        leader = _Leader(job, port, listeners)
        stack.callback(leader.close)
        leader.wait(limit_s)


def _listeners(job: Job, port: int) -> Iterator[socket.socket]:
    """At the addresses of this node that master_addr means: for a name, not the loopback."""
    addresses = [job.master_addr]
    with contextlib.suppress(socket.gaierror, UnicodeError):
        records = socket.getaddrinfo(job.master_addr, port, type=socket.SOCK_STREAM)
        texts = [str(address[0]) for *_, address in records]
        if job.master_addr not in texts:  # a name
            outside = [text for text in texts if not text.startswith("127.") and text != "::1"]
            routable = [text for _, text in host_addresses.routable_addresses()]
            addresses = outside or routable or texts
    for address in dict.fromkeys(addresses):
        yield ports.listen(job.launch_id, address, port)
        with contextlib.suppress(OSError):  # another launch of several nodes is waiting
            yield ports.listen(job.launch_id, address, COMMON_PORT)


class _Leader:
    """The first node, as long as it waits for the others."""

    def __init__(self, job: Job, port: int, listeners: list[socket.socket]) -> None:
        self.job, self.port = job, port
        self.me = NodeDescription.of(job)
        self.selector = selectors.DefaultSelector()
        self.nodes: dict[int, _NodeConnection] = {}
        self.gone: set[int] = set()  # the nodes that have heard that all have come
        self.strangers: list[_NodeConnection] = []  # the oldest first
        self.sent_away: dict[str, str] = {}  # the problem of the node at an address
        for listener in listeners:
            listener.setblocking(False)
            self.selector.register(listener, selectors.EVENT_READ)

    @property
    def missing(self) -> list[int]:
        here = {*self.nodes, *self.gone}
        return [node for node in range(1, self.job.nnodes) if node not in here]

    def wait(self, limit_s: float) -> None:
        """Return once all nodes have come, and have heard so."""
        now = time.monotonic()
        deadline, status_at = now + limit_s, now + timings.TIMINGS.node_status_s
        while len(self.gone) < self.job.nnodes - 1:
            for key, _ in self.selector.select(max(0.0, min(status_at, deadline) - now)):
                if key.data is None:
                    self._accept(key.fileobj)
                elif key.data.socket.fileno() >= 0:
                    self._receive(key.data)
            now = time.monotonic()
            awaited = self.missing or sorted(self.nodes)
            if now >= deadline and awaited:
                differences = "; ".join(self.sent_away.values())
                place = self.job, self.port, awaited, limit_s
                error = _too_late(*place, self._seen(), differences)
                self._tell(end=str(error))
                raise error
            if now >= status_at and awaited:
                status_at = now + timings.TIMINGS.node_status_s
                text = f"waiting for {_missing(awaited, self.job, self.port)}; {self._seen()}"
                _notice(text)
                self._tell(waiting=text)

    def close(self) -> None:
        for connection in (*self.nodes.values(), *self.strangers):
            connection.socket.close()
        self.selector.close()

    def _seen(self) -> str:
        return f"nodes seen: {len(self.nodes) + len(self.gone)}"

    def _tell(self, **message: Any) -> None:
        for connection in self.nodes.values():
            connection.send(**message)

    def _accept(self, listener: Any) -> None:
        with contextlib.suppress(OSError):
            accepted, address = listener.accept()
            accepted.setblocking(False)
            port = accepted.getsockname()[1]
            connection = _NodeConnection(accepted, str(address[0]), port, LineBuffer())
            self.selector.register(accepted, selectors.EVENT_READ, connection)
            self.strangers.append(connection)
            if len(self.strangers) > MAX_STRANGERS:
                self._drop(self.strangers[0])

    def _receive(self, connection: _NodeConnection) -> None:
        try:
            data = connection.socket.recv(LINE_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        lines = connection.lines.feed(data)
        if connection.node is not None and lines:
            self.gone.add(connection.node.node_rank)
            self._drop(connection)
        elif lines:
            try:
                self._greet(connection, NodeDescription.from_json(json.loads(lines[0])))
            except ValueError:
                self._drop(connection)  # of a stranger, who may be a port scanner
        elif not data or connection.lines.nbytes > LINE_NBYTES:
            self._drop(connection)

    def _greet(self, connection: _NodeConnection, node: NodeDescription) -> None:
        """Take in a node that belongs to this launch; tell it and the user if it does not."""
        problem = self.me.differences(node) or self._taken(node)
        connection.send(node=asdict(self.me), problem=problem)
        if problem:
            if self.sent_away.get(connection.address) != problem:
                _notice(f"a node came from {connection.address}, and was sent away: {problem}")
            self.sent_away[connection.address] = problem
            self._drop(connection)
            return
        connection.node = node
        self.strangers.remove(connection)
        self.sent_away.pop(connection.address, None)
        self.nodes[node.node_rank] = connection
        self.gone.discard(node.node_rank)  # it comes again
        if not self.missing:
            for waiting in (other for other in self.nodes.values() if not other.is_told):
                waiting.is_told = True
                waiting.send(go=True)

    def _taken(self, node: NodeDescription) -> str:
        if node.node_rank in self.nodes:
            self._receive(self.nodes[node.node_rank])  # it may have left
        other = self.nodes.get(node.node_rank)
        if node.node_rank == 0 or other is not None:
            here = f"host {self.me.host}" if other is None else f"at {other.address}"
            return f"--node-rank {node.node_rank} is {here} already, and this is {node}"
        return ""

    def _drop(self, connection: _NodeConnection) -> None:
        self.selector.unregister(connection.socket)
        connection.socket.close()
        if connection.node is not None:
            del self.nodes[connection.node.node_rank]
            if connection.node.node_rank not in self.gone:
                place = f"at {connection.address}"
                if connection.port != self.port:  # it looks for the reason why it cannot join
                    place += f" came to port {COMMON_PORT} and not to {self.port}, and"
                _notice(f"{connection.node} {place} has left")
        else:
            self.strangers.remove(connection)


# ---- the other nodes ----


def _follow(job: Job, port: int, limit_s: float) -> None:
    start = time.monotonic()
    deadline, status_at = start + limit_s, start + timings.TIMINGS.node_status_s
    ask_at = start
    difference: str | None = None
    while why := _try_to_join(job, port, deadline):
        now = time.monotonic()
        if difference == "":  # this launch waits there
            why += f", while its port {COMMON_PORT} answers"
        if now >= status_at:
            status_at = now + timings.TIMINGS.node_status_s
            _notice(f"waiting for {_missing([0], job, port)} ({why}); nodes seen: 0")
        if now >= ask_at and not difference and port != COMMON_PORT:
            ask_at = now + timings.TIMINGS.node_status_s
            answer = _ask_at_common_port(job, deadline)
            difference = difference if answer is None else answer
            if difference:
                _notice(f"another launch waits at {job.master_addr}: {difference}")
        if now >= deadline:
            raise _too_late(job, port, [0], limit_s, why, difference or "")
        time.sleep(timings.TIMINGS.node_retry_s)


def _try_to_join(job: Job, port: int, deadline: float) -> str:
    """Wait at the first node until all have come; why that was not possible, or ""."""
    try:
        with _connected(job, port, deadline) as (connection, messages):
            _, problem = _introduce(job, connection, messages)
            if problem:
                raise LaunchError(
                    f"the node at {_at(job, port)} waits for others than this one: {problem}. "
                    f"{SAME_COMMAND}"
                )
            for message in messages:
                if message.get("go"):
                    connection.sendall(b'{"gone": true}\n')
                    return ""
                if "end" in message:
                    raise LaunchTimeout(message["end"], (), errors.TIMEOUT_CODE)
                _notice(message["waiting"])
            return "the first node closed the connection"
    except UnicodeError:
        raise LaunchError(f"{job.master_addr!r} is no name of a host. {SAME_COMMAND}") from None
    except (KeyError, ValueError, TypeError, AttributeError):
        return "what listens there is no launch"
    except TimeoutError:
        return os.strerror(errno.ETIMEDOUT)
    except OSError as error:
        return error.strerror or str(error)


def _ask_at_common_port(job: Job, deadline: float) -> str | None:
    """The differences from the launch that waits at the first node; None if none does."""
    try:
        with _connected(job, COMMON_PORT, deadline) as (connection, messages):
            return _introduce(job, connection, messages)[1]
    except (OSError, KeyError, ValueError, TypeError, AttributeError):
        return None


@contextlib.contextmanager
def _connected(
    job: Job, port: int, deadline: float
) -> Iterator[tuple[socket.socket, Iterator[dict[str, Any]]]]:
    """A connection to the first node, and the messages that come from it until it is silent."""
    left_s = max(0.01, deadline - time.monotonic())
    connect_s = min(timings.TIMINGS.node_connect_s, left_s)
    with socket.create_connection((job.master_addr, port), connect_s) as connection:
        connection.settimeout(min(timings.TIMINGS.node_status_s, left_s))
        with connection.makefile("rb") as file:
            lines = iter(lambda: file.readline(LINE_NBYTES), b"")
            yield connection, (json.loads(line) for line in lines)


def _introduce(
    job: Job, connection: socket.socket, messages: Iterator[dict[str, Any]]
) -> tuple[NodeDescription, str]:
    """The first node's description, and why this one does not belong to its launch, or ""."""
    connection.sendall(json.dumps(asdict(NodeDescription.of(job))).encode() + b"\n")
    message = next(messages, {})
    connection.settimeout(2 * timings.TIMINGS.node_status_s)  # it speaks so often
    return NodeDescription.from_json(message["node"]), str(message["problem"])
