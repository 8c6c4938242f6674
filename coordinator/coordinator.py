"""Agreement of the ranks of a launch: small bytes, on the CPU, always with a deadline.

with Coordinator() as coor:
    config = coor.broadcast(b"lr=0.1" if coor.is_master() else None)
"""

from __future__ import annotations

import ctypes
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import launcher
from coordinator.addresses import candidates
from coordinator.call_site import PendingCall, begin_call, caller, traceback_of
from coordinator.collectives import Collectives
from coordinator.control.session import Session, this_process
from coordinator.errors import (
    CoordinatorError,
    CoordinatorTimeout,
    FailureReason,
    PeerLost,
    RankFailure,
)
from coordinator.failure import live_view, stack_dump
from coordinator.failure.detector import FailureDetector
from coordinator.failure.hosts_view import HostsView
from coordinator.failure.peer_monitor import CLOSED, FORGOTTEN
from coordinator.failure.subscription import Subscription, always
from coordinator.peers import Peer, group_by_node
from coordinator.store import lock as locks
from coordinator.store import survivors
from coordinator.store.prefix_store import PrefixStore
from coordinator.store.sequencer import Sequencer
from coordinator.timings import DEFAULT, CoordinatorTimings
from coordinator.transport.connections import PeerConnector
from coordinator.transport.group import NOTHING, Exchange, Group, unpack_parts
from coordinator.transport.joining import join_group
from launcher import noop

if TYPE_CHECKING:
    from torch.distributed import Store

    from coordinator.control.server import ControlServer

CLOCK_READINGS = 9
TRACED = (
    *(
        "broadcast",
        "allgather",
        "gather",
        "scatter",
        "barrier",
        "local_barrier",
        "agree",
        "all_true",
    ),
    *("once", "split", "put", "get", "wait"),
)


class Coordinator(Collectives):
    """The ranks of a launch, or some of them, as a group that can agree. Collective to make.

    info: who this process is; launcher.current() if not given.
    timeout_s: the deadline of every call that is not given one of its own.
    timings: how soon failures are noticed; those of a rank's first Coordinator count.
    transport: "gloo" for collective calls over a gloo group; else shared memory within a node, and
        connections between nodes. The same on every rank.
    encrypt: encrypt all that leaves a process by a connection, as `drumline run --encrypt` lets all
        Coordinators do. The same on every rank.

    Raises CoordinatorTimeout if not every rank comes in time, CoordinatorError if the ranks do not
    belong together. One thread at a time makes collective calls; several Coordinators are
    independent. A process forked from a rank is not a rank: it closes what it inherited, and makes
    its own. Every collective call returns only once all ranks of the group have made it.
    """

    def __init__(
        self,
        info: launcher.LaunchInfo | None = None,
        *,
        timeout_s: float = 300.0,
        timings: CoordinatorTimings = DEFAULT,
        transport: str | None = None,
        encrypt: bool = False,
    ) -> None:
        self.info = launcher.current() if info is None else info
        self._begin(timeout_s, timings, transport or "", encrypt or self.info.encrypts)
        stack_dump.listen()  # before the first wait, for the ranks that never come
        live_view.listen(self.info)
        number = self._join_session()
        if self._session is not None:
            self._session.heartbeat.view = HostsView(self.info, self._session.ask).after_beat
        call = begin_call("Coordinator", number + 1, timeout_s)
        self._join(f"c{number}/", range(self.info.world_size), None, call)

    @classmethod
    def over(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        *,
        ranks: Sequence[int] = (),
        timeout_s: float = 300.0,
        timings: CoordinatorTimings = DEFAULT,
    ) -> Coordinator:
        """The Coordinator of ranks that share a torch Store, and no launch of ours. Collective.

        rank, world_size: this process among them. ranks: their numbers elsewhere, which errors
            show, if not from 0 on. The store is used only while they meet. They encrypt as the
            launch does that started them.

        close() waits for nobody here: what the first rank serves, it serves until the others have
        left. Raises ValueError if rank is not one of them, and as Coordinator().
        """
        from coordinator.store import store_meeting

        numbers = tuple(ranks) or tuple(range(world_size))
        if not 0 <= rank < world_size or len(set(numbers)) != world_size:
            raise ValueError(
                f"Coordinator.over(store, rank={rank}, world_size={world_size}, ranks={ranks}): "
                "pass the place of this process among the ranks, and how many there are."
            )
        group = cls.__new__(cls)
        group.info = store_meeting.alone(numbers[rank])
        limit_s = group._checked(timeout_s)
        if len(numbers) > 1:
            group.info, location = store_meeting.meet(store, rank, numbers, limit_s, timings)
            this_process.locate(group.info, location)
        group._begin(timeout_s, timings, "", group.info.encrypts)
        group._is_over_store = True
        stack_dump.listen()
        group._join_session(len(numbers))
        group._join("c0/", numbers, None, begin_call("Coordinator.over", 1, limit_s))
        return group

    def _begin(
        self, timeout_s: float, timings: CoordinatorTimings, transport: str, encrypts: bool
    ) -> None:
        """Set what is known before the other ranks are."""
        self.timeout_s = self._checked(timeout_s)
        self._session: Session | None = None
        self.patience_s = launcher.patience_s()
        self._timings = timings.with_patience(self.patience_s)
        self._transport, self.encrypts = transport, encrypts
        self._is_over_store = False
        self._ancestors: tuple[weakref.WeakSet[Coordinator], ...] = ()  # their _subgroups
        if self._transport not in ("", "gloo"):
            raise ValueError(
                f"rank {self.info.rank}: there is no transport {transport!r}. Give 'gloo', or None "
                "for shared memory and connections."
            )

    def _join_session(self, world_size: int | None = None) -> int:
        """Join this rank's session in its launch; how many Coordinators the rank has made before.

        world_size: of the group, if that is not all of the launch. A rank alone needs no session.
        """
        if (world_size or self.info.world_size) == 1:
            return 0
        self._session, number = this_process.of(self.info).join(
            self.info, self.timeout_s, self._timings, self.encrypts
        )
        return number

    def _join(
        self,
        key: str,
        ranks: Sequence[int],
        parent: FailureDetector | None,
        call: PendingCall,
        check: Callable[[], None] = noop,
    ) -> None:
        """Become one rank of a group, whose members meet under key. check: as in split."""
        self._pid = os.getpid()
        self.ranks = tuple(ranks)  # of the launch, by rank of this group
        self.rank = self.ranks.index(self.info.rank)
        self.world_size = len(self.ranks)
        self._num_calls = 0
        self._call: PendingCall | None = None  # the collective call that a thread is in
        self._busy = threading.Lock()
        self._locks = locks.Locks(self.info.launch_id)
        self._once_locks: dict[str, threading.Lock] = {}
        self._counts: dict[object, int] = {}  # of splits and stores, by name
        self._stores: list[Store] = []  # torch keeps only the C++ half of a Store alive
        self._broken: CoordinatorError | None = None
        self._closed = False
        self._recorder: launcher.Recorder | None = None
        self._subgroups: weakref.WeakSet[Coordinator] = weakref.WeakSet()  # and their subgroups
        self._node: Coordinator | None = None
        self._leaders: Coordinator | None = None
        self._store = PrefixStore(key, self._session, self.info.rank)
        self._user_store = self._store.child("user")
        self._group: Group | None = None
        stack_fd, self._note = stack_dump.stack_memory(os.getpid())
        self.live_calls = live_view.live_calls(os.getpid())
        me = Peer.me(
            self.info,
            self.address if self._session is not None else "",
            stack_fd,
            self._transport,
        )
        self.peers: tuple[Peer, ...] = (me,)
        if self.world_size > 1:
            self.peers = self._join_ranks(key, me, parent, call, check)
        places = {rank: place for place, rank in enumerate(self.ranks)}
        self.nodes = [[places[rank] for rank in node] for node in group_by_node(self.peers)]
        self.node_index = next(i for i, node in enumerate(self.nodes) if self.rank in node)
        self._node_ranks = self.nodes[self.node_index]
        self.local_rank = self._node_ranks.index(self.rank)
        self.local_world_size = len(self._node_ranks)
        self._recorder = launcher.recorder(self.info)
        if parent is None and any(peer.is_traced for peer in self.peers):
            # Of a part of the ranks, the first need not be rank 0 of the launch. All take part, for
            # some may have no folder to record in.
            offset_ns = self._offset_to_master_ns()
            if self._recorder is not None:
                self._recorder.align(offset_ns)
        if self._recorder is not None:
            self._recorder.follow(self, TRACED, "wait", group=key)
        self.live_calls.follow(self, TRACED, "wait", group=key)

    def _offset_to_master_ns(self) -> int:
        """The nanoseconds by which this host's clock is behind rank 0's: the median of several
        readings, each at the end of a barrier."""
        if len(self.nodes) == 1:
            return 0
        offsets = []
        for _ in range(CLOCK_READINGS):
            self.barrier()
            now_ns = time.monotonic_ns()
            clocks = self.allgather(now_ns.to_bytes(8, "little"))
            offsets.append(int.from_bytes(clocks[0], "little") - now_ns)
        return sorted(offsets)[CLOCK_READINGS // 2]

    def _join_ranks(
        self,
        key: str,
        me: Peer,
        parent: FailureDetector | None,
        call: PendingCall,
        check: Callable[[], None],
    ) -> tuple[Peer, ...]:
        assert self._session is not None
        try:
            self._group = join_group(key, self._session, me, self.ranks, parent, call, check)
        except BaseException as error:
            self._broken = CoordinatorError(f"{self._me} could not join: {error}")
            self.close()
            raise
        return self._group.peers

    @property
    def address(self) -> str:
        """The address of this host by which it reaches the master, and so the others reach it."""
        if self._session is not None:
            return self._session.client.local_address
        family, address = candidates(self.info)[0]
        return launcher.host_addresses.local_address_for(
            family, (address[0], self.info.master_port or 9)
        )

    def is_master(self) -> bool:
        """True on rank 0 of the group."""
        return self.rank == 0

    def is_local_master(self) -> bool:
        """True on the first of the group's ranks on each node."""
        return self.local_rank == 0

    def local_barrier(self, *, timeout_s: float | None = None) -> None:
        """Return once every rank of this node has called. Collective over the node."""
        self._check_open("local_barrier")
        if self.local_world_size == self.world_size:
            self._exchange("local_barrier", NOTHING, timeout_s)
            return
        call = self._begin_call("local_barrier", timeout_s)
        if self._node is None:
            self._node = self._subgroup(tuple(self._node_ranks), call)
        self._node._exchange("local_barrier", NOTHING, call.left_s)

    # ---- sequencing ----

    @contextmanager
    def local_master_first(self, *, timeout_s: float | None = None) -> Iterator[None]:
        """Run the body on the node's first rank, and then on its others. Collective over the node.

        If the body raises on the first rank, the others raise CoordinatorError without running it.
        """
        with self._first("local_master_first", self._node_ranks, timeout_s):
            yield

    @contextmanager
    def master_first(self, *, timeout_s: float | None = None) -> Iterator[None]:
        """Run the body on rank 0, and then on the others. Collective; as local_master_first."""
        with self._first("master_first", range(self.world_size), timeout_s):
            yield

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
        detector = self._group.detector if self._group is not None else None
        return Sequencer(self._store.child("sequences", *names), self.info.rank, detector)

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
        detector = self._group.detector if self._group is not None else None
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

    def connections(self, *, timeout_s: float | None = None) -> dict[int, socket.socket]:
        """A connection to every other rank of the group, by rank. Collective.

        Both ends have proved that they belong to the launch. The sockets do not block, and are the
        caller's to close. Raises CoordinatorError on every rank if two ranks cannot connect.
        """
        self._check_open("connections")
        if self._session is None or self.world_size == 1:
            return {}
        call = self._begin_call("connections", timeout_s)
        name = f"{self._store.prefix}{call.number}"
        address, credentials = self._session.client.local_address, self._session.credentials
        return PeerConnector(
            address, credentials, self.rank, self.peers, name, self._session.heartbeat.lost
        ).connect(
            lambda data: self._exchange("connections", Exchange(data), call.left_s), call.left_s
        )

    # ---- groups ----

    @property
    def node(self) -> Coordinator:
        """The group's ranks on this node. Collective over them when first used."""
        self._check_open("node")
        if self._node is None:
            self._node = self._subgroup(tuple(self._node_ranks), self._begin_call("node", None))
        return self._node

    @property
    def leaders(self) -> Coordinator | None:
        """The first rank of each node; None elsewhere. Collective over them when first used."""
        self._check_open("leaders")
        firsts = tuple(node[0] for node in self.nodes)
        if self._leaders is None and self.rank in firsts:
            self._leaders = self._subgroup(firsts, self._begin_call("leaders", None))
        return self._leaders

    def split(
        self,
        ranks: Sequence[int],
        *,
        timeout_s: float | None = None,
        name: str = "",
        check: Callable[[], None] = noop,
    ) -> Coordinator | None:
        """A Coordinator over some ranks of this one, in the order given. Collective over them.

        Another rank may call too and gets None at once. The new rank i is ranks[i].
        name: tells apart groups of the same ranks that these may make in different orders.
        check: called again and again while this rank waits for others; what it raises ends that.
        Raises ValueError if ranks is empty, names one twice or names one that is not there.
        """
        self._check_open("split")
        members = tuple(ranks)
        if not members or len(set(members)) != len(members):
            raise ValueError(f"{self._me}: split needs distinct ranks, not {members}")
        for member in members:
            self._check_rank(member, "ranks")
        if self.rank not in members:
            return None
        return self._subgroup(members, self._begin_call("split", timeout_s), name, check)

    def _subgroup(
        self,
        members: tuple[int, ...],
        call: PendingCall,
        name: str = "",
        check: Callable[[], None] = noop,
    ) -> Coordinator:
        number = self._count(("split", members, name))
        group = Coordinator.__new__(Coordinator)
        group.info = self.info
        group._begin(self.timeout_s, self._timings, self._transport, self.encrypts)
        group._session, group._is_over_store = self._session, self._is_over_store
        group._ancestors = (*self._ancestors, self._subgroups)
        if self._session is not None:
            this_process.of(self.info).retain()
        key = f"{self._store.prefix}{'-'.join(map(str, members))}:{name}{number}/"
        detector = self._group.detector if self._group is not None else None
        group._join(key, [self.ranks[member] for member in members], detector, call, check)
        for groups in group._ancestors:
            groups.add(group)
        return group

    # ---- leaving ----

    def close(self, *, timeout_s: float | None = None) -> None:
        """Leave. Collective: rank 0 of the launch serves the others, so it waits for them to leave.

        If the group has failed, its subgroups are closed with it. A call that another thread is in
        raises, here and on the other ranks. Ranks that were reported as failed are waited for
        until they can have heard of it; after a report, those whose host does not answer are not.
        Calling it twice, or in a forked process, does nothing. Raises CoordinatorTimeout if a rank
        does not leave in time.
        """
        limit = self._limit(timeout_s)
        if self._closed or self._pid != os.getpid():
            return
        self._interrupt(min(limit, self._timings.linger_s))
        groups = (self._node, self._leaders) if self._broken is None else tuple(self._subgroups)
        for group in groups:
            if group is not None:
                group._broken = group._broken or self._broken
                group.close(timeout_s=timeout_s)
        self._closed = True
        if self._recorder is not None:
            self._recorder.close()
        limit = limit if self._broken is None else min(limit, self._timings.linger_s)
        own = self._group
        late = self._release(CLOSED, limit)
        if late and self._broken is None:
            assert own is not None
            names = " and ".join(map(own.detector.monitor.describe_local, late))
            raise CoordinatorTimeout(
                f"rank 0 waited {limit:g} s in close ({caller()}) for {names}. Every rank must "
                "close its Coordinators, or end."
            )

    def _interrupt(self, limit: float) -> None:
        """Break the call that another thread is in, and see it end."""
        if self._busy.acquire(blocking=False):
            self._busy.release()
            return
        if self._group is not None and self._broken is None:
            self._group.detector.abandon(f"close ({caller()}) in the middle of the call", caller())
        if self._busy.acquire(timeout=limit):
            self._busy.release()

    def _release(self, status: int, limit: float | None) -> list[int]:
        self._locks.close()
        stuck: dict[int, float] = {}
        if self._group is not None:
            server = self._server
            if server is not None and (reported := self._group.detector.reported()):
                stuck |= dict.fromkeys(reported, self._timings.reason_s)  # who lives hears it
                stuck |= dict.fromkeys(server.unreachable(), 0.0)
            if self._broken is not None:  # else they are waited for, as by every other call
                stuck |= dict.fromkeys(self._group.detector.monitor.suspended(), 0.0)
            self._group.set_status(status)
            self._group.close()
        if self._session is None:
            return []
        self._session = None
        late = this_process.of(self.info).leave(None if self._is_over_store else limit, stuck)
        return [rank for rank in late if rank not in stuck]

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not _is_orderly(error):
            self._abandon(error)
        self.close()

    def __del__(self) -> None:
        is_open = not getattr(self, "_closed", True) and self._pid == os.getpid()
        if is_open and not sys.is_finalizing():
            self._closed = True
            self._release(FORGOTTEN, None)

    def _abandon(self, error: BaseException) -> None:
        """Leave because of error: notify the others of it, and wait for nobody."""
        for group in (self, *self._subgroups):
            group._abandon_alone(error)

    def _abandon_alone(self, error: BaseException) -> None:
        if self._group is not None and self._broken is None and not self._closed:
            causes = [failure for failure in self._causes(error) if failure.rank != self.rank]
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            self._group.detector.abandon(why, caller(), causes, traceback_of(error))
        self._broken = self._broken or CoordinatorError(f"left because of {error!r}")

    def _causes(self, error: BaseException | None) -> Sequence[RankFailure]:
        """The failed ranks of the group that the error, or the one before it, names."""
        while error is not None:
            failures = error.failures if isinstance(error, PeerLost) else ()
            causes = [failure for failure in failures if failure.peer in self.peers]
            if causes:
                return [replace(failure, rank=self.peers.index(failure.peer)) for failure in causes]
            error = error.__cause__ or error.__context__
        return ()

    # ---- failures ----

    def on_failure(
        self,
        callback: Callable[[RankFailure], None],
        *,
        is_waiting: Callable[[], bool] = always,
        unreachable_s: float = 0.0,
    ) -> Subscription:
        """Have callback(failure) called once for every rank of the group that fails from now on,
        or has failed already. Not collective; nobody needs to be in a call.

        A failure is the end of a process, close() on that rank, report_failure() on any rank, a
        suspended process (SIGSTOP) and a host that does not answer; see FailureReason. Ranks that
        fail together are reported in the order in which they failed, so the first is the cause.
        The callback runs on a thread of the Coordinator, which lives as long as there are
        subscribers; it may close the subscription or the Coordinator. is_waiting: a rank that is
        suspended or unreachable, and may recover, is reported only while this is true.
        unreachable_s: a rank that does not answer is reported only after so many seconds.

        with coor.on_failure(lambda failure: comm.abort()):
            ...
        """
        self._check_open("on_failure", may_be_broken=True)
        if self._group is None:
            return Subscription(callback, is_waiting, unreachable_s, lambda subscription: None)
        return self._group.detector.subscribe(callback, is_waiting, unreachable_s)

    def failures(self, *, wait_s: float = 0.0) -> tuple[RankFailure, ...]:
        """The ranks of the group that have failed, the first to fail first. Not collective.

        wait_s: how long to wait for there to be one, since connections of a process that ends are
        closed before its end can be seen.
        """
        self._check_open("failures", may_be_broken=True)
        return () if self._group is None else self._group.detector.failures(wait_s)

    def report_failure(self, rank: int, how: str) -> None:
        """Fail the group, from any thread: this rank of it will not come, for it is `how`.

        Not collective. The calls of all ranks raise PeerLost, those that wait already and all later
        ones. For callers that know before the deadline, for example that a rank is suspended.
        """
        if self._group is not None and self._broken is None and not self._closed:
            self._group.detector.report_failure(self.peers[rank], how, caller())

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
            address = self.info.master_addr if self._server is None else self._server.address[0]
            launch = survivors.lead(self.info, store, address, self._ended_ranks, release, call)
        else:
            launch = survivors.follow(self.info, store, call)
        if self.info.rank not in launch["ranks"]:
            return None
        return survivors.launch_info(self.info, launch, self._node_ranks)

    @property
    def _server(self) -> ControlServer | None:
        """The control server, if this rank has it."""
        return self._session.server if self._session is not None else None

    def _ended_ranks(self) -> set[int]:
        """The failed ranks but for those that may only have noticed the failure of another."""
        hearsay = (FailureReason.LEFT, FailureReason.REPORTED)
        ended = {failure.rank for failure in self.failures() if failure.reason not in hearsay}
        if self._group is not None:  # what was reported of these says no more than that
            ended |= self._group.detector.monitor.suspended()
        return ended | (self._server.unreachable() if self._server is not None else set())

    # ---- looking ----

    def check(self) -> None:
        """Raise what broke the group, if something did. Not collective, from any thread."""
        if self._broken is not None:
            raise self._broken
        if self._group is not None and not self._closed:
            self._group.detector.check_group(self._begin_call("check", None))

    def diagnose(self, *, stacks_too: bool = True) -> str:
        """A line for every rank with its call and state; the others of this node dump their stacks.

        Not collective. The stacks go to each rank's standard error, as on SIGUSR1 to any of them.
        stacks_too: without them it is what goes into an error, in 16 lines.
        """
        self._check_open("diagnose")
        if self._group is None:
            return f"{self._me} (host {socket.gethostname()}, alone)"
        if not stacks_too:
            return self._group.detector.monitor.short_table()
        me = self.peers[self.rank]
        stack_dump.ask(peer for peer in self.peers if peer.pid != me.pid)
        return self._group.detector.monitor.table()

    def describe_late(self) -> str:
        """The ranks that keep this one waiting, or the deadlock it is in. Not collective.

        Of other nodes those that are not well; "" if nothing can be said. For errors of the layers
        above.
        """
        if self._group is None or self._closed:
            return ""
        detector, note = self._group.detector, stack_dump.CallNote(*self._note[:2])
        describe = detector.monitor.describe_local
        unwell = [f"{rank}." for rank in detector.monitor.unwell_remote()]
        late = detector.stacks.describe_late(note, describe, self._timings.stack_s)
        return "\n".join(filter(None, [*unwell, late]))

    def describe_failure(self) -> str:
        """Another rank's reason why this group failed; "" without one. Not collective."""
        if self._group is None or self._closed:
            return ""
        return self._group.detector.describe_failure()

    def note_peer(self, rank: int) -> None:
        """Note, for such descriptions, to which rank of the group this one sends or listens.

        What is not a rank is not noted: the call itself refuses it.
        """
        if rank in range(self.world_size):
            self._note[0] = self.ranks[rank]

    @property
    def allreduce_note(self) -> int:
        """The address of an int64 that is to be 1 while this process is in a library's allreduce.

        For such descriptions, too; valid as long as the process.
        """
        return ctypes.addressof(ctypes.c_int64.from_buffer(self._note, 8))

    def pending_call(self) -> PendingCall | None:
        """The collective call that a thread of this rank is in; for those who look at it."""
        return self._call if self._busy.locked() else None

    # ---- within ----

    def _exchange(self, name: str, exchange: Exchange, timeout_s: float | None) -> list[bytes]:
        """One collective call; what breaks it breaks the group."""
        self._check_open(name)
        limit_s = self.timeout_s if timeout_s is None else self._checked(timeout_s)
        if not self._busy.acquire(False):
            other = self._call.call if self._call is not None else "a call"
            raise CoordinatorError(
                f"{self._me}: {name} ({caller()}) while another thread is in {other}. "
                "Give each thread a Coordinator of its own, or take turns with a lock."
            )
        try:
            self._num_calls += 1
            call = self._call = begin_call(name, self._num_calls, limit_s)
            if self._group is not None:
                return self._group.exchange(call, exchange)
            return unpack_parts(exchange.data, 1) if exchange.is_scattered else [exchange.data]
        except CoordinatorError as error:
            self._broken = error
            raise
        except BaseException as error:
            self._abandon(error)
            raise
        finally:
            self._busy.release()

    def _begin_call(
        self, name: str, timeout_s: float | None, number: int | None = None
    ) -> PendingCall:
        """A call that begins now; numbered by its name, unless it is a collective one."""
        if number is None:
            number = self._count(("call", name)) + 1
        return begin_call(name, number, self._limit(timeout_s))

    def _limit(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else self._checked(timeout_s)

    def _checked(self, timeout_s: float) -> float:
        if not isinstance(timeout_s, int | float) or not 0 <= timeout_s < math.inf:
            raise ValueError(
                f"rank {self.info.rank}: timeout_s={timeout_s!r} is not a deadline. Give seconds: "
                "a number from 0 on, and not infinity, so that nothing hangs for ever."
            )
        return timeout_s

    def _count(self, key: object) -> int:
        """The number of earlier calls with this key: equal on ranks that make the same calls."""
        number = self._counts.get(key, 0)
        self._counts[key] = number + 1
        return number

    def _check_open(self, name: str, *, may_be_broken: bool = False) -> None:
        """Raise in a forked process, after close(), and once the ranks are desynchronised."""
        if self._pid != this_process.pid:
            raise CoordinatorError(
                f"{self._me}: {name} ({caller()}) in process {os.getpid()}, which was forked from "
                f"the rank, process {self._pid}. Only the rank itself may use this Coordinator: "
                "have it pass on what the child needs."
            )
        if self._closed:
            raise CoordinatorError(
                f"{self._me}: {name} ({caller()}) on a closed Coordinator. Make a new one, or "
                "close it later."
            )
        if self._broken is not None and not may_be_broken:
            raise CoordinatorError(
                f"{self._me}: {name} ({caller()}) cannot run: a failure has desynchronised "
                f"the ranks. Close this Coordinator and start over. It was: {self._broken}"
            ) from self._broken

    def __repr__(self) -> str:
        return f"Coordinator(rank={self.rank}, world_size={self.world_size}, ranks={self.ranks})"


def _is_orderly(error: BaseException) -> bool:
    """A script that ends itself with success leaves as any other does."""
    return isinstance(error, SystemExit) and error.code in (None, 0)
