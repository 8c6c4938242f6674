"""Agreement of the ranks of a launch: small bytes, on the CPU, always with a deadline.

with Coordinator() as coor:
    config = coor.broadcast(b"lr=0.1" if coor.is_master() else None)
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import launcher
from coordinator.addresses import candidates, spans_nodes
from coordinator.call_site import PendingCall, begin_call, caller, traceback_of
from coordinator.collectives import Collectives
from coordinator.control.session import Session, this_process
from coordinator.errors import CoordinatorError, CoordinatorTimeout
from coordinator.failure import live_view, stack_dump
from coordinator.failure.detector import FailureDetector
from coordinator.failure.hosts_view import HostsView
from coordinator.failure.peer_monitor import CLOSED, FORGOTTEN
from coordinator.peers import Peer, group_by_node
from coordinator.store import lock as locks
from coordinator.store.prefix_store import PrefixStore
from coordinator.store.shared_state import SharedState
from coordinator.timings import DEFAULT, CoordinatorTimings
from coordinator.transport.connections import PeerConnector
from coordinator.transport.group import NOTHING, Exchange, Group, unpack_parts
from coordinator.transport.joining import join_group
from coordinator.transport.rendezvous import Rendezvous
from launcher import noop

if TYPE_CHECKING:
    from torch.distributed import Store


TRACED = (
    "broadcast", "allgather", "gather", "scatter", "barrier", "local_barrier", "agree", "all_true",
    "once", "split", "put", "get", "wait",
)  # fmt: skip


class Closable(Protocol):
    def close(self) -> None: ...


User = TypeVar("User", bound=Closable)


class Coordinator(Collectives, SharedState):
    """The ranks of a launch, or some of them, as a group that can agree. Collective to make.

    info: who this process is; launcher.current() if not given.
    timeout_s: the deadline of every call that is not given one of its own.
    timings: how soon failures are noticed; those of a rank's first Coordinator count.
    transport: "gloo" for collective calls over a gloo group; None for shared memory in a node, and
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
        call = begin_call("Coordinator", 1, self.timeout_s)
        number = self._join_session(call)
        if self._session is not None:
            self._session.heartbeat.view = HostsView(self.info, self._session.ask).after_beat
        ranks = range(self.info.world_size)
        self._join(f"c{number}/", ranks, None, call._replace(number=number + 1))

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
        call, forget = begin_call("Coordinator.over", 1, group.checked_timeout(timeout_s)), noop
        if len(numbers) > 1:
            group.info, location, forget = store_meeting.meet(
                store, rank, numbers, call.left_s, timings
            )
            this_process.locate(group.info, location)
        group._begin(timeout_s, timings, "", group.info.encrypts)
        group._is_over_store = True
        stack_dump.listen()
        group._join_session(call, len(numbers))
        group._join("c0/", numbers, None, call)
        forget()
        return group

    def _begin(
        self, timeout_s: float, timings: CoordinatorTimings, transport: str, encrypts: bool
    ) -> None:
        """Set what is known before the other ranks are."""
        self.timeout_s = self.checked_timeout(timeout_s)
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

    def _join_session(self, call: PendingCall, world_size: int | None = None) -> int:
        """Join this rank's session in its launch; how many Coordinators the rank has made before.

        call: that makes the group. world_size: of it, if that is not all of the launch. A rank
        alone needs no session.
        """
        if (world_size or self.info.world_size) == 1:
            return 0
        self._session, number = this_process.of(self.info).join(
            self.info, call.left_s, self._timings, self.encrypts
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
        self._users: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._node: Coordinator | None = None
        self._leaders: Coordinator | None = None
        self._store = PrefixStore(key, self._session, self.info.rank)
        self._user_store = self._store.child("user")
        self._group: Group | None = None
        self._detector: FailureDetector | None = None
        stack_fd, self._note = stack_dump.stack_memory(os.getpid())
        self.live_calls = live_view.live_calls(os.getpid())
        me = Peer.me(
            self.info, self.address if self._session is not None else "", stack_fd, self._transport
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

    def _join_ranks(
        self,
        key: str,
        me: Peer,
        parent: FailureDetector | None,
        call: PendingCall,
        check: Callable[[], None],
    ) -> tuple[Peer, ...]:
        assert self._session is not None
        rendezvous = Rendezvous(key, self._session, self.ranks, parent, call, check)
        try:
            self._group = join_group(rendezvous, me)
        except BaseException as error:
            rendezvous.fail(error)
            self._broken = CoordinatorError(f"{self._me} could not join: {error}")
            self.close()
            raise
        self._detector = self._group.detector
        if parent is None and spans_nodes(self.info):
            launcher.report_meeting(self.info)
        return self._group.peers

    @property
    def address(self) -> str:
        """The address of this host by which it reaches the master, and so the others reach it."""
        if self._session is not None:
            return self._session.client.local_address
        host, *_ = candidates(self.info)[0]
        return launcher.host_addresses.local_address_for((host, self.info.master_port or 9))

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

    def connections(self, *, timeout_s: float | None = None) -> dict[int, socket.socket]:
        """A connection to every other rank of the group, by rank. Collective.

        Both ends have proved that they belong to the launch. The sockets do not block, and are the
        caller's to close. Raises CoordinatorError on every rank if two ranks cannot connect.
        """
        self._check_open("connections")
        detector = self._detector
        if self._session is None or detector is None:
            return {}
        call = self._begin_call("connections", timeout_s)
        name = f"{self._store.prefix}{call.number}"
        address, credentials = self._session.client.local_address, self._session.credentials
        check = functools.partial(detector.check_alive, call)
        return PeerConnector(address, credentials, self.rank, self.peers, name, check).connect(
            lambda data: self._exchange("connections", Exchange(data), call.left_s), call
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
        key = self._store.child("-".join(map(str, members)), name, str(number)).prefix
        ranks = [self.ranks[member] for member in members]
        group._join(key, ranks, self._detector, call, check)
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
        try:
            for user in tuple(self._users) if self._broken is None else ():
                user.close()
        except BaseException as error:
            self._abandon(error)
            self.close(timeout_s=timeout_s)
            raise
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
        late = self._release(CLOSED, limit)
        if late and self._broken is None:
            detector = self._detector
            describe = detector.monitor.describe_local if detector is not None else "rank {}".format
            names = " and ".join(map(describe, late))
            raise CoordinatorTimeout(
                f"rank 0 waited {limit:g} s in close ({caller()}) for {names}. Every rank must "
                "close its Coordinators, or end."
            )

    def close_first(self, user: User) -> User:
        """Have close() close the user first, such as a model that other ranks serve; return it."""
        self._users.add(user)
        return user

    def _interrupt(self, limit: float) -> None:
        """Break the call that another thread is in, and see it end."""
        if self._busy.acquire(blocking=False):
            self._busy.release()
            return
        if self._detector is not None and self._broken is None:
            self._detector.abandon(f"close ({caller()}) in the middle of the call", caller())
        if self._busy.acquire(timeout=limit):
            self._busy.release()

    def _release(self, status: int, limit: float | None) -> list[int]:
        self._locks.close()
        stuck: dict[int, float] = {}
        if self._group is not None:
            detector = self._group.detector
            server = self._server if limit is not None else None  # __del__ may come in its thread
            if server is not None:  # what groups that were closed before say of others still holds
                reported, failed = detector.reported(), detector.session.reported
                failed.difference_update({*self.ranks} - reported)
                failed |= reported
                stuck |= dict.fromkeys(server.unreachable() if reported else (), 0.0)
            if self._broken is not None:  # else they are waited for, as by every other call
                stuck |= dict.fromkeys(detector.monitor.suspended(), 0.0)
            self._group.set_status(status)
            self._group.close()
        if self._session is None:
            return []
        # Who lives hears of a report.
        stuck = dict.fromkeys(self._session.reported, self._timings.reason_s) | stuck
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
        if self._detector is not None and self._broken is None and not self._closed:
            causes = [failure for failure in self._causes(error) if failure.rank != self.rank]
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            self._detector.abandon(why, caller(), causes, traceback_of(error))
        self._broken = self._broken or CoordinatorError(f"left because of {error!r}")

    # ---- within ----

    def _exchange(self, name: str, exchange: Exchange, timeout_s: float | None) -> list[bytes]:
        """One collective call; what breaks it breaks the group."""
        self._check_open(name)
        limit_s = self.timeout_s if timeout_s is None else self.checked_timeout(timeout_s)
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

    def __repr__(self) -> str:
        return f"Coordinator(rank={self.rank}, world_size={self.world_size}, ranks={self.ranks})"


def _is_orderly(error: BaseException) -> bool:
    """A script that ends itself with success leaves as any other does."""
    return isinstance(error, SystemExit) and error.code in (None, 0)
