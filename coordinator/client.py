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
from coordinator.errors import CoordinatorError, CoordinatorTimeout
from coordinator.gate import Caller, NotAdmitted, Proof, TryAgain, knock, purpose_of
from coordinator.wire import Link, LinkBroken, nothing

RETRY_S = 0.02
CONNECT_S = 5.0  # of one attempt; a route that swallows packets would take minutes
HUB = purpose_of("hub")


class HubGone(Exception):
    """Rank 0 is not there any more."""


class Client:
    """Connections of one rank to the hub: one for each thread that is asking at the moment."""

    def __init__(
        self,
        where: Callable[[], list[Address]],
        proof: Proof,
        rank: int,
        turn: int,
        timeout_s: float,
    ) -> None:
        self._where, self._proof, self._rank = where, proof, rank
        self._caller = Caller(rank, HUB, turn)
        self._timeout_s = timeout_s
        self._lock = threading.RLock()  # __del__ may come at any time
        self._free: list[Link] = []
        self._number = 0
        self._closed = False
        first = self._connect(time.monotonic() + timeout_s)
        self.local_address = str(first.socket.getsockname()[0]).partition("%")[0]
        self._free.append(first)

    def ask(
        self, op: str, *arguments: Any, timeout_s: float, idle: Callable[[], None] = nothing
    ) -> Any:
        """The hub's answer. Raises Late if it does not come in time, HubGone if it never will.

        idle is called now and then while waiting, and may raise.
        """
        deadline = time.monotonic() + timeout_s
        with self._link(deadline) as link:
            with self._lock:
                self._number = number = self._number + 1
            try:
                link.send((number, op, *arguments), deadline, idle)
                answered, value = -1, None
                while answered != number:  # or an answer that was given up, or a ping
                    answered, value = link.receive(deadline, idle)
            except LinkBroken as error:
                raise HubGone(str(error)) from error
            return value

    @contextmanager
    def _link(self, deadline: float) -> Iterator[Link]:
        with self._lock:
            if self._closed:
                raise HubGone("this rank has left")
            link = self._free.pop() if self._free else None
        if link is None:
            link = self._connect(deadline)
        try:
            yield link
        except HubGone:
            link.close()
            raise
        except BaseException:
            self._give_back(link)
            raise
        self._give_back(link)

    def _give_back(self, link: Link) -> None:
        with self._lock:
            if self._closed:
                link.close()
            else:
                self._free.append(link)

    def close(self, says_bye: bool = True) -> None:
        """Leave; says_bye: so that nobody takes it for a death."""
        with self._lock:
            self._closed = True
            links, self._free = self._free, []
        for link in links:
            try:
                if says_bye:
                    link.send((0, "bye"), time.monotonic() + 1)
            except LinkBroken:
                pass  # rank 0 was quicker, or is dead
            link.close()

    def _connect(self, deadline: float) -> Link:
        """A proven connection to the hub. Retries until the deadline."""
        why, where = "it was not tried", "rank 0"
        while True:
            addresses = self._where()
            for family, address in addresses:
                where = shown(address)
                last = deadline if len(addresses) == 1 else time.monotonic() + CONNECT_S
                try:
                    return connect(family, address, self._proof, self._caller, last)
                except NotAdmitted as error:
                    raise self._unwanted(where, error) from error
                except (TryAgain, OSError) as error:
                    why = str(error)
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


def connect(
    family: int,
    address: tuple[Any, ...],
    proof: Proof,
    caller: Caller,
    deadline: float,
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
        knock(link, proof, caller, deadline)
    except BaseException:
        connection.close()
        raise
    return link
