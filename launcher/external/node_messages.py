"""Messages between the commands of a launch's nodes, which have proved the token: lines of JSON.

node -> first   {"node": description}     it is there, or asks what to run
first -> node   {"node_rank": 1, ...}     its number, or the problem that sends it away
first -> node   {"waiting": text}         every few seconds, and the node answers {"here": true}
first -> node   {"go": {...}}             start ranks: launch id, secret, port, place
node -> first   {"gone": true}            it has heard what ends the connection
first -> node   {"stop": true}            end them; the node says {"free": true} once they have
first -> node   {"end": text, "code": 1}  the launch is over
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import launcher
from launcher import errors
from launcher.authentication.framed_connection import ConnectionBroken
from launcher.authentication.launch_token import ADVICE, LaunchToken
from launcher.errors import LaunchTimeout
from launcher.job import Job
from launcher.records.pipe_records import LineBuffer

MAX_NBYTES = 1 << 20  # of one message
ASKS = -1  # the number of a node that comes without one


@dataclass(frozen=True)
class NodeDescription:
    """One node's part of a launch. node_rank: ASKS to be given one. nprocs: 0 to be told.

    nnodes: 0 of a node that asks what to run.

    host: its name. pid: of the command.
    """

    node_rank: int
    nnodes: int
    nprocs: int
    version: str
    host: str
    pid: int

    @classmethod
    def of(cls, node_rank: int, nnodes: int, nprocs: int) -> NodeDescription:
        place = socket.gethostname(), os.getpid()
        return cls(node_rank, nnodes, nprocs, launcher.__version__, *place)

    @classmethod
    def from_json(cls, values: Any) -> NodeDescription:
        """Raises ValueError for anything else than a description."""
        types = {"version": str, "host": str}
        fields = cls.__dataclass_fields__
        has_fields = isinstance(values, dict) and values.keys() == fields.keys()
        if not has_fields or any(type(values[f]) is not types.get(f, int) for f in fields):
            raise ValueError("no description of a node")
        return cls(**{name: printable(value) for name, value in values.items()})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"node {self.node_rank} (host {self.host})"

    def difference(self, other: NodeDescription) -> str:
        """The value in which the launches of two nodes differ; "" if they belong together."""
        names = {"version": "the version of drumline", "nnodes": "--nnodes"}
        for field, name in names.items():
            here, there = getattr(self, field), getattr(other, field)
            if here != there and there != 0:
                return f"{name} is {here!r} on {self} and {there!r} on {other}"
        return ""


class NodeChannel:
    """A connection between two nodes that have proved themselves, and its messages."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._lines, self._messages = LineBuffer(), deque[dict[str, Any]]()
        connection.setblocking(False)

    def send(self, **message: Any) -> None:
        """Send a message. Raises ConnectionBroken also if the other end takes nothing in."""
        unsent = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while unsent:
                unsent = unsent[self.socket.send(unsent) :]
        except OSError as error:
            raise ConnectionBroken(error.strerror or str(error)) from error

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message; None if there is none within timeout_s. Raises ConnectionBroken."""
        deadline = time.monotonic() + timeout_s
        while not self._messages:
            self._messages += self.receive()
            left_s = max(0.0, deadline - time.monotonic())
            if not self._messages and not select.select([self.socket], [], [], left_s)[0]:
                return None
        return self._messages.popleft()

    def receive(self) -> list[dict[str, Any]]:
        """All messages that are here. Raises ConnectionBroken once there will be no other."""
        lines: list[bytes] = []
        while True:
            try:
                data = self.socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError as error:
                raise ConnectionBroken(error.strerror or str(error)) from error
            lines += self._lines.feed(data)
            if not data and lines:
                break  # and the next time there is nothing before the end
            if not data or self._lines.nbytes > MAX_NBYTES:
                raise ConnectionBroken("the other end has closed the connection")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise ConnectionBroken("what is not a message of a node") from error
        return [message for message in messages if isinstance(message, dict)]


def notice(text: str) -> None:
    with contextlib.suppress(OSError, AttributeError):
        print(f"[launcher] {text}", file=sys.stderr, flush=True)


def printable(value: Any) -> Any:
    """A text without what a terminal could take for a command; any other value as it is."""
    if not isinstance(value, str):
        return value
    return "".join(char if char.isprintable() else "?" for char in value)


def endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def missing(nodes: Sequence[int], nnodes: int, place: str) -> str:
    """The nodes that are awaited, and where: "node 1 of 2 at 10.0.0.1:29600"."""
    plural, names = "s" * (len(nodes) > 1), ", ".join(map(str, nodes))
    return f"node{plural} {names} of {nnodes} at {place}"


def too_late(awaited: str, place: str, limit_s: float, why: str) -> LaunchTimeout:
    """awaited: as missing() says it. why: they were not there."""
    return LaunchTimeout(
        f"{awaited} did not come within {limit_s:g} s ({why}). Type `drumline join "
        f"{place}` there, or the same command with its own --node-rank, or check that a firewall "
        f"lets it reach {place}. --timeout SECONDS waits for another time.",
        (),
        errors.TIMEOUT_CODE,
    )


def token_of(job: Job) -> LaunchToken:
    if job.token is None:
        raise ValueError(
            f"a launch over {job.nnodes} nodes has no token, so whoever reaches it could become a "
            f"rank, and nothing was started. {ADVICE}"
        )
    return job.token


def placed(job: Job, values: dict[str, Any]) -> Job:
    """The job of the ranks of one node, as the first node has placed them."""
    ranks, secret = tuple(values["ranks_of_nodes"]), bytes.fromhex(values["secret"])
    place = {name: values[name] for name in ("launch_id", "nnodes", "master_port", "node_rank")}
    return replace(job, **place, ranks_of_nodes=ranks, secret=secret)
