"""How the ranks of a launch agree: small bytes, on the CPU, always with a deadline.

with Coordinator() as coor:
    config = coor.broadcast(b"lr=0.1" if coor.is_master() else None)
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

from torch.distributed import HashStore, PrefixStore, Store

import launcher
from coordinator import lock as locks
from coordinator.blame import blame, report_failure
from coordinator.calls import Call, caller
from coordinator.errors import CoordinatorError, CoordinatorTimeout
from coordinator.gloo import Group
from coordinator.peers import Peer, nodes
from coordinator.store import SharedStore, address_towards, meet

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 300.0
POLL_S = 0.01


class Coordinator:
    """The ranks of a launch, or some of them, as a group that can agree. Collective to make.

    info: who this process is; launcher.current() if not given.
    timeout_s: the deadline of every call that is not given one of its own.

    Raises CoordinatorTimeout if not every rank comes in time, CoordinatorError if the ranks do not
    belong together. One thread at a time uses a Coordinator; several Coordinators are independent.
    """

    def __init__(
        self, info: launcher.LaunchInfo | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.info = launcher.current() if info is None else info
        self.timeout_s = timeout_s
        self._shared: SharedStore | None = None
        store: Store | None = None
        if self.info.world_size > 1:
            self._shared, store = meet(self.info, timeout_s)
        self._join(store, range(self.info.world_size), Peer.me(self.info))

    def _join(self, store: Store | None, ranks: Sequence[int], me: Peer) -> None:
        """Become one rank of a group: meet the members in the store and join them with gloo."""
        self.ranks = tuple(ranks)  # of the launch, by rank of this group
        self.rank = self.ranks.index(self.info.rank)
        self.world_size = len(self.ranks)
        self._store = store
        self._calls = self._firsts = 0
        self._splits: dict[tuple[int, ...], int] = {}
        self._lent: dict[str, int] = {}
        self._broken: CoordinatorError | None = None
        self._closed = False
        self._group: Group | None = None
        self._local: Coordinator | None = None
        self.peers: tuple[Peer, ...] = (me,)
        if store is not None and self.world_size > 1:
            self.peers = self._introduce(store, me)
            self._group = self._guarded("start", self.timeout_s, lambda call: self._connect(store))
        self.nodes = [[self.ranks.index(rank) for rank in node] for node in nodes(self.peers)]
        self._node = next(node for node in self.nodes if self.rank in node)
        self.local_rank = self._node.index(self.rank)
        self.local_world_size = len(self._node)

    def _introduce(self, store: Store, me: Peer) -> tuple[Peer, ...]:
        """Tell the others who I am, and hear who they are."""
        store.set(f"peer/{self.rank}", me.to_json())
        keys = [f"peer/{rank}" for rank in range(self.world_size)]
        try:
            store.wait(keys, timedelta(seconds=self.timeout_s))
        except Exception as error:
            missing = [rank for rank, key in enumerate(keys) if not _has(store, key)]
            raise CoordinatorTimeout(
                f"rank {self.rank} waited {self.timeout_s:g} s for ranks {missing} to join launch "
                f"{self.info.launch_id}. Were all {self.world_size} ranks started, and do the "
                f"missing ones reach {self.info.master_addr}:{self.info.master_port}?"
            ) from error
        return tuple(Peer.from_json(data) for data in store.multi_get(keys))

    def _connect(self, store: Store) -> Group:
        gloo = PrefixStore("gloo", store)
        return Group(gloo, self.rank, self.world_size, self.address, self.timeout_s)

    @property
    def address(self) -> str:
        """The address of this host by which it reaches the master, and so the others reach it."""
        return address_towards(self.info.master_addr, self.info.master_port)

    def store(self, name: str) -> Store:
        """A torch Store that the ranks of the group share, for libraries that meet in one.

        Collective in this: the n-th call with a name gives every rank the same store, empty before.
        """
        self._check_open("store")
        number = self._lent.get(name, 0)
        self._lent[name] = number + 1
        return PrefixStore(f"lent/{name}/{number}", self._store or HashStore())

    def is_master(self) -> bool:
        """Is this rank 0 of the group?"""
        return self.rank == 0

    def is_local_master(self) -> bool:
        """Is this the first of the group's ranks on its node?"""
        return self.local_rank == 0

    def broadcast(
        self, data: bytes | None = None, src: int = 0, *, timeout_s: float | None = None
    ) -> bytes:
        """The data of rank src, on every rank. Collective; only src needs to give data.

        Raises ValueError if src is no rank of the group or gives no bytes.
        """
        self._check_rank(src, "src")
        if self.rank == src and not isinstance(data, bytes | bytearray | memoryview):
            raise ValueError(f"rank {src} broadcasts {type(data).__name__}, not bytes")
        mine = bytes(data) if self.rank == src and data is not None else None
        if self._group is None:
            self._check_open("broadcast")
            return mine or b""
        group = self._group
        return self._guarded(
            "broadcast",
            timeout_s,
            lambda call: group.broadcast(mine, src, call.number, self._deadline(timeout_s)),
        )

    def allgather(self, data: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """The data of every rank, in order of rank, on every rank. Collective; sizes may differ."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ValueError(f"rank {self.rank} gathers {type(data).__name__}, not bytes")
        if self._group is None:
            self._check_open("allgather")
            return [bytes(data)]
        group = self._group
        return self._guarded(
            "allgather",
            timeout_s,
            lambda call: group.allgather(bytes(data), call.number, self._deadline(timeout_s)),
        )

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return once every rank of the group has called. Collective."""
        if self._group is None:
            return self._check_open("barrier")
        group = self._group
        self._guarded("barrier", timeout_s, lambda call: group.barrier(self._deadline(timeout_s)))

    def local_barrier(self, *, timeout_s: float | None = None) -> None:
        """Return once every rank of this node has called. Collective over the node."""
        if self.local_world_size == self.world_size:
            return self.barrier(timeout_s=timeout_s)
        if self._local is None:
            self._local = self.split(self._node)
        assert self._local is not None
        self._local.barrier(timeout_s=timeout_s)

    @contextmanager
    def local_master_first(self, *, timeout_s: float | None = None) -> Iterator[None]:
        """Run the body on the node's first rank, and then on its others. Collective over the node.

        If the body raises on the first rank, the others raise CoordinatorError without running it.
        """
        self._check_open("local_master_first")
        self._firsts += 1  # counted apart: other nodes need not call
        key = f"first/{self._node[0]}/{self._firsts}"
        if self.is_local_master():
            yield from self._body_first(key)
        else:
            self._await_first(key, self._deadline(timeout_s))
            yield

    def _body_first(self, key: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._put(key, "".join(traceback.format_exception(error)))
            raise
        self._put(key, "")

    def _await_first(self, key: str, timeout_s: float) -> None:
        assert self._store is not None
        first = self.peers[self._node[0]]
        deadline = time.monotonic() + timeout_s
        while not _has(self._store, key):
            if first.is_seen_dead():
                raise self._break(f"rank {self.rank} waited for {first} to go first; it is gone")
            if time.monotonic() > deadline:
                raise CoordinatorTimeout(
                    f"rank {self.rank} waited {timeout_s:g} s for {first} to go first ({caller()})"
                )
            time.sleep(POLL_S)
        failure = self._store.get(key).decode()
        if failure:
            raise CoordinatorError(f"rank {self.rank}: {first} went first and failed:\n{failure}")

    def lock(self, name: str, *, timeout_s: float | None = None) -> AbstractContextManager[None]:
        """Hold a lock that one rank of this node holds at a time. Not collective.

        Raises CoordinatorTimeout naming the holder and since when. The lock belongs to the launch:
        another launch with a lock of the same name is not kept waiting.
        """
        path = locks.lock_path(self.info.launch_id, name)
        return locks.hold(path, name, str(self.peers[self.rank]), self._deadline(timeout_s))

    def split(self, ranks: Sequence[int]) -> Coordinator | None:
        """A Coordinator over some ranks of this one, in the order given. Collective over them.

        Another rank may call too and gets None at once. The new rank i is ranks[i].
        Raises ValueError if ranks is empty, names one twice or names one that is not there.
        """
        self._check_open("split")
        members = tuple(ranks)
        if not members or len(set(members)) != len(members):
            raise ValueError(f"rank {self.rank}: split needs distinct ranks, not {members}")
        for member in members:
            self._check_rank(member, "ranks")
        if self.rank not in members:
            return None
        number = self._splits.get(members, 0)
        self._splits[members] = number + 1
        return self._subgroup(members, number)

    def _subgroup(self, members: tuple[int, ...], number: int) -> Coordinator:
        group = Coordinator.__new__(Coordinator)
        group.info, group.timeout_s, group._shared = self.info, self.timeout_s, self._shared
        name = f"split/{'-'.join(map(str, members))}/{number}"
        store = PrefixStore(name, self._store) if self._store is not None else None
        group._join(store, [self.ranks[member] for member in members], self.peers[self.rank])
        return group

    def close(self) -> None:
        """Leave. Collective: rank 0 of the launch serves the store, so it waits for the others.

        Calling it twice is harmless. Raises CoordinatorTimeout if a rank does not leave in time.
        """
        if self._closed:
            return
        self._closed = True
        if self._local is not None:
            self._local.close()
        if self._store is not None and self._broken is None:
            self._say_goodbye()
        self._release()

    def _say_goodbye(self) -> None:
        self._put(f"bye/{self.rank}", "")
        if self.info.rank == 0:
            self._await_goodbyes()

    def _await_goodbyes(self) -> None:
        """Rank 0 of the launch holds the store, so it leaves last."""
        assert self._store is not None
        waiting = set(range(self.world_size))
        deadline = time.monotonic() + self.timeout_s
        while waiting:
            waiting = {rank for rank in waiting if not _has(self._store, f"bye/{rank}")}
            waiting = {rank for rank in waiting if not self.peers[rank].is_seen_dead()}
            if waiting and time.monotonic() > deadline:
                late = ", ".join(str(self.peers[rank]) for rank in sorted(waiting))
                self._release()
                raise CoordinatorTimeout(
                    f"rank 0 waited {self.timeout_s:g} s in close() for {late}. Every rank must "
                    "close its Coordinator, or end."
                )
            time.sleep(POLL_S / 10 if len(waiting) < 2 else POLL_S)

    def _release(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self._store = self._shared = None

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._abandon(error)
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._store is not None:
            self._broken = CoordinatorError("forgotten without close()")
            self._put(f"bye/{self.rank}", "")
            self._release()

    def _abandon(self, error: BaseException) -> None:
        """Leave because of error: the others hear why, and nobody is waited for."""
        text = "".join(traceback.format_exception(error))
        if self._store is not None and self._broken is None:
            report_failure(self._store, self.rank, f"left because of\n{text}")
            self._put(f"bye/{self.rank}", "")
        self._broken = CoordinatorError(f"rank {self.rank} left because of {error!r}")

    def _guarded(self, name: str, timeout_s: float | None, work: Callable[[Call], T]) -> T:
        """Run one collective call; if it fails, find out who is to blame and raise that."""
        self._check_open(name)
        call = Call(name, self._next_number(), caller())
        start = time.monotonic()
        try:
            return work(call)
        except Exception as error:
            waited = time.monotonic() - start
            assert self._store is not None
            self._broken = blame(self._store, self.rank, self.peers, call, waited, error)
            raise self._broken from error

    def _next_number(self) -> int:
        self._calls += 1
        return self._calls

    def _deadline(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else timeout_s

    def _put(self, key: str, value: str) -> None:
        """Leave a note for the others; if the store is gone, there is nobody to read it."""
        if self._store is not None:
            try:
                self._store.set(key, value)
            except RuntimeError:
                pass

    def _break(self, message: str) -> CoordinatorError:
        self._broken = CoordinatorError(message)
        return self._broken

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise CoordinatorError(
                f"rank {self.rank}: {name} on a closed Coordinator ({caller()}). Make a "
                "new one, or close it later."
            )
        if self._broken is not None:
            raise CoordinatorError(
                f"rank {self.rank}: {name} ({caller()}) cannot be had, for the ranks fell out of "
                f"step before. Close this Coordinator and start over. It was: {self._broken}"
            ) from self._broken

    def _check_rank(self, rank: int, name: str) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {self.rank}: {name}={rank!r} is no rank of this group of {self.world_size}"
            )

    def __repr__(self) -> str:
        return f"Coordinator(rank={self.rank}, world_size={self.world_size}, ranks={self.ranks})"


def _has(store: Store, key: str) -> bool:
    return bool(store.check([key]))
