"""How the ranks of a launch agree: small bytes, on the CPU, always with a deadline.

with Coordinator() as coor:
    config = coor.broadcast(b"lr=0.1" if coor.is_master() else None)
"""

from __future__ import annotations

import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import launcher
from coordinator import lock as locks
from coordinator import session as sessions
from coordinator import stacks
from coordinator.addresses import candidates, source_towards
from coordinator.blame import CLOSED, FORGOTTEN, Watch
from coordinator.calls import Call, caller
from coordinator.errors import CoordinatorError, CoordinatorTimeout
from coordinator.group import EVERYBODY, Group, parts, scattered
from coordinator.keys import Keys
from coordinator.peers import Peer, nodes
from coordinator.session import Session
from coordinator.turns import Turns
from coordinator.wire import pack, unpack

if TYPE_CHECKING:
    from torch.distributed import Store

DEFAULT_TIMEOUT_S = 300.0
CLOCK_READINGS = 9
TRACED = ("broadcast", "allgather", "gather", "scatter", "barrier", "agree", "vote")
LINGER_S = 2.0  # of rank 0 in a broken group, for the others to hear why it broke


class Coordinator:
    """The ranks of a launch, or some of them, as a group that can agree. Collective to make.

    info: who this process is; launcher.current() if not given.
    timeout_s: the deadline of every call that is not given one of its own.

    Raises CoordinatorTimeout if not every rank comes in time, CoordinatorError if the ranks do not
    belong together. One thread at a time uses a Coordinator; several Coordinators are independent.
    Every collective call returns only once all ranks of the group have made it.
    """

    def __init__(
        self, info: launcher.LaunchInfo | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.info = launcher.current() if info is None else info
        self.timeout_s = timeout_s
        self._session: Session | None = None
        number = 0
        if self.info.world_size > 1:
            self._session, number = sessions.enter(self.info, timeout_s)
        self._join(f"c{number}", range(self.info.world_size), None)

    def _join(self, key: str, ranks: Sequence[int], parent: Watch | None) -> None:
        """Become one rank of a group, whose members meet under key."""
        self.ranks = tuple(ranks)  # of the launch, by rank of this group
        self.rank = self.ranks.index(self.info.rank)
        self.world_size = len(self.ranks)
        self._calls = 0
        self._counts: dict[object, int] = {}  # of splits and stores, by what they are called
        self._broken: CoordinatorError | None = None
        self._closed = False
        self._recorder: launcher.Recorder | None = None
        self._node: Coordinator | None = None
        self._leaders: Coordinator | None = None
        self._keys = Keys(key, self._session, self.info.rank)
        self._group: Group | None = None
        me = Peer.me(self.info, self.address if self._session is not None else "")
        self.peers: tuple[Peer, ...] = (me,)
        if self.world_size > 1:
            self.peers = self._meet(key, me, parent)
        self.nodes = [[self.ranks.index(rank) for rank in node] for node in nodes(self.peers)]
        self.node_index = next(i for i, node in enumerate(self.nodes) if self.rank in node)
        self._mine = self.nodes[self.node_index]
        self.local_rank = self._mine.index(self.rank)
        self.local_world_size = len(self._mine)
        stacks.listen()
        self._recorder = launcher.recorder(self.info)
        if self._recorder is not None:
            self._recorder.align(self._behind_master_ns())
            self._recorder.follow(self, TRACED, "wait")

    def _behind_master_ns(self) -> int:
        """What to add to this host's clock to have rank 0's: both read as a barrier ends, often."""
        if len(self.nodes) == 1:
            return 0
        behind = []
        for _ in range(CLOCK_READINGS):
            self.barrier()
            mine = time.monotonic_ns()
            clocks = self.allgather(mine.to_bytes(8, "little"))
            behind.append(int.from_bytes(clocks[0], "little") - mine)
        return sorted(behind)[CLOCK_READINGS // 2]

    def _meet(self, key: str, me: Peer, parent: Watch | None) -> tuple[Peer, ...]:
        assert self._session is not None
        self._group = Group(key, self._session, self.rank, self.world_size)
        try:
            self._group.join(me, self.ranks, self.timeout_s, parent)
        except BaseException as error:
            self._broken = CoordinatorError(f"rank {self.rank} could not join: {error}")
            self.close()
            raise
        self._session.look_after(self._group.neighbour())
        return self._group.peers

    @property
    def address(self) -> str:
        """The address of this host by which it reaches the master, and so the others reach it."""
        if self._session is not None:
            return self._session.client.local_address
        family, address = candidates(self.info)[0]
        return source_towards(family, (address[0], self.info.master_port or 9))

    def is_master(self) -> bool:
        """Is this rank 0 of the group?"""
        return self.rank == 0

    def is_local_master(self) -> bool:
        """Is this the first of the group's ranks on its node?"""
        return self.local_rank == 0

    # ---- bytes ----

    def broadcast(
        self, data: bytes | None = None, src: int = 0, *, timeout_s: float | None = None
    ) -> bytes:
        """The data of rank src, on every rank. Collective; only src needs to give data.

        Raises ValueError if src is no rank of the group or gives no bytes.
        """
        self._check_rank(src, "src")
        mine = self._bytes(data, "broadcasts") if self.rank == src else b""
        return self._exchange("broadcast", mine, timeout_s, root=src)[src]

    def allgather(self, data: bytes, *, timeout_s: float | None = None) -> list[bytes]:
        """The data of every rank, in order of rank, on every rank. Collective; sizes may differ."""
        return self._exchange("allgather", self._bytes(data, "gathers"), timeout_s)

    def gather(
        self, data: bytes, dst: int = 0, *, timeout_s: float | None = None
    ) -> list[bytes] | None:
        """The data of every rank, in order of rank, on rank dst; None elsewhere. Collective."""
        self._check_rank(dst, "dst")
        mine = self._bytes(data, "gathers")
        found = self._exchange("gather", mine, timeout_s, root=dst, reader=dst)
        return found if self.rank == dst else None

    def scatter(
        self, data: Sequence[bytes] | None = None, src: int = 0, *, timeout_s: float | None = None
    ) -> bytes:
        """data[rank] of rank src. Collective; only src needs to give data, for each rank one."""
        self._check_rank(src, "src")
        mine = b""
        if self.rank == src:
            given = [self._bytes(part, "scatters") for part in data or ()]
            if len(given) != self.world_size:
                raise ValueError(
                    f"rank {src} scatters {len(given)} parts among {self.world_size} ranks"
                )
            mine = scattered(given)
        found = self._exchange("scatter", mine, timeout_s, root=src, is_scattered=True)
        return found[src]

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return once every rank of the group has called. Collective."""
        self._exchange("barrier", b"", timeout_s)

    def local_barrier(self, *, timeout_s: float | None = None) -> None:
        """Return once every rank of this node has called. Collective over the node."""
        if self.local_world_size == self.world_size:
            return self.barrier(timeout_s=timeout_s)
        self.node.barrier(timeout_s=timeout_s)

    # ---- agreement ----

    def agree(self, value: Any, *, timeout_s: float | None = None) -> Any:
        """value, if every rank gave the same. Collective. Values are those of broadcast_object.

        Raises CoordinatorError on every rank, listing who gave what, if not.
        """
        mine = pack(value)
        found = self._exchange("agree", mine, timeout_s)
        if any(data != mine for data in found):
            given: dict[bytes, list[int]] = {}
            for rank, data in enumerate(found):
                given.setdefault(data, []).append(rank)
            said = "; ".join(f"{unpack(data)!r:.200} by ranks {who}" for data, who in given.items())
            raise CoordinatorError(
                f"rank {self.rank}: the ranks do not agree ({caller()}). Given were {said}. "
                "Start all ranks with the same arguments and the same files."
            )
        return value

    def vote(self, ok: bool, *, timeout_s: float | None = None) -> bool:
        """Whether every rank said yes: the same answer on every rank. Collective."""
        found = self._exchange("vote", b"y" if ok else b"n", timeout_s)
        return all(data == b"y" for data in found)

    # ---- values: None, bool, int, float, str, bytes, lists and dicts of them ----

    def broadcast_object(
        self, value: Any = None, src: int = 0, *, timeout_s: float | None = None
    ) -> Any:
        """The value of rank src, on every rank; as broadcast. A tuple arrives as a list."""
        data = pack(value) if self.rank == src else None
        return unpack(self.broadcast(data, src, timeout_s=timeout_s))

    def allgather_object(self, value: Any, *, timeout_s: float | None = None) -> list[Any]:
        """The value of every rank, in order of rank; as allgather."""
        return [unpack(data) for data in self.allgather(pack(value), timeout_s=timeout_s)]

    def gather_object(
        self, value: Any, dst: int = 0, *, timeout_s: float | None = None
    ) -> list[Any] | None:
        """The value of every rank, in order of rank, on rank dst; as gather."""
        found = self.gather(pack(value), dst, timeout_s=timeout_s)
        return None if found is None else [unpack(data) for data in found]

    def scatter_object(
        self, values: Sequence[Any] | None = None, src: int = 0, *, timeout_s: float | None = None
    ) -> Any:
        """values[rank] of rank src; as scatter."""
        data = [pack(value) for value in values or ()] if self.rank == src else None
        return unpack(self.scatter(data, src, timeout_s=timeout_s))

    # ---- turns ----

    @contextmanager
    def local_master_first(self, *, timeout_s: float | None = None) -> Iterator[None]:
        """Run the body on the node's first rank, and then on its others. Collective over the node.

        If the body raises on the first rank, the others raise CoordinatorError without running it.
        """
        with self._first("local_master_first", self._mine, timeout_s):
            yield

    @contextmanager
    def master_first(self, *, timeout_s: float | None = None) -> Iterator[None]:
        """Run the body on rank 0, and then on the others. Collective; as local_master_first."""
        with self._first("master_first", range(self.world_size), timeout_s):
            yield

    def _first(
        self, name: str, ranks: Sequence[int], timeout_s: float | None
    ) -> AbstractContextManager[None]:
        """Counted apart from calls: other nodes need not take part."""
        self._check_open(name)
        number = self._count((name, *ranks))
        key = f"{name}/{ranks[0]}/{number}"
        return self._turns().first(key, ranks[0], self._limit(timeout_s))

    def once(
        self, name: str, work: Callable[[], bytes], *, timeout_s: float | None = None
    ) -> bytes:
        """What work returned on the one rank of this node that ran it. Not collective.

        The first rank to come runs it; the others, now or later, get its bytes, or CoordinatorError
        with its traceback if it raised. A name stands for one run in the life of the Coordinator.
        """
        self._check_open("once")
        return self._turns().once(f"once/{self._mine[0]}/{name}", work, self._limit(timeout_s))

    def _turns(self) -> Turns:
        watch = self._group.watch if self._group is not None else None
        return Turns(self._keys.below("turns"), self.rank, watch)

    def lock(self, name: str, *, timeout_s: float | None = None) -> AbstractContextManager[None]:
        """Hold a lock that one rank of this node holds at a time. Not collective.

        Raises CoordinatorTimeout naming the holder and since when. The lock belongs to the launch:
        another launch with a lock of the same name is not kept waiting.
        """
        path = locks.lock_path(self.info.launch_id, name)
        return locks.hold(path, name, str(self.peers[self.rank]), self._limit(timeout_s))

    # ---- keys ----

    def put(self, key: str, value: bytes) -> None:
        """Keep value at rank 0 of the launch, for the ranks of this group. Not collective."""
        self._check_open("put")
        self._keys.below("user").put(key, self._bytes(value, "puts"))

    def get(self, key: str) -> bytes | None:
        """What a rank of this group has put; None if none has."""
        self._check_open("get")
        return self._keys.below("user").get(key)

    def wait(self, key: str, *, timeout_s: float | None = None) -> bytes:
        """What a rank of this group puts, once it has. Raises CoordinatorTimeout."""
        self._check_open("wait")
        return self._keys.below("user").wait([key], self._limit(timeout_s))[0]

    def store(self, name: str) -> Store:
        """A torch Store that the ranks of the group share, for libraries that meet in one.

        Collective in this: the n-th call with a name gives every rank the same store, empty before.
        """
        from coordinator.torch_store import TorchStore

        self._check_open("store")
        keys = self._keys.below(f"lent/{name}/{self._count(('store', name))}")
        return TorchStore(keys, self.timeout_s)

    # ---- groups ----

    @property
    def node(self) -> Coordinator:
        """The group's ranks on this node. Collective over them when first used."""
        self._check_open("node")
        if self._node is None:
            self._node = self.split(self._mine)
        assert self._node is not None
        return self._node

    @property
    def leaders(self) -> Coordinator | None:
        """The first rank of each node; None elsewhere. Collective over them when first used."""
        self._check_open("leaders")
        if self._leaders is None:
            self._leaders = self.split([node[0] for node in self.nodes])
        return self._leaders

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
        return self._subgroup(members, self._count(("split", members)))

    def _subgroup(self, members: tuple[int, ...], number: int) -> Coordinator:
        group = Coordinator.__new__(Coordinator)
        group.info, group.timeout_s, group._session = self.info, self.timeout_s, self._session
        if self._session is not None:
            sessions.stay(self.info)
        key = f"{self._keys.prefix}/{'-'.join(map(str, members))}:{number}"
        watch = self._group.watch if self._group is not None else None
        group._join(key, [self.ranks[member] for member in members], watch)
        return group

    # ---- leaving ----

    def close(self, *, timeout_s: float | None = None) -> None:
        """Leave. Collective: rank 0 of the launch serves the others, so it waits for them to leave.

        Calling it twice is harmless. Raises CoordinatorTimeout if a rank does not leave in time.
        """
        if self._closed:
            return
        for group in (self._node, self._leaders):
            if group is not None:
                group._broken = group._broken or self._broken
                group.close(timeout_s=timeout_s)
        self._closed = True
        if self._recorder is not None:
            self._recorder.close()
        limit = self._limit(timeout_s) if self._broken is None else LINGER_S
        late = self._release(CLOSED, limit)
        if late and self._broken is None:
            known = {peer.rank: str(peer) for peer in self.peers}
            names = ", ".join(known.get(rank, f"rank {rank}") for rank in late)
            raise CoordinatorTimeout(
                f"rank 0 waited {limit:g} s in close() for {names}. Every rank must close its "
                "Coordinators, or end."
            )

    def _release(self, status: int, limit: float | None) -> list[int]:
        if self._group is not None:
            self._group.set_status(status)
            self._group.close()
        if self._session is None:
            return []
        self._session = None
        return sessions.leave(self.info, limit)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not _is_orderly(error):
            self._abandon(error)
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            self._closed = True
            self._release(FORGOTTEN, None)

    def _abandon(self, error: BaseException) -> None:
        """Leave because of error: the others hear why, and nobody is waited for."""
        if self._group is not None and self._broken is None and not self._closed:
            self._group.watch.abandon("".join(traceback.format_exception(error)), caller())
        self._broken = self._broken or CoordinatorError(f"left because of {error!r}")

    # ---- looking ----

    def diagnose(self) -> str:
        """Where every rank is, a line each; the other ranks of this node also show their stacks.

        Not collective. The stacks go to each rank's standard error, as on SIGUSR1 to any of them.
        """
        self._check_open("diagnose")
        if self._group is None:
            return f"rank {self.rank} (host {socket.gethostname()}, alone)"
        me = self.peers[self.rank]
        stacks.ask(peer for peer in self.peers if peer.pid != me.pid)
        return self._group.watch.table()

    # ---- within ----

    def _exchange(
        self,
        name: str,
        data: bytes,
        timeout_s: float | None,
        root: int = EVERYBODY,
        reader: int = EVERYBODY,
        is_scattered: bool = False,
    ) -> list[bytes]:
        """One collective call; what breaks it breaks the group."""
        self._check_open(name)
        if self._group is None:
            return parts(data, 1) if is_scattered else [data]
        self._calls += 1
        call = Call(name, self._calls, caller())
        try:
            return self._group.exchange(
                call, data, self._limit(timeout_s), root, reader, is_scattered
            )
        except CoordinatorError as error:
            self._broken = error
            raise
        except BaseException as error:
            self._abandon(error)
            raise

    def _limit(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else timeout_s

    def _count(self, what: object) -> int:
        """How often this was asked before: the same on every rank that keeps in step."""
        number = self._counts.get(what, 0)
        self._counts[what] = number + 1
        return number

    def _bytes(self, data: object, verb: str) -> bytes:
        if isinstance(data, bytes):
            return data
        if isinstance(data, bytearray | memoryview):
            return bytes(data)
        raise ValueError(f"rank {self.rank} {verb} {type(data).__name__}, not bytes")

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


def _is_orderly(error: BaseException) -> bool:
    """A script that ends itself with success leaves as any other does."""
    return isinstance(error, SystemExit) and error.code in (None, 0)
