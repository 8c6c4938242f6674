"""Joining a group: the ranks exchange who they are, share memory, and connect their nodes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import coordinator._node_shm as _node_shm
from coordinator.call_site import PendingCall
from coordinator.control.framing import NoMessage, pack, unpack
from coordinator.control.session import Session
from coordinator.errors import CoordinatorError, CoordinatorTimeout
from coordinator.failure.detector import FailureDetector
from coordinator.peers import Peer, group_by_node
from coordinator.transport.group import Group
from coordinator.transport.rendezvous import Rendezvous
from coordinator.transport.tree import (
    ChildListener,
    Tree,
    children_of,
    connect_to_parent,
    parent_of,
)

CONNECT_SHARE = 0.8  # of the time to join, for connections: the rest is to hear who could not

log = logging.getLogger("coordinator")


def join_group(
    key: str,
    session: Session,
    me: Peer,
    members: Sequence[int],
    parent: FailureDetector | None,
    pending: PendingCall,
) -> Group:
    """Meet the members (ranks of the launch), and connect to them. Collective.

    parent: of a group that has all of them, if there is one. pending: the call of this.
    """
    joining = _Joining(key, session, members, parent, pending)
    try:
        return joining.join(me)
    except BaseException:
        joining.close()
        raise


class _Joining:
    """The steps of joining, each of which ends with a rendezvous of all members."""

    detector: FailureDetector
    shm_domain: list[int]

    def __init__(
        self,
        key: str,
        session: Session,
        members: Sequence[int],
        parent: FailureDetector | None,
        pending: PendingCall,
    ) -> None:
        self.key, self.session, self.pending = key, session, pending
        self.rank = members.index(session.info.rank)
        self.rendezvous = Rendezvous(key, session, members, parent, pending)
        self.peers: tuple[Peer, ...] = ()
        self.shm_domains: list[list[int]] = []
        self.segment: _node_shm.NodeSegment | None = None
        self.tree: Tree | None = None

    def close(self) -> None:
        if self.peers:
            self.detector.close()
        if self.tree is not None:
            self.tree.close()

    def join(self, me: Peer) -> Group:
        packets = self.rendezvous.exchange("peers", me.pack())
        self.peers = tuple(Peer.unpack(packet) for packet in packets)
        self.detector = FailureDetector(self.key, self.session, self.rank, self.peers)
        self.shm_domains = self._share_memory(shm_domains_of(self.peers))
        self.shm_domain = next(domain for domain in self.shm_domains if self.rank in domain)
        self.session.set_watch_targets(self._next_local_peer(), self.peers)
        if len(self.shm_domains) > 1:
            self.session.start_heartbeat()
            self._connect_domains()
        return Group(
            self.key,
            self.session,
            self.rank,
            self.detector,
            self.shm_domains,
            self.segment,
            self.tree,
        )

    def _next_local_peer(self) -> Peer:
        """The next rank on this node, in a circle."""
        place = self.shm_domain.index(self.rank) + 1
        return self.peers[self.shm_domain[place % len(self.shm_domain)]]

    # ---- memory ----

    def _share_memory(self, domains: list[list[int]]) -> list[list[int]]:
        """Attach to the memory of each domain. Where that fails, its ranks are domains alone."""
        if all(len(domain) == 1 for domain in domains):
            return domains
        own = next(domain for domain in domains if self.rank in domain)
        fd, offer = self._export_segment(own)
        try:
            offers = [unpack(data) for data in self.rendezvous.exchange("memory", offer)]
            problem = self._attach(own, offers)
            problems = self.rendezvous.exchange("attached", problem.encode())
        finally:
            if fd >= 0:
                os.close(fd)
        return self._without_broken(domains, [data.decode() for data in problems])

    def _export_segment(self, domain: list[int]) -> tuple[int, bytes]:
        """Fresh memory, if this rank is to make it; and its descriptor, problem and cores."""
        cores = sorted(os.sched_getaffinity(0))
        if self.rank != domain[0] or len(domain) == 1:
            return -1, pack((-1, "", cores))
        try:
            fd = _node_shm.create(len(domain))
        except OSError as error:
            return -1, pack((-1, f"{error.strerror}", cores))
        return fd, pack((fd, "", cores))

    def _attach(self, domain: list[int], offers: list[Any]) -> str:
        """Map the memory of the domain; the problem, or nothing."""
        if len(domain) == 1:
            return ""
        fd, problem, _ = offers[domain[0]]
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
        self.detector.share(domain, self.segment)
        return ""

    def _without_broken(self, domains: list[list[int]], problems: list[str]) -> list[list[int]]:
        """Split the domains in which a rank could not attach."""
        split = []
        for domain in domains:
            texts = [f"{self.peers[rank]}: {problems[rank]}" for rank in domain if problems[rank]]
            split += [[rank] for rank in domain] if texts else [domain]
            if texts and self.rank in domain:
                self._detach()
                log.warning(
                    "rank %d: %d ranks of this node cannot share memory (%s); they use TCP",
                    self.session.info.rank, len(domain), texts[0],
                )  # fmt: skip
        return split

    def _detach(self) -> None:
        self.segment = None
        self.detector.close()
        self.detector = FailureDetector(self.key, self.session, self.rank, self.peers)

    # ---- connections ----

    @property
    def _index(self) -> int:
        return self.shm_domains.index(self.shm_domain)

    def _connect_domains(self) -> None:
        """The first rank of each domain joins the tree; all raise if one cannot."""
        is_first = self.rank == self.shm_domain[0]
        children = children_of(self._index, len(self.shm_domains)) if is_first else []
        purpose, session = f"tree/{self.key}", self.session
        listener = None
        if children:
            address = session.client.local_address
            listener = ChildListener(address, session.credentials, purpose, children)
        try:
            own = pack(listener.address if listener is not None else None)
            addresses = [unpack(data) for data in self.rendezvous.exchange("listeners", own)]
            problem = self._join_tree(addresses, listener, purpose) if is_first else ""
        finally:
            if listener is not None:
                listener.close()
        packets = self.rendezvous.exchange("tree", problem.encode())
        problems = [data.decode() for data in packets if data]
        if problems:
            me = session.info.rank
            raise CoordinatorTimeout(problem or f"rank {me} could not join: {problems[-1]}")

    def _join_tree(self, addresses: list[Any], listener: ChildListener | None, purpose: str) -> str:
        """Connect to the neighbours in the tree; the problem, or nothing."""
        parent, children = None, {}
        deadline = self.pending.restarted(CONNECT_SHARE * self.pending.left_s).deadline
        try:
            if self._index > 0:
                above = self.shm_domains[parent_of(self._index)][0]
                parent = connect_to_parent(
                    addresses[above],
                    self.session.credentials,
                    self.peers[self.rank],
                    self.peers[above],
                    f"{purpose}/{self._index}",
                    deadline,
                )
            if listener is not None:
                children = listener.wait(deadline, self.rendezvous.check_lost)
        except NoMessage:
            return self._children_missing(listener)
        except CoordinatorError as error:
            return str(error)
        self.tree = Tree(self._index, len(self.shm_domains), parent, children)
        return ""

    def _children_missing(self, listener: ChildListener | None) -> str:
        assert listener is not None
        children = children_of(self._index, len(self.shm_domains))
        missing = [index for index in children if index not in listener.accepted]
        late = [self.peers[self.shm_domains[index][0]] for index in missing]
        names = " and ".join(f"{peer} at {peer.address}" for peer in late)
        me = self.peers[self.rank]
        return (
            f"rank {me.rank} (host {me.host}, address {me.address}) waited "
            f"{CONNECT_SHARE * self.pending.timeout_s:g} s in {self.pending.call} for {names} to "
            "connect"
        )


def shm_domains_of(peers: Sequence[Peer]) -> list[list[int]]:
    """Places of the group that may share memory: of one node, one kernel, one user."""
    place_of = {peer.rank: place for place, peer in enumerate(peers)}
    domains: dict[tuple[int, str], list[int]] = {}
    for number, node in enumerate(group_by_node(peers)):
        for rank in node:
            place = place_of[rank]
            domains.setdefault((number, peers[place].memory), []).append(place)
    return sorted(sorted(domain) for domain in domains.values())
