"""The meeting of ranks that share a torch Store: the first of them serves, and says where.

info, location, forget = meet(store, rank, ranks, 300.0, timings)

A store may hold keys of earlier ranks: torchrun hands its own to the ranks that it restarts after a
failure. So each rank writes a request that no other has, and the first rank answers each of them
with a prefix that was never used:

    requests/<place>              token, time and process of the rank; written anew by its successor
    answer/<request>              prefix, and a rank that was lost meanwhile, by the first rank
    <prefix>/<place>              what the others need to know of the rank; only of this meeting

The first rank, which alone reads the requests of others, deletes those before any of them can come
to another meeting. What is left each deletes of its own once all have joined: requests/0 stays, as
others look at it in the next meeting.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, NoReturn

from torch.distributed import DistNetworkError, PrefixStore, Store

import launcher
from coordinator.control.secrecy import SECRET_NBYTES, launch_secret
from coordinator.control.session import ServerLocation
from coordinator.errors import (
    CoordinatorError,
    CoordinatorTimeout,
    FailureReason,
    PeerLost,
    RankFailure,
)
from coordinator.peers import Peer
from coordinator.timings import CoordinatorTimings
from launcher import LaunchInfo, host_addresses, linux, listener_at

LOOPBACK = "127.0.0.1"
DISCARD_PORT = 9  # nothing is sent there
PAUSE_PART = 4
"""A pause between two looks into the store is at most this part of the time waited so far."""


@dataclass(frozen=True)
class _Introduction:
    """The facts that a rank gives of itself under the prefix.

    peer: its process, packed. launch_id: of its launch, "" if that has no secret. address, port,
    secret: of the first rank's server; the secret, in hexadecimal, is for ranks without a launch.
    """

    peer: str
    launch_id: str
    encrypts: bool
    address: str = ""
    port: int = 0
    secret: str = ""


def meet(
    store: Store, place: int, ranks: Sequence[int], timeout_s: float, timings: CoordinatorTimings
) -> tuple[LaunchInfo, ServerLocation, Callable[[], None]]:
    """This rank in a launch of those that share the store, where its server is, and a function to
    be called once all have joined, which deletes what nobody reads again. Collective.

    place: of this rank among the ranks. ranks: their numbers, which errors show.

    Raises CoordinatorTimeout naming the ranks that did not come, PeerLost if one of this host ended
    while they met, CoordinatorError if they encrypt and the store would give away the secret.
    """
    meeting = _Meeting(store, place, ranks, timeout_s, timings)
    try:
        return *meeting.meet(), meeting.forget
    except DistNetworkError:  # the store was in a rank, or in torchrun's agent
        meeting.check_lost()
        raise


def alone(number: int) -> LaunchInfo:
    """A rank of this number that has nobody to meet."""
    return LaunchInfo(
        f"alone-{secrets.token_hex(8)}",
        world_size=number + 1,
        local_world_size=number + 1,
        rank=number,
        master_port=DISCARD_PORT,
        extras={"master_rank": str(number)},
    )


class _Meeting:
    """One rank's part in the meeting.

    A dead process may be an earlier rank, whose successor is still to come. It is not, if it made
    its request after this process started: a launcher ends all ranks before it starts them again.
    """

    def __init__(
        self,
        store: Store,
        place: int,
        ranks: Sequence[int],
        timeout_s: float,
        timings: CoordinatorTimings,
    ) -> None:
        self._store, self._place, self._ranks = store, place, ranks
        self._timeout_s, self._timings, self._began = timeout_s, timings, time.monotonic()
        self._me = replace(_own_process(os.getpid()), rank=ranks[place])
        self._start_s = self._me.start_ticks / os.sysconf("SC_CLK_TCK")
        self._token = secrets.token_hex(8)
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._request = f"{self._token} {now_s} {self._me.pack().decode()}"
        self._request_keys = [request_key(place) for place in range(len(ranks))]
        self._watched = self._request_keys if place == 0 else self._request_keys[:1]
        self._own_keys = [_answer_key(self._request)]

    def meet(self) -> tuple[LaunchInfo, ServerLocation]:
        self._store.set(self._request_keys[self._place], self._request)
        if self._place == 0:
            self._await(self._store, self._request_keys)
            self._answer()
        launch_id = self._token if self._place == 0 else self._await_prefix()
        listener = self._listen() if self._place == 0 else None
        try:
            introductions = self._exchange(PrefixStore(launch_id, self._store), listener)
            self._own_keys.append(f"{launch_id}/{self._place}")
            for key in self._request_keys[1:] if self._place == 0 else ():
                self._delete(key)
            return self._joined(launch_id, introductions, listener)
        except BaseException:
            if listener is not None:
                listener.close()
            raise

    def forget(self) -> None:
        """Delete the keys that are about this rank alone."""
        for key in self._own_keys:
            self._delete(key)

    def _delete(self, key: str) -> None:
        with suppress(NotImplementedError, RuntimeError):  # a store that cannot, or that is gone
            self._store.delete_key(key)

    # ---- the prefix ----

    def _await_prefix(self) -> str:
        """The prefix that the first rank gives to this rank, and so never to a dead one."""
        self._await(self._store, [_answer_key(self._request)], self._request_keys)
        prefix, lost = self._heard()
        if lost:
            self.check_lost()
        return prefix

    def _answer(self, lost: str = "") -> None:
        """By the first rank: tell all that have come the prefix, and who is lost."""
        for request in self._requests():
            self._store.set(_answer_key(request), f"{self._token} {lost}")

    def _heard(self) -> tuple[str, str]:
        """The answer of the first rank; empty before it has come."""
        key = _answer_key(self._request)
        answer = self._store.get(key).decode() if self._store.check([key]) else ""
        prefix, _, lost = answer.partition(" ")
        return prefix, lost

    def _requests(self) -> list[str]:
        keys = self._watched
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        return [data.decode() for data in self._store.multi_get(keys)] if keys else []

    # ---- under the prefix ----

    def _listen(self) -> socket.socket:
        address = _own_address(self._store)
        is_loopback = ip_address(address).is_loopback
        if is_loopback and self._are_on_several_hosts():
            # On many hosts their own name means the loopback, which no other host reaches.
            address = next(iter(host_addresses.routable_addresses()), address)
        return linux.closed_in_children(listener_at((address, 0)))

    def _are_on_several_hosts(self) -> bool:
        peers = [Peer.unpack(request.split(" ", 2)[2].encode()) for request in self._requests()]
        return len({(peer.host, peer.boot_id) for peer in peers}) > 1

    def _exchange(self, store: Store, listener: socket.socket | None) -> list[_Introduction]:
        """Every rank's introduction, in order. The first rank answers requests until all are here,
        also of ranks that come in place of dead ones."""
        keys = [str(place) for place in range(len(self._ranks))]
        launch, address, secret = _own_launch(), ("", 0), ""
        if listener is not None:
            address, secret = listener.getsockname()[:2], secrets.token_hex(SECRET_NBYTES)
        own = _Introduction(
            self._me.pack().decode(),
            launch.launch_id if "secret_fd" in launch.extras else "",
            launch.encrypts or launcher.is_encrypted(),
            *address,
            secret,
        )
        store.set(keys[self._place], json.dumps(list(vars(own).values())))
        self._await(store, keys)
        return [_Introduction(*json.loads(data)) for data in store.multi_get(keys)]

    def _joined(
        self, launch_id: str, introductions: Sequence[_Introduction], listener: socket.socket | None
    ) -> tuple[LaunchInfo, ServerLocation]:
        first = introductions[0]
        hosts = [(peer.host, peer.boot_id) for peer in map(_peer, introductions)]
        node = [place for place, host in enumerate(hosts) if host == hosts[self._place]]
        encrypts = any(one.encrypts for one in introductions)
        has_launch = bool(first.launch_id) and len({one.launch_id for one in introductions}) == 1
        if encrypts and not has_launch and len(node) < len(hosts):
            raise CoordinatorError(
                f"rank {self._me.rank}: these {len(hosts)} ranks on {len(set(hosts))} hosts are to "
                "encrypt, and share a secret by torch's store alone, which does not. Start all of "
                "them by one launcher, `drumline run --encrypt`, or start without --encrypt."
            )
        secret, extras = bytes.fromhex(first.secret), {"store": "torch"}
        if has_launch:  # nobody who reads the store knows this one
            launch = _own_launch()
            secret = hmac.digest(launch_secret(launch), launch_id.encode(), "sha256")
            extras = {"secret_fd": launch.extras["secret_fd"]}
        extras |= {"master_rank": str(self._ranks[0])} | ({"encrypt": "1"} if encrypts else {})
        info = LaunchInfo(
            launch_id=launch_id,
            world_size=max(self._ranks) + 1,
            # As many as there are numbers, where nobody is on another host.
            local_world_size=len(node) if len(node) < len(hosts) else max(self._ranks) + 1,
            rank=self._me.rank,
            local_rank=node.index(self._place),
            master_addr=first.address,
            master_port=first.port,
            extras=extras,
        )
        return info, ServerLocation((first.address, first.port), secret, listener)

    # ---- waiting ----

    def _await(self, store: Store, keys: list[str], by_rank: list[str] | None = None) -> None:
        """Return when the keys are in the store. by_rank: keys that name who has not come."""
        looked_at, deadline = time.monotonic(), self._began + self._timeout_s
        begun = looked_at
        while not store.check(keys):
            now = time.monotonic()
            if now >= deadline:
                raise self._timeout(store, by_rank or keys)
            if now - looked_at > self._timings.idle_s:
                looked_at = now
                self._look(store, keys)
            pause_s = max(self._timings.store_poll_s, (now - begun) / PAUSE_PART)
            time.sleep(min(pause_s, self._timings.idle_s, deadline - now))

    def _look(self, store: Store, keys: list[str]) -> None:
        """Answer who has come since, and raise if a rank is lost, unless the keys came before."""
        if self._place == 0 and self._store.check(self._request_keys):
            self._answer()
        try:
            self.check_lost()
        except PeerLost:
            if not store.check(keys):
                raise

    def check_lost(self) -> None:
        """Raise PeerLost if a rank has died since the meeting began, as this rank sees or the first
        one has answered."""
        lost = self._heard()[1]
        for request in self._requests():
            lost = lost or _dead_peer(request, self._start_s)
        if lost:
            if self._place == 0:
                self._answer(lost)
            self._raise_lost(Peer.unpack(lost.encode()))

    def _raise_lost(self, peer: Peer) -> NoReturn:
        place = self._ranks.index(peer.rank)
        failure = RankFailure(place, peer, FailureReason.EXITED)
        raise PeerLost(
            f"rank {self._me.rank} lost {failure}, which has ended. Start all ranks again, and "
            "look at what that one printed last.",
            [failure],
        )

    def _timeout(self, store: Store, by_rank: list[str]) -> CoordinatorTimeout:
        pairs = zip(self._ranks, by_rank, strict=True)
        missing = [rank for rank, key in pairs if not store.check([key])] or [self._ranks[0]]
        waited_s = time.monotonic() - self._began
        return CoordinatorTimeout(
            f"rank {self._me.rank} timed out after {waited_s:.1f} s of waiting for ranks {missing} "
            f"of {len(self._ranks)} to meet in a torch Store. Do all ranks make the same process "
            "groups, in the same order? If so, give them a longer timeout: "
            "init_process_group(timeout=...)."
        )


@lru_cache(maxsize=1)
def _own_process(_: int) -> Peer:
    """The process of this pid, which is this one; to look at it takes as long as an exchange."""
    return Peer.me(LaunchInfo("alone"))


def _own_launch() -> LaunchInfo:
    """The launch that this process is a rank of, or one of its own where its variables tell of
    none."""
    try:
        return launcher.current()
    except launcher.LaunchInfoError:
        return LaunchInfo("alone")


def _peer(introduction: _Introduction) -> Peer:
    return Peer.unpack(introduction.peer.encode())


def _dead_peer(request: str, since_s: float) -> str:
    """The peer that made it since then, packed, if its process has ended; otherwise empty."""
    _, written_s, peer = request.split(" ", 2)
    is_dead = float(written_s) > since_s and Peer.unpack(peer.encode()).is_known_dead()
    return peer if is_dead else ""


def request_key(place: int) -> str:
    return f"requests/{place}"


def _answer_key(request: str) -> str:
    return f"answer/{request}"


def _own_address(store: Any) -> str:
    """The address of this host by which it reaches the store's server, and so the others reach it;
    the loopback for a store in a file or in memory."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", LOOPBACK), getattr(store, "port", DISCARD_PORT)
    *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    return host_addresses.local_address_for(address)
