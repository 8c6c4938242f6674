"""The rendezvous of nodes that have a launch command each, before any rank starts.

Every other node tells the first, in a line of JSON, what it is about to launch, and waits for the
first to say that all have come. It answers that it goes, or gives up and comes again, and the first
stays until all have gone. Nothing secret is sent, and no rank depends on what is.

    leader = NodeLeader(job, port, stays=True)            # follower = NodeFollower(job, port, True)
    launcher.Launch(leader.begin(leader.gather([0, 1])))  # launcher.Launch(follower.join())

A leader that stays starts ranks again and again, with the nodes that are there: it tells each the
launch id, the port and the place of its ranks, and when to end them. Both ends speak every few
seconds then. A node whose ranks have ended says so; one that has lost its connection ends them, and
comes again, until it hears that the leader ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import launcher
from launcher import errors, ports, timings
from launcher.errors import LaunchError, LaunchTimeout
from launcher.job import LOOPBACK, Job, new_launch_id
from launcher.launch_info import MAX_PORT
from launcher.records.pipe_records import LineBuffer
from launcher.system import host_addresses

# The first node listens there too, so that a node of another launch id, and so another port, hears
# which launches wait at this address.
COMMON_PORT = ports.candidates("the nodes of every launch")[0]
LINE_NBYTES = 4096
HERE, FREE, GONE = b'{"here": true}', b'{"free": true}', b'{"gone": true}'
PLACE = ("launch_id", "nnodes", "master_port", "node_rank")  # what the first node decides, no more
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
    """One node's part of a launch. host: its name. pid: of the command."""

    launch_id: str
    nnodes: int
    nprocs: int
    version: str
    node_rank: int
    host: str
    pid: int

    @classmethod
    def of(cls, job: Job) -> NodeDescription:
        version, place = launcher.__version__, (socket.gethostname(), os.getpid())
        return cls(job.launch_id, job.nnodes, job.nprocs, version, job.node_rank, *place)

    @classmethod
    def from_json(cls, values: Any) -> NodeDescription:
        """Raises ValueError for anything else than a description."""
        types = {"nnodes": int, "nprocs": int, "node_rank": int, "pid": int}
        fields = cls.__dataclass_fields__
        if not isinstance(values, dict) or values.keys() != fields.keys():
            raise ValueError("no description of a node")
        if any(type(values[name]) is not types.get(name, str) for name in fields):
            raise ValueError("no description of a node")
        if not all(str(value).isprintable() for value in values.values()):
            raise ValueError("what a terminal could take for a command")
        if not 0 <= values["node_rank"] < values["nnodes"]:
            raise ValueError("no node of the launch that it names")
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
        if job.node_rank == 0:
            with contextlib.closing(NodeLeader(job, port)) as leader:
                leader.wait(limit_s)
        else:
            with contextlib.closing(NodeFollower(job, port)) as follower:
                follower.join(limit_s)
    except KeyboardInterrupt as error:
        raise errors.interrupted(signal.SIGINT) from error


def _notice(text: str) -> None:
    with contextlib.suppress(OSError, AttributeError):
        print(f"[launcher] {text}", file=sys.stderr, flush=True)


def _at(job: Job, port: int) -> str:
    return f"[{job.master_addr}]:{port}" if ":" in job.master_addr else f"{job.master_addr}:{port}"


def _missing(nodes: Sequence[int], job: Job, port: int) -> str:
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


def _parse(line: bytes) -> Any:
    """The value of a line of JSON, which may come from anybody. Raises ValueError for no JSON."""
    try:
        return json.loads(line)
    except (UnicodeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _printable(text: Any) -> str:
    """The text without what a terminal could take for a command."""
    return "".join(char if char.isprintable() else "?" for char in str(text))


# ---- the first node ----


@dataclass
class _NodeConnection:
    """A connection to the first node, at its port. node: what it launches, once it has said so.
    is_told: that all have come, or of the end. heard_s: when it last spoke."""

    socket: socket.socket
    address: str
    port: int
    lines: LineBuffer
    node: NodeDescription | None = None
    is_told: bool = False
    heard_s: float = field(default_factory=time.monotonic)

    def send(self, **message: Any) -> None:
        """Send a line; a node that takes none in has lost its connection, which it will see."""
        with contextlib.suppress(OSError):
            self.socket.send(json.dumps(message).encode() + b"\n")


def _listeners(job: Job, port: int, stays: bool) -> Iterator[socket.socket]:
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
        if not stays:  # or it would be in the way of others
            with contextlib.suppress(OSError):  # another launch of several nodes is waiting
                yield ports.listen(job.launch_id, address, COMMON_PORT)


class NodeLeader:
    """The first node: waits for the others once, or if it stays, whenever ranks are started again.

    port: where it listens, if the job has several nodes; 0 for that of its launch id. One thread at
    a time may use it. A leader that stays calls step() at least every node_status_s.
    """

    def __init__(self, job: Job, port: int, stays: bool = False) -> None:
        self.job, self.port = job, ports.of_nodes(job.launch_id, port)
        self.me = NodeDescription.of(job)
        self.selector = selectors.DefaultSelector()
        self._has_begun = False
        self._begun: list[int] = []  # the other nodes whose ranks were started last
        self._expected: set[int] = set()  # those of them that have not left by themselves
        self._holder: socket.socket | None = None  # keeps the port of these ranks
        self._status_at = time.monotonic() + timings.TIMINGS.node_status_s
        self._silent_s = 3 * timings.TIMINGS.node_status_s if stays else math.inf
        self.nodes: dict[int, _NodeConnection] = {}
        self.gone: set[int] = set()  # the nodes that have heard that all have come
        self.strangers: list[_NodeConnection] = []  # the oldest first
        self.sent_away: dict[str, str] = {}  # the problem of the node at an address
        with contextlib.ExitStack() as opened:
            for listener in _listeners(job, self.port, stays) if job.nnodes > 1 else ():
                opened.enter_context(listener)
                listener.setblocking(False)
                self.selector.register(listener, selectors.EVENT_READ)
            self._opened = opened.pop_all()

    @property
    def missing(self) -> list[int]:
        here = {*self.nodes, *self.gone}
        return [node for node in range(1, self.job.nnodes) if node not in here]

    def wait(self, limit_s: float) -> None:
        """Return once all nodes have come, and have heard so."""
        deadline = time.monotonic() + limit_s
        while len(self.gone) < self.job.nnodes - 1:
            awaited = self.missing or sorted(self.nodes)
            self.step(deadline - time.monotonic(), awaited)
            if not self.missing:
                self._tell_once(go=True)
            if time.monotonic() >= deadline and (self.missing or self.nodes):
                self._give_up(limit_s)

    def step(self, timeout_s: float, awaited: Sequence[int] = ()) -> None:
        """Hear the other nodes, for at most timeout_s; tell the user, and them, who is awaited."""
        now = time.monotonic()
        for key, _ in self.selector.select(max(0.0, min(self._status_at - now, timeout_s))):
            if key.data is None:
                self._accept(key.fileobj)
            elif key.data.socket.fileno() >= 0:
                self._receive(key.data)
        if time.monotonic() >= self._status_at:
            self._status_at = time.monotonic() + timings.TIMINGS.node_status_s
            names = _missing(awaited, self.job, self.port)
            text = f"waiting for {names}; {self._seen()}" if awaited else ""
            if text:
                _notice(text)
            self._tell(waiting=text)
            for connection in list(self.nodes.values()):
                if time.monotonic() - connection.heard_s > self._silent_s:
                    self._drop(connection)

    def _give_up(self, limit_s: float) -> None:
        place = self.job, self.port, self.missing or sorted(self.nodes), limit_s
        error = _too_late(*place, self._seen(), "; ".join(self.sent_away.values()))
        self._tell(end=str(error), code=error.exit_code)
        raise error

    def close(self) -> None:
        for connection in (*self.nodes.values(), *self.strangers):
            connection.socket.close()
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
        while (missing := sorted({*nodes} - {*self._free()})) and not has_ended():
            if (left_s := deadline - time.monotonic()) <= 0:
                if limit_s is None:
                    self._give_up(timings.TIMINGS.node_wait_s)
                break
            self.step(min(left_s, timings.TIMINGS.backend_poll_s), missing)
        return self._free()

    def _free(self) -> list[int]:
        return [0, *sorted(node for node in self.nodes if not self.nodes[node].is_told)]

    def begin(self, nodes: Sequence[int]) -> Job:
        """Have ranks started on these nodes, of which 0 is this one; the job for those here."""
        self._begun, launch_id = [node for node in nodes if node], new_launch_id()
        self._has_begun, self._expected = True, {*self._begun}
        self._release_port()
        if not self._begun:
            place: Any = {"nnodes": 1, "master_addr": LOOPBACK, "master_port": 0}
            return replace(self.job, **place, launch_id=launch_id)
        later, earlier = range(self.port + 1, MAX_PORT + 1), range(ports.FIRST_PORT, self.port)
        self._holder = ports.reserve([*later, *earlier])
        port = self._holder.getsockname()[1]
        values: Any = {"launch_id": launch_id, "nnodes": len(nodes), "master_port": port}
        for number, node in enumerate(self._begun, 1):
            self.nodes[node].is_told = True
            self.nodes[node].send(go={**values, "node_rank": number})
        return replace(self.job, **values)

    def _release_port(self) -> None:
        if self._holder is not None:
            self._holder.close()
            self._holder = None

    def has_lost_a_node(self) -> bool:
        """True if a node whose ranks were started has gone, or its ranks have ended."""
        return any(node not in self.nodes or not self.nodes[node].is_told for node in self._begun)

    def stop(self) -> None:
        """Have the other nodes end the ranks that were started."""
        for connection in self.nodes.values():
            if connection.is_told:
                connection.send(stop=True)

    def end(self, text: str) -> None:
        """Tell all other nodes that this one ends, and wait a while for them to hear it.

        text: why; "" if that is no error, and their commands end well, too.
        """
        deadline = time.monotonic() + timings.TIMINGS.node_end_s
        for connection in self.nodes.values():
            connection.is_told = False
        while (self.nodes or self._expected) and (left_s := deadline - time.monotonic()) > 0:
            self._tell_once(end=text, code=int(bool(text)))
            self.step(left_s)

    def _seen(self) -> str:
        return f"nodes seen: {len(self.nodes) + len(self.gone)}"

    def _tell(self, **message: Any) -> None:
        for connection in self.nodes.values():
            connection.send(**message)

    def _tell_once(self, **message: Any) -> None:
        for connection in self.nodes.values():
            if not connection.is_told:
                connection.is_told = True
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
        connection.heard_s = time.monotonic()
        if connection.node is not None and lines:
            if GONE in lines:
                self.gone.add(connection.node.node_rank)
                self._drop(connection)
            elif FREE in lines:
                connection.is_told = False
                self._note_return(connection.node, connection.address)
        elif lines:
            try:
                self._greet(connection, NodeDescription.from_json(_parse(lines[0])))
            except ValueError:
                self._drop(connection)  # of a stranger, who may be a port scanner
        elif not data or connection.lines.nbytes > LINE_NBYTES:
            self._drop(connection)

    def _greet(self, connection: _NodeConnection, node: NodeDescription) -> None:
        """Take in a node that belongs to this launch; tell it and the user if it does not."""
        old = self.nodes.get(node.node_rank)
        if old is not None and old.node == node:  # the link was cut, and this end has not seen it
            self._close(old)
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
        self._note_return(node, connection.address)

    def _note_return(self, node: NodeDescription, address: str) -> None:
        if self._has_begun and node.node_rank not in self._expected:
            _notice(f"{node} at {address} has come, and is in the next restart")

    def _taken(self, node: NodeDescription) -> str:
        if node.node_rank in self.nodes:
            self._receive(self.nodes[node.node_rank])  # it may have left
        other = self.nodes.get(node.node_rank)
        if node.node_rank == 0 or other is not None:
            here = f"host {self.me.host}" if other is None else f"at {other.address}"
            return f"--node-rank {node.node_rank} is {here} already, and this is {node}"
        return ""

    def _drop(self, connection: _NodeConnection) -> None:
        """Close a connection, and say so if it is that of a node that is needed."""
        self._close(connection)
        if connection.node is None:
            return
        self._expected.discard(connection.node.node_rank)
        if connection.node.node_rank not in self.gone:
            place = f"at {connection.address}"
            if connection.port != self.port:  # it looks for the reason why it cannot join
                place += f" came to port {COMMON_PORT} and not to {self.port}, and"
            _notice(f"{connection.node} {place} has left")

    def _close(self, connection: _NodeConnection) -> None:
        self.selector.unregister(connection.socket)
        connection.socket.close()
        if connection.node is None:
            self.strangers.remove(connection)
        else:
            del self.nodes[connection.node.node_rank]


# ---- the other nodes ----


class NodeFollower:
    """Another node: joins the first, and does as that says.

    port: as the leader's. stays: for a leader that stays. One thread at a time may use it.
    """

    def __init__(self, job: Job, port: int, stays: bool = False) -> None:
        self.job, self.port = job, ports.of_nodes(job.launch_id, port)
        self._stays, self._opened = stays, contextlib.ExitStack()
        self._attempt: Job | None = None  # to be started, as the first node says
        self._end: dict[str, Any] | None = None  # its last message
        self._heard_s, self._is_joined = -math.inf, False

    def close(self) -> None:
        """Leave the first node."""
        self._opened.close()

    def join(self, limit_s: float | None = None) -> Job | None:
        """Wait until the first node has ranks started: the job for those here.

        None if it has ended well before. Raises LaunchError if it has not, or is gone, and
        LaunchTimeout if it cannot be reached within limit_s, or the limit of every launch.
        """
        limit_s = limit_s or timings.TIMINGS.node_wait_s
        start = ask_at = time.monotonic()
        status_at = start + timings.TIMINGS.node_status_s
        difference: str | None = None
        while self._end is None and (why := self._try_to_join(start + limit_s)):
            now = time.monotonic()
            start = max(start, self._heard_s) if self._stays else start
            if difference == "":  # this launch waits there
                why += f", while its port {COMMON_PORT} answers"
            if now >= status_at:
                status_at = now + timings.TIMINGS.node_status_s
                _notice(f"waiting for {_missing([0], self.job, self.port)} ({why}); nodes seen: 0")
            if now >= ask_at and not difference and self.port != COMMON_PORT:
                ask_at = now + timings.TIMINGS.node_status_s
                answer = _ask_at_common_port(self.job, start + limit_s)
                difference = difference if answer is None else answer
                if difference:
                    _notice(f"another launch waits at {self.job.master_addr}: {difference}")
            if now >= start + limit_s:
                raise _too_late(self.job, self.port, [0], limit_s, why, difference or "")
            time.sleep(timings.TIMINGS.node_retry_s)
        if self._end is not None and self._end["end"]:
            raise LaunchError(self._end["end"], (), self._end["code"])
        return None if self._end is not None else self._attempt

    def is_over(self, timeout_s: float) -> bool:
        """True once the ranks that were started have to end; after timeout_s at the latest."""
        try:
            while select.select([self._connection], [], [], timeout_s)[0]:
                if self._obey(next(self._messages)):
                    return True
                timeout_s = 0
        except (OSError, KeyError, ValueError, TypeError, AttributeError, StopIteration):
            self._is_joined = False
        if time.monotonic() - self._heard_s > 2 * timings.TIMINGS.node_status_s:
            self._is_joined = False
        return not self._is_joined

    def _try_to_join(self, deadline: float) -> str:
        """Wait at the first node until all have come; why that was not possible, or ""."""
        place, self._attempt = _at(self.job, self.port), None
        try:
            if self._is_joined:
                self._connection.sendall(FREE + b"\n")
            else:
                self._introduce(place, deadline)
            self._is_joined = False  # if the following fails
            while self._attempt is None and self._end is None:
                self._obey(next(self._messages))
            self._is_joined = True
            return ""
        except StopIteration:
            return "the first node closed the connection"
        except UnicodeError:
            text = f"{self.job.master_addr!r} is no name of a host. {SAME_COMMAND}"
            raise LaunchError(text) from None
        except (KeyError, ValueError, TypeError, AttributeError):
            return "what listens there is no launch"
        except TimeoutError:
            return os.strerror(errno.ETIMEDOUT)
        except ConnectionRefusedError as error:
            if self._stays and self._heard_s > 0:
                raise LaunchError(
                    f"the command of the first node, at {place}, has ended without a word, and all "
                    "ranks here with it. Start it again, and then this one."
                ) from None
            return str(error.strerror)
        except OSError as error:
            return error.strerror or str(error)

    def _introduce(self, place: str, deadline: float) -> None:
        self._opened.close()
        connected = _connected(self.job, self.port, deadline)
        self._connection, self._messages = self._opened.enter_context(connected)
        _, problem = _introduce(self.job, self._connection, self._messages)
        if problem:
            raise LaunchError(
                f"the node at {place} waits for others than this one: {problem}. {SAME_COMMAND}"
            )

    def _obey(self, message: dict[str, Any]) -> bool:
        """Do as the first node says; True if ranks that were started have to end."""
        self._heard_s = time.monotonic()
        if "end" in message:
            is_late = message["code"] == errors.TIMEOUT_CODE
            code = errors.TIMEOUT_CODE if is_late else 1
            self._end = {"end": _printable(message["end"]), "code": code}
        elif "go" in message:
            place = {name: message["go"][name] for name in PLACE} if self._stays else {}
            self._attempt = replace(self.job, **place)
        elif "waiting" in message:
            self._connection.sendall(HERE + b"\n")
            if message["waiting"]:
                _notice(_printable(message["waiting"]))
        if self._end or ("go" in message and not self._stays):
            self._connection.sendall(GONE + b"\n")
        return "end" in message or "stop" in message


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
        with connection.makefile("rb", buffering=0) as file:  # or select() misses what is buffered
            lines = iter(lambda: file.readline(LINE_NBYTES), b"")
            yield connection, (_parse(line) for line in lines)


def _introduce(
    job: Job, connection: socket.socket, messages: Iterator[dict[str, Any]]
) -> tuple[NodeDescription, str]:
    """The first node's description, and why this one does not belong to its launch, or ""."""
    connection.sendall(json.dumps(asdict(NodeDescription.of(job))).encode() + b"\n")
    message = next(messages, {})
    connection.settimeout(2 * timings.TIMINGS.node_status_s)  # it speaks so often
    return NodeDescription.from_json(message["node"]), _printable(message["problem"])
