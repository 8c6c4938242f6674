"""The other nodes of a launch whose nodes have a command each: they join the first, and obey it.

follower = NodeFollower(job, stays=True)
while (attempt := follower.join()) is not None:
    launcher.Launch(attempt)
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shlex
import socket
import time
from dataclasses import dataclass
from typing import Any

from launcher import errors, ports, timings
from launcher.authentication.encryption import encryption_problem
from launcher.authentication.framed_connection import ConnectionBroken, FramedConnection
from launcher.authentication.handshake import (
    Hello,
    NotReady,
    OtherLaunch,
    Rejected,
    SecretRejected,
    authenticate,
    purpose_of,
)
from launcher.authentication.launch_token import LaunchToken
from launcher.errors import LaunchError, LaunchTimeout
from launcher.external.node_messages import (
    ASKS,
    NodeChannel,
    NodeDescription,
    notice,
    placed,
    printable,
    token_of,
)
from launcher.job import Job
from launcher.system.host_addresses import endpoint

NODE = purpose_of("node")
SAME_COMMAND = "Give the same command on every node, except --node-rank."
JOIN_AGAIN = "Type `drumline join` again, without --node-rank for any place that is free."
# Of no first node, of what answers as none, and of one that is not ready.
NOT_YET = (OSError, ConnectionBroken, KeyError, ValueError, TypeError, AttributeError)


@dataclass(frozen=True)
class Invitation:
    """A place in a launch: this node's number, and what its first node, on that host, runs."""

    node_rank: int
    nnodes: int
    host: str
    command: tuple[str, ...]

    def __str__(self) -> str:
        command = printable(f"drumline {shlex.join(self.command)}")
        return f"node {self.node_rank} of {self.nnodes} runs what host {self.host} runs: {command}"


class _Wait:
    """A wait for the first node, in attempts; LaunchTimeout is raised after limit_s."""

    def __init__(self, place: str, limit_s: float, first_notice_s: float = 0.0) -> None:
        self._place, self._limit_s, self.start_s = place, limit_s, time.monotonic()
        self._status_at = self.start_s + first_notice_s

    @property
    def deadline(self) -> float:
        return self.start_s + self._limit_s

    def pause(self, why: str) -> None:
        """Pause before the next attempt, and tell the user why now and then."""
        now = time.monotonic()
        if now >= self._status_at:
            self._status_at = now + timings.TIMINGS.node_status_s
            left_s = max(0.0, self.deadline - now)
            notice(
                f"waiting for the first node at {self._place} ({why}), for {left_s:.0f} s at most"
            )
        if now >= self.deadline:
            raise LaunchTimeout(
                f"no first machine of a launch was at {self._place} within {self._limit_s:g} s "
                f"({why}): its command has ended, or was not started yet. Start it there, and type "
                f"the same here again; or check that a firewall lets this machine reach "
                f"{self._place}.",
                (),
                errors.TIMEOUT_CODE,
            )
        time.sleep(timings.TIMINGS.node_retry_s)


class NodeFollower:
    """Another node: joins the first, and does as that says.

    stays: for a leader that stays. One thread at a time may use it.
    """

    def __init__(self, job: Job, stays: bool = False) -> None:
        self.job, self._token, self._stays = job, token_of(job), stays
        self._address = job.master_addr, job.master_port or ports.NODES_PORT
        self._place = endpoint(*self._address)
        self._channel: NodeChannel | None = None
        self._attempt: Job | None = None  # to be started, as the first node says
        self._end: dict[str, Any] | None = None  # its last message
        self._heard_s, self._is_joined = -math.inf, False

    def close(self) -> None:
        """Leave the first node."""
        if self._channel is not None:
            self._channel.close()

    def join(self, limit_s: float | None = None) -> Job | None:
        """Wait until the first node has ranks started: the job for those here.

        None if it has ended well before. Raises LaunchError if it has not, is gone, or refuses this
        node, and LaunchTimeout if it cannot be reached within limit_s, or that of every launch.
        """
        times = timings.TIMINGS
        wait = _Wait(self._place, limit_s or times.node_wait_s, times.node_status_s)
        while self._end is None and (why := self._try_to_join(wait.deadline)):
            if self._stays:
                wait.start_s = max(wait.start_s, self._heard_s)
            wait.pause(why)
        if self._end is not None and self._end["end"]:
            raise LaunchError(self._end["end"], (), self._end["code"])
        return None if self._end is not None else self._attempt

    def is_over(self, timeout_s: float) -> bool:
        """True once the ranks that were started have to end; after timeout_s at the latest."""
        assert self._channel is not None
        try:
            while (message := self._channel.next(timeout_s)) is not None:
                if self._obey(message):
                    return True
                timeout_s = 0
        except NOT_YET:
            self._is_joined = False
        if time.monotonic() - self._heard_s > timings.borne_s(2 * timings.TIMINGS.node_status_s):
            self._is_joined = False
        return not self._is_joined

    def _try_to_join(self, deadline: float) -> str:
        """Wait at the first node until all have come; why that was not possible, or ""."""
        self._attempt, is_joined = None, self._is_joined
        self._is_joined = False  # if the following fails
        try:
            if self._channel is not None and is_joined:
                self._channel.send(free=True)
            else:
                self.close()
                self._channel = connected_to_first(self._address, self._token, deadline)
                job = self.job
                node = NodeDescription.of(job.node_rank, job.nnodes, job.nprocs, job.command)
                _introduced(self._channel, node, self._place)
            while self._attempt is None and self._end is None:
                message = self._channel.next(timings.borne_s(2 * timings.TIMINGS.node_status_s))
                if message is None:
                    raise TimeoutError
                self._obey(message)
            self._is_joined = True
            return ""
        except NOT_YET as error:
            if isinstance(error, ConnectionRefusedError) and self._stays and self._heard_s > 0:
                raise LaunchError(
                    f"the command of the first node, at {self._place}, has exited without "
                    "reporting anything, and all ranks here with it. Start it again, and then "
                    "this one."
                ) from None
            return _reason(error)

    def _obey(self, message: dict[str, Any]) -> bool:
        """Do as the first node says; True if ranks that were started have to end."""
        assert self._channel is not None
        self._heard_s = time.monotonic()
        if "end" in message:
            is_late = message["code"] == errors.TIMEOUT_CODE
            code = errors.TIMEOUT_CODE if is_late else 1
            self._end = {"end": printable(message["end"]), "code": code}
        elif "go" in message:
            self._attempt = placed(self.job, message["go"])
        elif "waiting" in message:
            self._channel.send(here=True)
            if message["waiting"]:
                notice(printable(message["waiting"]))
        if self._end or ("go" in message and not self._stays):
            self._channel.send(gone=True)
        return "end" in message or "stop" in message


def _reason(error: Exception) -> str:
    """Why there is no first node yet: one of NOT_YET, in words."""
    if isinstance(error, ConnectionBroken):
        return str(error)
    if isinstance(error, OSError):
        is_late = isinstance(error, TimeoutError)
        return os.strerror(errno.ETIMEDOUT) if is_late else error.strerror or str(error)
    return "the process listening there is not a drumline launch"


def connected_to_first(
    address: tuple[str, int], token: LaunchToken, deadline: float
) -> NodeChannel:
    """A connection to the first node, where both ends have proved that they know the token.

    Raises OSError or ConnectionBroken if nothing answers as a first node, which may yet come, and
    LaunchError if the token is not that node's.
    """
    place, left_s = endpoint(*address), max(0.01, deadline - time.monotonic())
    if token.is_secret and (problem := encryption_problem()):
        raise LaunchError(f"{problem}, or start all nodes with --insecure.")
    try:
        plain = socket.create_connection(address, min(timings.TIMINGS.node_connect_s, left_s))
    except UnicodeError:
        raise LaunchError(f"{address[0]!r} is not a name of a host.") from None
    with contextlib.ExitStack() as stack:
        connection = FramedConnection(stack.enter_context(plain))
        until = time.monotonic() + min(timings.TIMINGS.node_status_s, left_s)
        try:
            authenticate(connection, token.credentials(), Hello(0, NODE), until)
        except NotReady as error:
            raise ConnectionBroken("what listens there does not answer as a first node") from error
        except OtherLaunch as error:  # the ranks of the attempt before, at the same port
            raise ConnectionBroken(f"what listens there is not a first node: {error}") from error
        except SecretRejected:
            raise LaunchError(
                f"the token is not that of the first node at {place}: type the one that it printed "
                "when it started, which is another each time. One with --insecure has none, and "
                "needs that option on every node. Nothing was started here."
            ) from None
        except Rejected as error:
            raise LaunchError(
                f"at {place} is not a first node that this one could join: {error}."
            ) from None
        stack.pop_all()  # it stays open
        return NodeChannel(connection.socket)


def _introduced(channel: NodeChannel, node: NodeDescription, place: str) -> dict[str, Any]:
    """The first node's answer to a description. Raises LaunchError if it sends this one away."""
    channel.send(node=vars(node))
    answer = channel.next(timings.TIMINGS.node_status_s)
    if answer is None:
        raise TimeoutError
    if problem := answer["problem"]:
        raise LaunchError(
            f"the first node, at {place}, waits for others than this one: {printable(problem)}. "
            f"{SAME_COMMAND if node.nnodes and not node.command else JOIN_AGAIN}"
        )
    return answer


def ask_to_join(address: tuple[str, int], token: LaunchToken, node_rank: int = ASKS) -> Invitation:
    """The place that the first node gives to this one, and what to run there.

    Waits node_join_s for the first node. Port 0 is the usual one. Raises LaunchError if nothing is
    there, if there is no place, or the token is not that node's.
    """
    address = address[0], address[1] or ports.NODES_PORT
    place = endpoint(*address)
    wait = _Wait(place, timings.TIMINGS.node_join_s)
    while True:
        try:
            with contextlib.closing(connected_to_first(address, token, wait.deadline)) as channel:
                node = NodeDescription.of(node_rank, 0, 0)
                answer = _introduced(channel, node, place)
                words = tuple(map(str, answer["command"]))
                host = str(printable(answer["host"]))
                return Invitation(answer["node_rank"], answer["nnodes"], host, words)
        except NOT_YET as error:
            wait.pause(_reason(error))
