"""Messages between the commands of a launch's nodes, which have proved the token, in JSON.

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
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import launcher
from launcher import timings
from launcher.authentication.framed_connection import FramedConnection, NoMessage
from launcher.authentication.launch_token import VARIABLE, LaunchToken
from launcher.job import Job

ASKS = -1  # the number of a node that comes without one


@dataclass(frozen=True)
class NodeDescription:
    """One node's part of a launch. node_rank: ASKS to be given one. nprocs: 0 to be told.

    nnodes: 0 of a node that asks what to run.

    host: its name. pid: of the command. command: a hash of the first one's command, as this node
    has it; "" of a node with a command of its own.
    """

    node_rank: int
    nnodes: int
    nprocs: int
    version: str
    host: str
    pid: int
    command: str

    @classmethod
    def of(
        cls, node_rank: int, nnodes: int, nprocs: int, command: Sequence[str] = ()
    ) -> NodeDescription:
        place = socket.gethostname(), os.getpid()
        digest = hashlib.sha256(json.dumps(command).encode()).hexdigest() if command else ""
        return cls(node_rank, nnodes, nprocs, launcher.__version__, *place, digest)

    @classmethod
    def from_json(cls, values: Any) -> NodeDescription:
        """Raises ValueError for anything else than a description."""
        types = {"version": str, "host": str, "command": str}
        fields = cls.__dataclass_fields__
        has_fields = isinstance(values, dict) and values.keys() == fields.keys()
        if not has_fields or any(type(values[f]) is not types.get(f, int) for f in fields):
            raise ValueError("no description of a node")
        return cls(**{name: printable(value) for name, value in values.items()})

    def __str__(self) -> str:
        return f"node {self.node_rank} (host {self.host})"

    def difference(self, other: NodeDescription) -> str:
        """The value in which the launches of two nodes differ; "" if they belong together."""
        names = {"version": "the version of drumline", "nnodes": "--nnodes"}
        for field, name in names.items():
            here, there = getattr(self, field), getattr(other, field)
            if here != there and there != 0:
                return f"{name} is {here!r} on {self} and {there!r} on {other}"
        if other.command not in ("", self.command):
            return f"{other} joined a first node that ran another command, and has ended since"
        return ""


class NodeChannel:
    """A connection between two nodes that have proved themselves, and its messages."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self._framed = connection, FramedConnection(connection)

    def close(self) -> None:
        self.socket.close()

    def send(self, **message: Any) -> None:
        """Send a message. Raises ConnectionBroken also if the other end takes nothing in."""
        deadline = time.monotonic() + timings.TIMINGS.node_connect_s
        self._framed.send_packed(json.dumps(message).encode(), deadline)

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message; None if none begins within timeout_s. Raises ConnectionBroken."""
        try:
            self._framed.await_message(time.monotonic() + timeout_s)
        except NoMessage:
            return None
        deadline = time.monotonic() + timings.TIMINGS.node_connect_s
        message: dict[str, Any] = self._framed.receive(deadline, unpack=_object)
        return message


def _object(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except RecursionError as error:
        raise ValueError("JSON that is too deep") from error
    if not isinstance(message, dict):
        raise ValueError("no JSON object")
    return message


def notice(text: str) -> None:
    with contextlib.suppress(OSError, AttributeError):
        print(f"[launcher] {text}", file=sys.stderr, flush=True)


def printable(value: Any) -> Any:
    """A text without what a terminal could take for a command; any other value as it is."""
    if not isinstance(value, str):
        return value
    return "".join(char if char.isprintable() else "?" for char in value)


def token_of(job: Job) -> LaunchToken:
    if job.token is None:
        raise ValueError(
            f"a launch over {job.nnodes} nodes has no token, so whoever reaches it could become a "
            f"rank, and nothing was started. Set {VARIABLE} to the same 64 hexadecimal digits on "
            "each machine (`openssl rand -hex 32`), before each launch, which removes it."
        )
    return job.token


def placed(job: Job, values: dict[str, Any]) -> Job:
    """The job of the ranks of one node, as the first node has placed them."""
    ranks, secret = tuple(values["ranks_of_nodes"]), bytes.fromhex(values["secret"])
    names = "launch_id", "nnodes", "master_port", "torch_port", "node_rank"
    place = {name: values[name] for name in names}
    return replace(job, **place, ranks_of_nodes=ranks, secret=secret)
