"""The key-value store in which the ranks of a launch meet: torch's TCPStore on one address.

Rank 0 serves it on a socket that was bound and listening before any other rank looked for it;
torch by itself would listen on every interface (pytorch#173909).
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from coordinator.errors import CoordinatorError, CoordinatorTimeout
from launcher import LaunchInfo

RETRY_S = 0.05


class SharedStore:
    """A store and what keeps it alive. The server ends when the last Coordinator lets go of it."""

    def __init__(self, store: Store) -> None:
        self.store = store


class _OpenStores:
    """The stores this process has open, one for each rank of a launch that lives in it.

    A listening socket belongs to the process whatever we do, so its owner is found by process too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: weakref.WeakValueDictionary[tuple[str, int], SharedStore] = (
            weakref.WeakValueDictionary()
        )
        self._count: dict[tuple[str, int], int] = {}

    def enter(self, info: LaunchInfo, timeout_s: float) -> tuple[SharedStore, int]:
        """The store of this rank, opened if need be, and how many Coordinators came before."""
        key = (info.launch_id, info.rank)
        with self._lock:
            number = self._count.get(key, 0)
            self._count[key] = number + 1
            shared = self._open.get(key)
        if shared is None:
            shared = SharedStore(_open(info, timeout_s))
            with self._lock:
                self._open[key] = shared
        return shared, number


_open_stores = _OpenStores()


def meet(info: LaunchInfo, timeout_s: float) -> tuple[SharedStore, Store]:
    """Open the store of the launch and meet in it. Collective: the n-th call meets the n-th calls.

    Returns what must be kept while the store is in use, and the store, under a name of its own.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        shared, number = _open_stores.enter(info, timeout_s)
        store = PrefixStore(f"{info.launch_id}/{number}", shared.store)
        try:
            _handshake(info, store, deadline)
            return shared, store
        except _Stale:
            # The store of the Coordinator before this one, which was about to close.
            del shared, store
            _open_stores._count[(info.launch_id, info.rank)] = number
            time.sleep(RETRY_S)


class _Stale(Exception):
    pass


def _handshake(info: LaunchInfo, store: Store, deadline: float) -> None:
    greeting = f"{info.launch_id}/{info.world_size}"
    if info.rank == 0:
        store.set("greeting", greeting)
        return
    left = deadline - time.monotonic()
    try:
        store.wait(["greeting"], timedelta(seconds=max(left, 0.001)))
        found = store.get("greeting").decode()
    except Exception as error:
        if time.monotonic() < deadline:
            raise _Stale from error
        raise CoordinatorTimeout(
            f"rank {info.rank} found a store at {info.master_addr}:{info.master_port} but rank 0 "
            f"did not greet it in time. Does something else listen there, or is rank 0 stuck?"
        ) from error
    if found != greeting:
        raise CoordinatorError(
            f"rank {info.rank} expected launch {greeting!r} at {info.master_addr}:"
            f"{info.master_port} and found {found!r}. "
            "Give each launch its own --launch-id or --master-port."
        )


def _open(info: LaunchInfo, timeout_s: float) -> Store:
    serves = info.rank == 0 and info.extras.get("store") != "agent"
    return _serve(info, timeout_s) if serves else _connect(info, timeout_s)


def _serve(info: LaunchInfo, timeout_s: float) -> Store:
    return TCPStore(
        info.master_addr,
        info.master_port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=_listening(info),
        timeout=timedelta(seconds=timeout_s),
    )


def _listening(info: LaunchInfo) -> int:
    """A descriptor, for the store to own, of a socket that listens at the master's address only."""
    if "master_fd" in info.extras:
        return os.dup(int(info.extras["master_fd"]))
    family, _, _, _, address = socket.getaddrinfo(
        info.master_addr, info.master_port, type=socket.SOCK_STREAM
    )[0]
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise CoordinatorError(
            f"rank 0 cannot listen at {info.master_addr}:{info.master_port}: {error}. master_addr "
            "must be an address of rank 0's host and the port free: choose another --master-port."
        ) from error
    return listener.detach()


def _connect(info: LaunchInfo, timeout_s: float) -> Store:
    deadline = time.monotonic() + timeout_s
    while True:
        left = max(deadline - time.monotonic(), 0.001)
        try:
            return TCPStore(
                info.master_addr,
                info.master_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=left),
            )
        except RuntimeError as error:
            if time.monotonic() >= deadline:
                raise CoordinatorTimeout(
                    f"rank {info.rank} could not reach rank 0 at {info.master_addr}:"
                    f"{info.master_port} for {timeout_s:g} s. Is rank 0 alive, is the address one "
                    "that this host can reach, and does a firewall stand between?"
                ) from error
            time.sleep(RETRY_S)


def address_towards(host: str, port: int) -> str:
    """The local address from which this host reaches the other; asked of the routes."""
    family, kind, _, _, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
