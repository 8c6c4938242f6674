"""A rank's end of the hub: asks, and waits for answers with a deadline."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from coordinator.addresses import Address, shown
from coordinator.control.framing import Halfway, Late, Link, LinkBroken, nothing
from coordinator.control.handshake import Caller, NotAdmitted, Proof, TryAgain, knock
from coordinator.control.server import Hub
from coordinator.errors import CoordinatorError, CoordinatorTimeout

RETRY_S = 0.02
CONNECT_S = 5.0  # of one attempt; a route that swallows packets would take minutes
AT_ONCE = {
    "set",
    "get",
    "add",
    "swap",
    "delete",
    "count",
    "came",
    "beat",
    "report",
    "census",
    "names",
}


class HubGone(Exception):
    """Rank 0 is not there any more."""


class Client:
    """Connections of one rank to the hub: one for each thread that is asking at the moment."""

    def __init__(
        self,
        where: Callable[[], list[Address]],
        proof: Proof,
        caller: Caller,
        timeout_s: float,
        hub: Hub | None = None,
    ) -> None:
        """hub: if it lives in this process, what it can answer at once is asked for directly."""
        self._where, self._proof, self._caller, self._hub = where, proof, caller, hub
        self._rank = caller.rank
        self._lock = threading.RLock()  # __del__ may come at any time
        self._free: list[Link] = []
        self._halfway: list[Link] = []  # open, for to close them would look like a death
        self._asking: set[Link] = set()  # of threads that wait for an answer
        self._number = 0
        self._closed = False
        self.why_gone = ""  # once rank 0 is: it does not come back
        self._is_admitted = False
        self._timeout_s = timeout_s
        first = self._connect(time.monotonic() + timeout_s, nothing)
        self.local_address = str(first.socket.getsockname()[0]).partition("%")[0]
        self._free.append(first)
        self._is_admitted = True

    def ask(
        self, op: str, *arguments: Any, timeout_s: float, idle: Callable[[], None] = nothing
    ) -> Any:
        """The hub's answer. Raises Late if it does not come in time, HubGone if it never will,
        CoordinatorError if the hub cannot make sense of it.

        idle is called now and then while waiting, and may raise.
        """
        if self._hub is not None and op in AT_ONCE and not self._hub.is_over:
            return self._hub.ask(op, *arguments, timeout_s=timeout_s)
        deadline = time.monotonic() + timeout_s
        with self._link(deadline, idle) as link:
            with self._lock:
                self._number = number = self._number + 1
            link.send((number, op, *arguments), deadline, idle)
            answered, value, *problem = -1, None
            while answered != number:  # or an answer that was given up, or a ping
                answered, value, *problem = link.receive(deadline, idle)
            if problem:
                raise CoordinatorError(problem[0])
            return value

    @contextmanager
    def _link(self, deadline: float, idle: Callable[[], None]) -> Iterator[Link]:
        with self._lock:
            if self._closed or self.why_gone:
                raise HubGone(self.why_gone or "this rank has left")
            link = self._free.pop() if self._free else None
        if link is None:
            link = self._connect(deadline, idle)
        self._asking.add(link)
        try:
            yield link
        except Halfway as error:
            raise Late(str(error)) from error
        except LinkBroken as error:
            raise self._gone(str(error)) from error
        finally:
            self._give_back(link)

    def _gone(self, why: str) -> HubGone:
        self.why_gone = self.why_gone or why
        return HubGone(self.why_gone)

    def _give_back(self, link: Link) -> None:
        with self._lock:
            self._asking.discard(link)
            if self._closed or self.why_gone:
                _part(link, says_bye=link.is_between_messages)
            elif link.is_between_messages:
                self._free.append(link)
            else:
                self._halfway.append(link)

    def close(self, says_bye: bool = True) -> None:
        """Leave; says_bye: so that nobody takes it for a death."""
        with self._lock:
            self._closed = True
            links, self._free = self._free, []
            halfway, self._halfway = self._halfway, []
        for link in halfway:
            link.close()
        for link in links:
            _part(link, says_bye)

    def drop(self) -> None:
        """In a forked child: close the descriptors, which leaves those of the parent alone."""
        self._closed = True
        for link in (*self._free, *self._halfway, *self._asking):
            link.close()

    def _connect(self, deadline: float, idle: Callable[[], None]) -> Link:
        """A proven connection to the hub. Retries until the deadline; once this rank was let in,
        who refuses it is not rank 0 any more."""
        why, where = "it was not tried", "rank 0"

        def look() -> None:
            if self.why_gone:
                raise HubGone(self.why_gone)
            idle()

        while True:
            addresses = self._where()
            for family, address in addresses:
                where = shown(address)
                last = deadline if len(addresses) == 1 else time.monotonic() + CONNECT_S
                try:
                    return connect(family, address, self._proof, self._caller, last, look)
                except NotAdmitted as error:
                    raise self._unwanted(where, error) from error
                except (TryAgain, OSError) as error:
                    why = str(error)
                    if self._is_admitted and isinstance(error, ConnectionRefusedError):
                        raise self._gone(why) from error
            look()
            if time.monotonic() >= deadline and self._is_admitted:
                raise Late(why)
            if time.monotonic() >= deadline:
                raise CoordinatorTimeout(
                    f"rank {self._rank} (host {socket.gethostname()}) could not reach rank 0 at "
                    f"{where} for {self._timeout_s:g} s ({why}). Is rank 0 alive, is the address "
                    "one that this host can reach, and does a firewall stand between?"
                )
            time.sleep(RETRY_S)

    def _unwanted(self, where: str, error: NotAdmitted) -> CoordinatorError:
        return CoordinatorError(
            f"rank {self._rank} came to {where} to join launch {self._proof.launch_id!r} of "
            f"{self._proof.world_size} ranks, but {error}. Give each launch its own --launch-id or "
            "--master-port, and start all its ranks in the same way."
        )


def _part(link: Link, says_bye: bool) -> None:
    try:
        if says_bye:
            link.send((0, "bye"), time.monotonic() + 1)
    except LinkBroken:
        pass  # rank 0 was quicker, or is dead
    link.close()


def connect(
    family: int,
    address: tuple[Any, ...],
    proof: Proof,
    caller: Caller,
    deadline: float,
    idle: Callable[[], None] = nothing,
) -> Link:
    """A proven connection. Raises OSError, TryAgain or NotAdmitted."""
    left_s = max(deadline - time.monotonic(), 0.001)
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(min(left_s, CONNECT_S))
        connection.connect(address)
        if connection.getsockname() == connection.getpeername():
            # tcp(7): who connects to a free port of its own range may meet itself
            raise OSError(errno.ECONNREFUSED, "it met itself")
        link = Link(connection)
        knock(link, proof, caller, deadline, idle)
    except BaseException:
        connection.close()
        raise
    return link
