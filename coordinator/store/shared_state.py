"""The state that the ranks of a group share beside their calls: keys, stores, turns, locks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import launcher
from coordinator.call_site import PendingCall
from coordinator.errors import CoordinatorTimeout
from coordinator.failure.failure_queries import FailureQueries
from coordinator.store import lock as locks
from coordinator.store import survivors
from coordinator.store.prefix_store import PrefixStore
from coordinator.store.sequencer import Sequencer

if TYPE_CHECKING:
    from torch.distributed import Store


class SharedState(FailureQueries):
    """The keys, stores, turns and locks of a Coordinator, and who goes on after a failure."""

    _node_ranks: list[int]
    _locks: locks.Locks
    _once_locks: dict[str, threading.Lock]
    _store: PrefixStore
    _user_store: PrefixStore
    _stores: list[Store]

    # ---- sequencing ----

    def local_master_first(self, *, timeout_s: float | None = None) -> AbstractContextManager[None]:
        """Run the body on the node's first rank, and then on its others. Collective over the node.

        If the body raises on the first rank, the others raise CoordinatorError without running it.
        """
        return self._first("local_master_first", self._node_ranks, timeout_s)

    def master_first(self, *, timeout_s: float | None = None) -> AbstractContextManager[None]:
        """Run the body on rank 0, and then on the others. Collective; as local_master_first."""
        return self._first("master_first", range(self.world_size), timeout_s)

    def _first(
        self, name: str, ranks: Sequence[int], timeout_s: float | None
    ) -> AbstractContextManager[None]:
        """A turn of the first of the ranks, counted apart from calls: not all need take part."""
        self._check_open(name)
        number = self._count((name, *ranks))
        call = self._begin_call(name, timeout_s, number + 1)
        first = self.ranks[ranks[0]]
        return self._sequencer(name, str(first), str(number)).first(first, call)

    def once(
        self, name: str, work: Callable[[], bytes], *, timeout_s: float | None = None
    ) -> bytes:
        """The result of work() on the one rank of this node that ran it. Not collective.

        The first rank to come runs it; the others, now or later, get its bytes, or CoordinatorError
        with its traceback if it raised. A name stands for one run in the life of the Coordinator.
        """
        self._check_open("once")
        call = self._begin_call("once", timeout_s)
        own_lock = self._once_locks.setdefault(name, threading.Lock())
        if not own_lock.acquire(timeout=call.left_s):
            raise CoordinatorTimeout(
                f"{self._me} waited {call.timeout_s:g} s in {call.call} for another thread of its "
                f"own that is in once({name!r}). Give a longer timeout_s, or look at what it does."
            )
        try:
            return self._sequencer("once", str(self._node_ranks[0]), name).once(work, call)
        finally:
            own_lock.release()

    def _sequencer(self, *names: str) -> Sequencer:
        return Sequencer(self._store.child("sequences", *names), self.info.rank, self._detector)

    def lock(self, name: str, *, timeout_s: float | None = None) -> AbstractContextManager[None]:
        """Hold a lock that one rank of this node holds at a time. Not collective.

        Raises CoordinatorTimeout naming the holder and since when. The lock belongs to the launch:
        another launch with a lock of the same name is not kept waiting.
        """
        self._check_open("lock")
        call = self._begin_call("lock", timeout_s)
        return locks.hold(self._locks.path(name), name, str(self.peers[self.rank]), call)

    # ---- key-value store ----

    def put(self, key: str, value: bytes, *, timeout_s: float | None = None) -> None:
        """Keep value at rank 0 of the launch, for the ranks of this group. Not collective."""
        self._check_open("put")
        data = self._bytes(value, "puts")
        self._user_store.put(key, data, self._begin_call("put", timeout_s))

    def get(self, key: str, *, timeout_s: float | None = None) -> bytes | None:
        """The value that a rank of this group has put; None if none has."""
        self._check_open("get")
        return self._user_store.get(key, self._begin_call("get", timeout_s))

    def wait(self, key: str, *, timeout_s: float | None = None) -> bytes:
        """Wait until a rank of this group has put the value, and return it.

        Raises CoordinatorTimeout saying where the ranks are, PeerLost once one of them has died.
        """
        self._check_open("wait")
        return self._wait(self._user_store, [key], self._begin_call("wait", timeout_s))[0]

    def _wait(self, store: PrefixStore, keys: Sequence[str], call: PendingCall) -> list[bytes]:
        detector = self._detector
        if detector is None:
            return store.wait(keys, call)

        def check() -> None:
            self._check_open(call.name)
            detector.check_alive(call)

        try:
            return store.wait(keys, call, check)
        except CoordinatorTimeout as error:
            text = f"{error} The ranks are:\n{detector.monitor.short_table()}"
            raise CoordinatorTimeout(text) from error.__cause__

    def store(self, name: str, *, timeout_s: float | None = None) -> Store:
        """A torch Store that the ranks of the group share, for libraries that meet in one.

        Collective in this: the n-th call with a name gives every rank the same store, empty before.
        timeout_s: of each call on it. Its errors are torch's kinds and ours.
        """
        from coordinator.store.torch_store import TorchStore

        self._check_open("store")
        child = self._store.child("stores", name, str(self._count(("store", name))))
        self._stores.append(TorchStore(child, self._wait, self._limit(timeout_s)))
        return self._stores[-1]

    # ---- after a failure ----

    def survivors(
        self, *, release: bool = False, timeout_s: float | None = None
    ) -> launcher.LaunchInfo | None:
        """This rank in a launch of the ranks that go on after a failure, for a new Coordinator.

        To be called by each of them before it closes this one, which is the first of its launch:
        rank 0 waits for those that have not ended. A suspended rank is none of them, nor is one
        that does not call in time. None on a rank that is not to go on: it came too late, or rank 0
        wants to release all others. Raises PeerLost once rank 0 is gone.

        Calling it again, on all of them, starts anew, for ranks that are lost while they meet.
        The extra `master_fd` is rank 0's socket, to be closed once the Coordinator was made.
        """
        self._check_open("survivors", may_be_broken=True)
        call = self._begin_call("survivors", timeout_s)
        store = self._store.child("survivors", str(call.number))
        if self.is_master():
            server, failed = self._server, self._ended_ranks
            address = self.info.master_addr if server is None else server.address[0]
            present = server.present if server is not None else list[int]
            launch = survivors.lead(self.info, store, address, failed, present, release, call)
        else:
            launch = survivors.follow(self.info, store, call)
        if self.info.rank not in launch["ranks"]:
            return None
        return survivors.launch_info(self.info, launch, self._node_ranks)
