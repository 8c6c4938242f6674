"""Joining a group: the ranks exchange who they are, share memory, and connect their nodes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import coordinator._node_shm as _node_shm
from coordinator.binomial_tree import children_of, parent_of
from coordinator.call_site import PendingCall
from coordinator.control.framing import pack, pack_for_many, unpack, unpack_answer
from coordinator.control.heartbeat import Neighbour
from coordinator.errors import CoordinatorError, CoordinatorTimeout, PeerLost
from coordinator.failure.detector import FailureDetector
from coordinator.peers import Peer, group_by_node
from coordinator.store.prefix_store import PrefixStore
from coordinator.timings import MEETING_SHARE
from coordinator.transport.group import Check, Group, patient, resumed
from coordinator.transport.rendezvous import Rendezvous
from coordinator.transport.tree import (
    ALL_NODES,
    ChildListener,
    Entry,
    Tree,
    TreeLinkBroken,
    connect_to_parent,
)
from launcher import NoMessage

if TYPE_CHECKING:
    from coordinator.transport.gloo_transport import GlooTransport

log = logging.getLogger("coordinator")


def join_group(rendezvous: Rendezvous, me: Peer) -> Group:
    """Meet the other members of a group that is being made, and connect to them. Collective."""
    joining = _Joining(rendezvous)
    try:
        return joining.join(me)
    except BaseException:
        joining.close()
        raise


class _Joining:
    """The steps of joining, each of which ends with a rendezvous of all members.

    A rank meets those of its machine first, and shares memory with those of its node. Then the
    first ranks of the nodes become a tree, down which the root says who all are: so rank 0 need not
    tell each of them.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous, self.key = rendezvous, rendezvous.key
        self.session, self.pending = rendezvous.session, rendezvous.pending
        self.rank = rendezvous.members.index(self.session.info.rank)
        self.size = len(rendezvous.members)
        self.is_launch = rendezvous.parent is None  # and no part of one
        self.peers: dict[int, Peer] = {}  # by place
        self.shm_domain: list[int] = []
        self.detector: FailureDetector | None = None
        self.segment: _node_shm.NodeSegment | None = None
        self.tree: Tree | GlooTransport | None = None

    def close(self) -> None:
        if self.detector is not None:
            self.detector.close()
        if self.tree is not None:
            self.tree.close()

    def join(self, me: Peer) -> Group:
        packets = self.rendezvous.exchange("peers", me.pack(), scope=me.machine)
        self.peers = {place: Peer.unpack(packet) for place, packet in packets.items()}
        places, peers = list(self.peers), list(self.peers.values())
        domains = [[places[index] for index in domain] for domain in shm_domains_of(peers)]
        own_domain = next(domain for domain in domains if self.rank in domain)
        self.shm_domain = self._share_memory(own_domain)
        domains = [self.shm_domain]
        if len(self.shm_domain) < self.size:
            self.session.start_heartbeat()
            domains = self._connect_domains(packets)
        everyone = [self.peers[place] for place in range(self.size)]
        if self._is_over_gloo(everyone):
            tree, self.tree = self.tree, self._connect_by_gloo()
            if tree is not None:
                tree.close()
            # A rank that left while others still connect would break all their connections.
            self.rendezvous.exchange("connected", b"")
        self.detector = FailureDetector(self.key, self.session, self.rank, everyone)
        if self.segment is not None:
            self.detector.monitor.share(self.shm_domain, self.segment)
        self.session.watch_master(everyone)
        return Group(
            self.key, self.session, self.rank, self.detector, domains, self.segment, self.tree
        )

    # ---- memory ----

    def _share_memory(self, domain: list[int]) -> list[int]:
        """Attach to the memory of the domain. Where that fails, its ranks are domains alone."""
        if len(domain) == 1:
            return domain
        fd, offer = self._export_segment(domain)
        try:
            offers = self.rendezvous.exchange(f"memory/{domain[0]}", offer, domain)
            problem = self._attach(domain, {place: unpack(data) for place, data in offers.items()})
            problems = self.rendezvous.exchange(f"attached/{domain[0]}", problem.encode(), domain)
        finally:
            if fd >= 0:
                os.close(fd)
        if not problems:
            if self.is_launch:
                self._meet_node(domain, [unpack(offers[place])[3] for place in domain])
            return domain
        self.segment = None
        place, why = next(iter(problems.items()))
        log.warning(
            "rank %d: %d ranks of this node cannot share memory (%s: %s); they use TCP",
            self.session.info.rank, len(domain), self.peers[place], why.decode(),
        )  # fmt: skip
        return [self.rank]

    def _meet_node(self, domain: list[int], record_fds: Sequence[int]) -> None:
        neighbours = [
            Neighbour(self.peers[place], fd) for place, fd in zip(domain, record_fds, strict=True)
        ]
        index = domain.index(self.rank)
        if min(record_fds) >= 0:
            self.session.heartbeat.set_node(neighbours[:index], neighbours[index + 1 :])

    def _export_segment(self, domain: list[int]) -> tuple[int, bytes]:
        """Fresh memory, if this rank is to make it; its descriptor, problem, cores and record."""
        cores = sorted(os.sched_getaffinity(0))
        fd, problem = -1, ""
        if self.rank == domain[0]:
            try:
                fd = _node_shm.create(len(domain))
            except OSError as error:
                problem = f"{error.strerror}"
        return fd, pack((fd, problem, cores, self.session.heartbeat.record_fd))

    def _attach(self, domain: list[int], offers: dict[int, Any]) -> str:
        """Map the memory of the domain; the problem, or nothing."""
        fd, problem, *_ = offers[domain[0]]
        cores = {core for rank in domain for core in offers[rank][2]}
        if problem:
            return str(problem)
        first = self.peers[domain[0]]
        try:
            own_fd = os.open(f"/proc/{first.pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            return str(error)
        try:
            place, may_spin = domain.index(self.rank), len(cores) >= len(domain)
            self.segment = _node_shm.NodeSegment(own_fd, len(domain), place, may_spin)
        except OSError as error:
            return str(error)
        finally:
            os.close(own_fd)
        return ""

    # ---- connections ----

    def _connect_domains(self, packets: Mapping[int, bytes]) -> list[list[int]]:
        """The first rank of each domain joins the tree; all raise if one cannot.

        packets: of the peers here. Returns all domains, once the peers of all are known.
        """
        purpose, session = f"tree/{self.key}", self.session
        listener, own = None, b""
        if self._is_first:
            listener = ChildListener(session.client.local_address, session.credentials, purpose)
            own = _pack_node(listener.address, {place: packets[place] for place in self.shm_domain})
        try:
            index, size, nodes = self.rendezvous.number_nodes(own)
            if self.is_launch:
                self.session.set_num_speakers(size)
            problem = ""
            if listener is not None:
                near = {node: _unpack_node(data) for node, data in nodes.items()}
                problem = self._join_tree(index, size, near, listener)
        finally:
            if listener is not None:
                listener.close()
        problems = self.rendezvous.exchange("tree", problem.encode())
        if problems:
            me, last = session.info.rank, problems[max(problems)].decode()
            raise CoordinatorTimeout(problem or f"rank {me} could not join: {last}")
        packed = self._from_root(pack_for_many(nodes) if index == 0 else b"")
        members = [_unpack_node(data)[1] for data in unpack_answer(packed).values()]
        self.peers = {place: peer for node in members for place, peer in node.items()}
        return [list(node) for node in members]

    @property
    def _is_first(self) -> bool:
        return self.rank == self.shm_domain[0]

    def _join_tree(
        self, index: int, size: int, nodes: Mapping[int, _Node], listener: ChildListener
    ) -> str:
        """Connect to the neighbours in the tree; the problem, or nothing."""
        parent, children = None, {}
        deadline = self.pending.restarted(MEETING_SHARE * self.pending.left_s).deadline
        try:
            if index > 0:
                address, above = nodes[parent_of(index)]
                parent = connect_to_parent(
                    address,
                    self.session.credentials,
                    self.peers[self.rank],
                    _first(above),
                    f"tree/{self.key}/{index}",
                    deadline,
                    self.rendezvous.check_lost,
                )
            awaited = children_of(index, size)
            children = listener.wait(awaited, deadline, self.rendezvous.check_lost)
        except NoMessage:
            late = [_first(nodes[node][1]) for node in awaited if node not in listener.accepted]
            return self._children_missing(late)
        except CoordinatorError as error:
            return str(error)
        self.tree = Tree(index, size, parent, children)
        return ""

    def _children_missing(self, late: Sequence[Peer]) -> str:
        names = " and ".join(f"{peer} at {peer.address}" for peer in late)
        me = self.peers[self.rank]
        return (
            f"rank {me.rank} (host {me.host}, address {me.address}) waited "
            f"{MEETING_SHARE * self.pending.timeout_s:g} s in {self.pending.call} for {names} to "
            "connect"
        )

    # ---- gloo ----

    def _is_over_gloo(self, everyone: Sequence[Peer]) -> bool:
        transports = {peer.transport: peer for peer in everyone}
        if len(transports) > 1:
            names = " and ".join(f"{peer}: {name!r}" for name, peer in transports.items())
            raise CoordinatorError(
                f"rank {self.session.info.rank}: the ranks do not agree on the transport of their "
                f"Coordinator ({names}). Give all the same transport=."
            )
        num_nodes = len(group_by_node(everyone))
        if "gloo" in transports and self.session.credentials.encrypts and num_nodes > 1:
            raise CoordinatorError(
                f"rank {self.session.info.rank}: gloo does not encrypt what passes between the "
                f"{num_nodes} nodes, as --encrypt demands. Leave out transport='gloo'."
            )
        return "gloo" in transports

    def _connect_by_gloo(self) -> GlooTransport:
        """A gloo group of all members, which meet at rank 0."""
        from coordinator.store.torch_store import StoreTimeout, TorchStore
        from coordinator.transport.gloo_transport import GlooTransport

        def wait(store: PrefixStore, keys: Sequence[str], call: PendingCall) -> list[bytes]:
            return store.wait(keys, call, self.rendezvous.check_lost)

        session, left_s = self.session, self.pending.left_s
        values = PrefixStore(f"{self.key}gloo/", session, session.info.rank)
        store, address = TorchStore(values, wait, left_s), session.client.local_address
        try:
            return GlooTransport(store, self.rank, self.size, address, left_s)
        except StoreTimeout as error:
            raise CoordinatorTimeout(
                f"rank {session.info.rank} waited {self.pending.timeout_s:g} s in "
                f"{self.pending.call} for the other ranks to connect over gloo"
            ) from error
        except RuntimeError as error:
            raise self._broken(f"gloo: {error}") from error

    def _from_root(self, packed: bytes) -> bytes:
        """The root's bytes, on every rank: down the tree, and then within each domain."""
        check = patient(self._check, self.session.timings.lost_grace_s)
        if isinstance(self.tree, Tree):
            packed = self._down_the_tree(self.tree, packed, check)
        if self.segment is None:
            return packed
        wait_s, data = self.session.timings.shm_wait_s, packed if self._is_first else b""
        parts = self.segment.exchange("join", 0, 0, "", data, not self._is_first, False, wait_s)
        return bytes((parts or resumed(self.segment, wait_s, check))[0])

    def _down_the_tree(self, tree: Tree, packed: bytes, check: Check) -> bytes:
        own = [Entry(0, 0, ALL_NODES, packed)] if tree.index == 0 else []
        deadline = self.pending.deadline + self.session.timings.link_extra_s
        try:
            _, entries = tree.exchange(((),), own, lambda _: ALL_NODES, deadline, check)
        except TreeLinkBroken as error:
            raise self._broken(str(error)) from error
        return entries[0].data

    def _check(self) -> None:
        self.rendezvous.check_lost()
        if time.monotonic() >= self.pending.deadline:
            raise CoordinatorTimeout(
                f"rank {self.session.info.rank} waited {self.pending.timeout_s:g} s in "
                f"{self.pending.call} for the ranks of other nodes, all of which had joined. Look "
                "at what they printed last."
            )

    def _broken(self, why: str) -> CoordinatorError:
        """The error for a broken connection: rank 0 may know whose it was."""
        until = time.monotonic() + self.session.timings.exit_s
        while time.monotonic() < until:
            self.session.heartbeat.refresh(self.session.timings.reason_answer_s)
            self.rendezvous.check_lost()
            time.sleep(self.session.timings.shm_wait_s)
        return PeerLost(
            f"rank {self.session.info.rank} was in {self.pending.call} when its connection to "
            f"another node broke: {why}. Look at what the ranks printed last."
        )


_Node = tuple[tuple[str, int], dict[int, Peer]]  # address of its first rank, peers by place


def _pack_node(address: Sequence[Any], packets: Mapping[int, bytes]) -> bytes:
    return pack((address, packets))


def _unpack_node(data: bytes) -> _Node:
    address, packets = unpack(data)
    return address, {place: Peer.unpack(packet) for place, packet in packets.items()}


def _first(peers: Mapping[int, Peer]) -> Peer:
    return peers[min(peers)]


def shm_domains_of(peers: Sequence[Peer]) -> list[list[int]]:
    """Places of the group that may share memory: of one node, one kernel, one user.

    Over gloo every rank is alone.
    """
    place_of = {peer.rank: place for place, peer in enumerate(peers)}
    domains: dict[tuple[int, str], list[int]] = {}
    for number, node in enumerate(group_by_node(peers)):
        for rank in node:
            place = place_of[rank]
            memory = str(rank) if peers[place].transport else peers[place].memory
            domains.setdefault((number, memory), []).append(place)
    return sorted(sorted(domain) for domain in domains.values())
