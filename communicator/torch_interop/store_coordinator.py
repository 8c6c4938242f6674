"""The interface of a Coordinator that communicators use, over a torch Store.

comm = Communicator(StoreCoordinator(store, rank, world_size, timeout_s=300))
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn, cast

from torch.distributed import DistNetworkError, PrefixStore, ProcessGroup, Store
from torch.distributed.distributed_c10d import _get_process_group_store, _world

from communicator import timings
from communicator.calls.failures import lost_peers
from communicator.errors import CommunicatorError, CommunicatorTimeout, DrumlineError
from coordinator import (
    Coordinator,
    Credentials,
    FailureReason,
    Peer,
    PeerConnector,
    PeerLost,
    RankFailure,
    ValueCollectives,
)
from launcher import LaunchInfo, is_encrypted

LOOPBACK = "127.0.0.1"
APART = "drumline"  # the prefix of our keys in the store of a process group
DISCARD_PORT = 9  # nothing is sent there


class StoreCoordinator(ValueCollectives):
    """The ranks that share a store. Collective to create. Needs no closing. Encrypts nothing.

    The store may hold keys of earlier ranks: torchrun passes its own to the ranks that it restarts
    after a failure. So rank 0 chooses a prefix that was never used.
    """

    encrypts = False

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        global_ranks: Sequence[int] = (),
    ) -> None:
        """global_ranks: torch's numbers of these ranks, which errors show, if not from 0 on."""
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.ranks = tuple(global_ranks) or tuple(range(world_size))
        self._reset()
        token, own = secrets.token_hex(8), replace(_own_process(os.getpid()), rank=self.ranks[rank])
        me = own.pack().decode()
        meeting = _Meeting(store, token, own, rank, world_size)
        self.check_more: Callable[[], None] = lambda: self._check_meeting(meeting)
        meeting.request()
        prefix = token if rank == 0 else self._await_prefix(meeting)
        self._store: Store = PrefixStore(prefix, store)
        keys = self._publish(json.dumps([token, secrets.token_hex(32), me]).encode())
        if rank == 0:
            self._answer_requests(meeting, keys)
        introductions = [json.loads(data) for data in self._collect(keys)]
        self.check_more = lambda: None
        launch_id, secret, _ = introductions[0]
        self._set_credentials(bytes.fromhex(secret), launch_id)
        self._number([Peer.unpack(peer) for _, _, peer in introductions])

    def _reset(self) -> None:
        self._rounds, self._is_closed, self._is_part = 0, False, False
        self.check_more = lambda: None  # raises what the caller noticed
        self._stores: dict[str, int] = {}
        self.peers: tuple[Peer, ...] = ()

    def _number(self, peers: Sequence[Peer]) -> None:
        """Set what follows from the processes of all ranks, in order."""
        hosts = [(peer.host, peer.boot_id) for peer in peers]
        self.nodes = [
            [place for place, other in enumerate(hosts) if other == host]
            for host in dict.fromkeys(hosts)
        ]
        node_of = {place: node for node in self.nodes for place in node}
        self.peers = tuple(
            replace(
                peer,
                rank=rank,
                local_rank=node_of[place].index(place),
                local_world_size=len(node_of[place]),
            )
            for place, (rank, peer) in enumerate(zip(self.ranks, peers, strict=True))
        )
        me = self.peers[self.rank]
        self.local_rank, self.local_world_size = me.local_rank, me.local_world_size
        if len(self.nodes) > 1 and is_encrypted():
            raise CommunicatorError(
                f"rank {self.rank}: the ranks of init_process_group('drumline') meet in torch's "
                f"store, which does not encrypt, and these are on {len(self.nodes)} hosts of a "
                "launch with --encrypt. Use a Communicator, or start without --encrypt."
            )
        host, port = _server_address(self._store)
        self.info = LaunchInfo(
            launch_id=self._credentials.launch_id,
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            rank=self.rank,
            local_rank=self.local_rank,
            master_addr=host,
            master_port=port,
        )

    def _set_credentials(self, secret: bytes, launch_id: str) -> None:
        self._credentials = Credentials(secret, launch_id, max(self.ranks) + 1)

    @property
    def address(self) -> str:
        """The address of this host by which it reaches the store, and so the others reach it."""
        host, port = _server_address(self._store)
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])

    def allgather(self, data: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """The data of every rank, in order of rank. Collective."""
        try:
            return self._collect(self._publish(data), timeout_s)
        except DistNetworkError:  # the store was in a rank, or in torchrun's agent
            self._check_processes(timings.TIMINGS.exit_lag_s)
            raise

    def barrier(self, *, timeout_s: float | None = None) -> None:
        self.allgather(b"", timeout_s=timeout_s)

    def store(self, name: str, *, timeout_s: float | None = None) -> Store:
        """An empty store for one purpose: the n-th call with a name is the same on every rank.

        timeout_s: not used, a torch Store has its own.
        """
        number = self._stores.get(name, 0)
        self._stores[name] = number + 1
        return PrefixStore(f"lent/{name}/{number}", self._store)

    def connections(self, *, timeout_s: float | None = None) -> dict[int, socket.socket]:
        """A connection to every other rank, by rank. Collective. The caller closes the sockets.

        Both ends have proved that they know a secret, which rank 0 drew and put into the store.
        """
        if self.world_size == 1:
            return {}
        self._rounds += 1
        connector = PeerConnector(
            self.address, self._credentials, self.rank, self.peers, str(self._rounds)
        )
        return connector.connect(self.allgather, timeout_s or self.timeout_s)

    def check(self) -> None:
        """Raise PeerLost if a process of this host has ended; a store notices nothing else."""
        self._check_processes(0.0)

    def _check_processes(self, wait_s: float) -> None:
        failures = lost_peers(cast(Coordinator, self), wait_s)
        if failures:
            self._raise_lost(failures)

    def _raise_lost(self, failures: Sequence[RankFailure]) -> NoReturn:
        raise PeerLost(
            f"{self.rank_name()} lost {', '.join(map(str, failures))}, which has ended. Start "
            "all ranks again, and look at what that one printed last.",
            failures,
        )

    def split(
        self, ranks: Sequence[int], name: str = "", timeout_s: float | None = None
    ) -> StoreCoordinator | None:
        """The Coordinator of some ranks, in this order; None on others. Exchanges nothing.

        The n-th with these ranks and this name is the same on all of them.
        """
        if self.rank not in ranks:
            return None
        part = copy(self)
        part._reset()
        part._is_part = True
        part.rank, part.world_size = list(ranks).index(self.rank), len(ranks)
        part.ranks = tuple(self.ranks[rank] for rank in ranks)
        part.timeout_s = timeout_s or self.timeout_s
        name = f"split/{name}/{'-'.join(map(str, ranks))}"
        part._store = self.store(name)
        digest = hashlib.sha256(f"{self.info.launch_id}/{name}/{self._stores[name]}".encode())
        launch_id = digest.hexdigest()[:16]
        part._set_credentials(self._credentials.secret, launch_id)
        part._number([self.peers[rank] for rank in ranks])
        return part

    def rejoined(self, ranks: Sequence[int], name: str, timeout_s: float) -> StoreCoordinator:
        """As split, of ranks by torch's numbers, all of which make use of it at once."""
        part = self.split([self.ranks.index(rank) for rank in ranks], name, timeout_s)
        assert part is not None, "this rank is one of them"
        part._is_part = False
        return part

    def close(self) -> None:
        """End calls that wait for other ranks with an error. The store is the caller's."""
        self._is_closed = True

    def __enter__(self) -> StoreCoordinator:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _publish(self, data: bytes) -> list[str]:
        """Write this rank's data; the keys of every rank's data."""
        self._rounds += 1
        keys = [f"{self._rounds}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], data)  # type: ignore[arg-type]  # torch takes bytes too
        return keys

    def _collect(self, keys: list[str], timeout_s: float | None = None) -> list[bytes]:
        self._wait(self._store, keys, keys, timeout_s)
        return list(self._store.multi_get(keys))

    def _await_prefix(self, meeting: _Meeting) -> str:
        """The name that rank 0 gives to this rank, and so never to a dead one."""
        self._wait(meeting.store, [meeting.answer_key], meeting.keys)
        prefix, lost = meeting.prefix_and_lost()
        if lost:
            self._check_meeting(meeting)
        return prefix

    def _answer_requests(self, meeting: _Meeting, keys: list[str]) -> None:
        """Answer all requests, those of dead ranks too, until every rank has written its key."""
        self._wait(meeting.store, meeting.keys, meeting.keys)
        pause_s, start = timings.TIMINGS.store_poll_max_s / 8, time.monotonic()
        while time.monotonic() < start + self.timeout_s:
            meeting.answer()
            if _come_within(pause_s, self._store, keys):
                return
            self._check_peers(self._store, keys)
            pause_s = min(2 * pause_s, timings.TIMINGS.store_poll_max_s)
        raise self._timeout(self._store, keys, start)

    def _check_meeting(self, meeting: _Meeting) -> None:
        peer = meeting.find_lost()
        if peer is not None:
            self._raise_lost([RankFailure(self.ranks.index(peer.rank), peer, FailureReason.EXITED)])

    def _wait(
        self, store: Store, keys: list[str], by_rank: list[str], timeout_s: float | None = None
    ) -> None:
        """Return when the keys are in the store. by_rank: one key that each rank writes."""
        timeout_s, start = timeout_s or self.timeout_s, time.monotonic()
        if self._is_part:
            return self._poll(store, keys, timeout_s)
        while (left_s := start + timeout_s - time.monotonic()) > 0:
            if _come_within(min(left_s, timings.TIMINGS.store_wait_s), store, keys):
                return
            self._check_peers(store, keys)
        raise self._timeout(store, by_rank, start)

    def _poll(self, store: Store, keys: list[str], timeout_s: float) -> None:
        """As _wait, while other threads of this process reach the store, and peers may end."""
        start, checked = time.monotonic(), 0.0
        while not store.check(keys):
            waited_s = time.monotonic() - start
            if waited_s > timeout_s:
                raise self._timeout(store, keys, start)
            if self._is_closed:
                raise CommunicatorError(f"{self.rank_name()}: the group was destroyed.")
            if waited_s > checked + timings.TIMINGS.liveness_poll_s:
                checked = waited_s
                self._check_peers(store, keys)
            pause_s = min(waited_s / 4, timings.TIMINGS.store_poll_max_s)
            time.sleep(max(timings.TIMINGS.store_poll_s, pause_s))

    def _check_peers(self, store: Store, keys: list[str]) -> None:
        """Raise what befell a peer, unless the keys had come before it."""
        try:
            self.check()
            self.check_more()
        except DrumlineError:
            if not store.check(keys):
                raise

    def _timeout(self, store: Store, by_rank: list[str], start: float) -> CommunicatorTimeout:
        missing = [place for place, key in enumerate(by_rank) if not store.check([key])]
        waited_s = time.monotonic() - start
        waited = f"{self.rank_name()} timed out after {waited_s:.1f} s of waiting for"
        more = "If so, give them a longer timeout in init_process_group(timeout=...)."
        if self._is_part:
            late = ", ".join(str(self.peers[rank]) for rank in missing) or "the others"
            return CommunicatorTimeout(
                f"{waited} {late} in the first call of a process group of {self.world_size} ranks. "
                f"Do all its ranks make the same calls? {more}"
            )
        late = str([self.ranks[place] for place in missing or [0]])
        return CommunicatorTimeout(
            f"{waited} ranks {late} of {self.world_size} to make the same communicator. Do all "
            f"ranks make the same process groups, in the same order? {more}"
        )


@lru_cache(maxsize=1)
def _own_process(_: int) -> Peer:
    """The process of this pid, which is this one; to look at it takes as long as an exchange."""
    return Peer.me(LaunchInfo("alone"))


class _Meeting:
    """The requests by which ranks that share a store of torch learn rank 0's prefix.

    A dead process may be an earlier rank, whose successor is still to come. It is not, if it made
    its request after this process started: a launcher ends all ranks before it starts them again.
    """

    def __init__(self, store: Store, token: str, own: Peer, rank: int, world_size: int) -> None:
        self.store, self.keys = store, [_request_key(rank) for rank in range(world_size)]
        self._prefix, self._own_key = token, self.keys[rank]
        self._own_request = (
            f"{token} {time.clock_gettime(time.CLOCK_BOOTTIME)} {own.pack().decode()}"
        )
        self._start_s = own.start_ticks / os.sysconf("SC_CLK_TCK")
        self.answer_key = _answer_key(self._own_request)
        self._watched = self.keys if rank == 0 else self.keys[:1]

    def request(self) -> None:
        self.store.set(self._own_key, self._own_request)

    def answer(self, lost: str = "") -> None:
        """By rank 0: tell all ranks the prefix, and who is lost."""
        for request in self._requests():
            self.store.set(_answer_key(request), f"{self._prefix} {lost}")

    def prefix_and_lost(self) -> tuple[str, str]:
        """The answer; empty before it has come."""
        has_come = self.store.check([self.answer_key])
        answer = self.store.get(self.answer_key).decode() if has_come else ""
        prefix, _, lost = answer.partition(" ")
        return prefix, lost

    def find_lost(self) -> Peer | None:
        """A rank that has died since the meeting began, as this one sees or rank 0 has answered."""
        lost = self.prefix_and_lost()[1]
        for request in self._requests():
            lost = lost or _dead_peer(request, self._start_s)
        if lost and self._own_key == self.keys[0]:
            self.answer(lost)
        return Peer.unpack(lost.encode()) if lost else None

    def _requests(self) -> list[str]:
        keys = self._watched
        if not self.store.check(keys):
            keys = [key for key in keys if self.store.check([key])]
        return [data.decode() for data in self.store.multi_get(keys)] if keys else []


def _dead_peer(request: str, since_s: float) -> str:
    """The peer that made it since then, packed, if its process has ended; else empty."""
    _, written_s, peer = request.split(" ", 2)
    is_dead = float(written_s) > since_s and Peer.unpack(peer.encode()).is_known_dead()
    return peer if is_dead else ""


def _request_key(rank: int) -> str:
    return f"requests/{rank}"


def _answer_key(token: str) -> str:
    return f"answer/{token}"


def _come_within(timeout_s: float, store: Store, keys: list[str]) -> bool:
    """True once the keys are in the store. Its own wait() would log each time-out."""
    start = time.monotonic()
    while not store.check(keys):
        waited_s = time.monotonic() - start
        if waited_s > timeout_s:
            return False
        pause_s = min(waited_s / 4, timings.TIMINGS.store_poll_max_s)
        time.sleep(max(timings.TIMINGS.store_poll_s, pause_s))
    return True


def _server_address(store: Any) -> tuple[str, int]:
    """Host and port of the store; this host for one in a file or in memory."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", LOOPBACK), getattr(store, "port", DISCARD_PORT)


def coordinator_over(
    ranks: object, rank: int | None, world_size: int | None, timeout_s: float
) -> StoreCoordinator:
    """The Coordinator of a process group, or of the ranks that share a store. Collective."""
    if isinstance(ranks, ProcessGroup):
        if rank is not None or world_size is not None:
            raise ValueError(
                f"Communicator.over(group, {rank!r}, {world_size!r}): the group knows its ranks. "
                "Pass rank and world_size with a Store alone, and the backend as backend=."
            )
        store = PrefixStore(APART, _get_process_group_store(ranks))
        global_ranks = _world.pg_group_ranks.get(
            ranks, {}
        )  # of no group without init_process_group
        return StoreCoordinator(store, ranks.rank(), ranks.size(), timeout_s, list(global_ranks))
    if not isinstance(ranks, Store):
        kind = type(ranks).__name__
        raise TypeError(f"Communicator.over({kind}): needs a torch ProcessGroup or a torch Store")
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ValueError(
            f"Communicator.over(store, rank={rank}, world_size={world_size}): pass the rank of "
            "this process, and the number of ranks that share the store."
        )
    return StoreCoordinator(ranks, rank, world_size, timeout_s)
