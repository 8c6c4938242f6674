"""What a Communicator needs of a Coordinator, over a Store that somebody else opened.

comm = Communicator(Meeting(store, rank, world_size, timeout_s=300))
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store

from communicator.errors import CommunicatorTimeout
from coordinator import Peer
from launcher import LaunchInfo

LOOPBACK = "127.0.0.1"
DISCARD_PORT = 9  # nothing is sent there
FIRST_PAUSE_S, LAST_PAUSE_S = 0.0005, 0.1


class Meeting:
    """The ranks that share a store. Collective to make.

    The store may hold what others left: torchrun gives the one that it has to the ranks that it
    starts after a failure. So rank 0 names a part of it that was never used.

    It has the names of a Coordinator that communicators use, and no others. It holds nothing that
    needs closing.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._rounds = 0
        self._lent: dict[str, int] = {}
        alone = LaunchInfo(launch_id="alone", world_size=1)
        here = Peer.me(alone)
        token = secrets.token_hex(8)
        part = token if rank == 0 else self._ask_for_part(store, token)
        self._store = PrefixStore(part, store)
        keys = self._put(json.dumps([token, here.host, here.boot_id]).encode())
        if rank == 0:
            self._name_part(store, part, keys)
        said = [json.loads(data) for data in self._get(keys)]
        places = [tuple(place) for _, *place in said]
        self.nodes = [
            [rank for rank, other in enumerate(places) if other == place]
            for place in dict.fromkeys(places)
        ]
        self._node = next(node for node in self.nodes if rank in node)
        self.local_rank, self.local_world_size = self._node.index(rank), len(self._node)
        self.info = LaunchInfo(
            launch_id=said[0][0],
            world_size=world_size,
            local_world_size=self.local_world_size,
            rank=rank,
            local_rank=self.local_rank,
            master_addr=_server(store)[0],
            master_port=_server(store)[1],
        )
        me = Peer.me(self.info).to_json().encode()
        self.peers = tuple(Peer.from_json(data) for data in self.allgather(me))

    @property
    def address(self) -> str:
        """The address of this host by which it reaches the store, and so the others reach it."""
        host, port = _server(self._store)
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])

    def allgather(self, data: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """The data of every rank, in order of rank. Collective."""
        return self._get(self._put(data), timeout_s)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        self.allgather(b"", timeout_s=timeout_s)

    def store(self, name: str) -> Store:
        """A part of the store that nobody else uses. Collective in this: the n-th call with a name
        gives every rank the same, empty before.
        """
        number = self._lent.get(name, 0)
        self._lent[name] = number + 1
        return PrefixStore(f"lent/{name}/{number}", self._store)

    def split(self, ranks: Sequence[int]) -> Meeting | None:
        """A Meeting of some ranks, in this order. Collective over them; the others get None."""
        if self.rank not in ranks:
            return None
        store = self.store(f"split/{'-'.join(map(str, ranks))}")
        return Meeting(store, list(ranks).index(self.rank), len(ranks), self.timeout_s)

    def close(self) -> None:
        """The store is somebody else's."""

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _put(self, data: bytes) -> list[str]:
        """The keys of the data of every rank, now that this rank's is there."""
        self._rounds += 1
        keys = [f"{self._rounds}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], data)  # type: ignore[arg-type]  # torch takes bytes too
        return keys

    def _get(self, keys: list[str], timeout_s: float | None = None) -> list[bytes]:
        self._wait(self._store, keys, keys, timeout_s)
        return [self._store.get(key) for key in keys]

    def _ask_for_part(self, store: Store, token: str) -> str:
        """The name that rank 0 gives to the asker with this token, and so never to a dead one."""
        store.set(_asking(self.rank), token)
        asking = [_asking(rank) for rank in range(self.world_size)]
        self._wait(store, [_answer(token)], asking)
        return store.get(_answer(token)).decode()

    def _name_part(self, store: Store, part: str, keys: list[str]) -> None:
        """Answer all that ask, the dead too, until every rank has put its key into the part."""
        store.set(_asking(0), part)
        pause_s, begun = FIRST_PAUSE_S, time.monotonic()
        while not self._store.check(keys):
            if time.monotonic() > begun + self.timeout_s:
                raise self._missing(self._store, keys, begun)
            for rank in range(1, self.world_size):
                if store.check([_asking(rank)]):
                    store.set(_answer(store.get(_asking(rank)).decode()), part)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _wait(
        self, store: Store, keys: list[str], by_rank: list[str], timeout_s: float | None = None
    ) -> None:
        """Return when the keys are in the store. by_rank: one key that each rank puts there."""
        begun = time.monotonic()
        try:
            store.wait(keys, timedelta(seconds=timeout_s or self.timeout_s))
        except RuntimeError as error:
            raise self._missing(store, by_rank, begun) from error

    def _missing(self, store: Store, by_rank: list[str], begun: float) -> CommunicatorTimeout:
        missing = [rank for rank, key in enumerate(by_rank) if not store.check([key])]
        return CommunicatorTimeout(
            f"rank {self.rank} waited {time.monotonic() - begun:.1f} s for ranks {missing or [0]} "
            f"of {self.world_size} to make the same communicator. Do all ranks make the same "
            "process groups, in the same order?"
        )


def _asking(rank: int) -> str:
    return f"asking/{rank}"


def _answer(token: str) -> str:
    return f"answer/{token}"


def _server(store: Any) -> tuple[str, int]:
    """Where the store is served; this host, if it is a file or a piece of memory."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", LOOPBACK), getattr(store, "port", DISCARD_PORT)
