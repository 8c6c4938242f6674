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


class Meeting:
    """The ranks that share a store. Collective to make, and each rank makes it once per store.

    It has the names of a Coordinator that communicators use, and no others. It holds nothing that
    needs closing.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._store = store
        self._rounds = 0
        self._lent: dict[str, int] = {}
        alone = LaunchInfo(launch_id="alone", world_size=1)
        here = Peer.me(alone)
        mine = json.dumps([secrets.token_hex(8), here.host, here.boot_id])
        said = [json.loads(data) for data in self.allgather(mine.encode())]
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
        self._rounds += 1
        keys = [f"{self._rounds}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], data)  # type: ignore[arg-type]  # torch takes bytes too
        begun = time.monotonic()
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s or self.timeout_s))
        except RuntimeError as error:
            raise self._missing(keys, time.monotonic() - begun) from error
        return [self._store.get(key) for key in keys]

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

    def _missing(self, keys: list[str], waited_s: float) -> CommunicatorTimeout:
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        return CommunicatorTimeout(
            f"rank {self.rank} waited {waited_s:.1f} s for ranks {missing} of {self.world_size} to "
            "make the same communicator. Do all ranks make the same process groups, in the same "
            "order?"
        )


def _server(store: Any) -> tuple[str, int]:
    """Where the store is served; this host, if it is a file or a piece of memory."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", LOOPBACK), getattr(store, "port", DISCARD_PORT)
