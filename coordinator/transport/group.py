"""Transport of collective calls: shared memory within a node, connections between nodes.

A shm domain is a set of ranks that share memory: those of one node, kernel and user. The first rank
of each domain is in the tree that connects the domains.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import coordinator._node_shm as _node_shm
from coordinator.call_site import CallSite, CallStatus, PendingCall
from coordinator.control.framing import pack, unpack
from coordinator.control.session import Session
from coordinator.errors import CoordinatorError, PeerLost
from coordinator.failure.detector import FailureDetector
from coordinator.peers import Peer
from coordinator.transport.tree import ALL_NODES, Entry, Tree, TreeLinkBroken

if TYPE_CHECKING:
    from coordinator.transport.gloo_transport import GlooTransport

Check = Callable[[], None]  # called while a rank waits; raises if it waits in vain
ALL_RANKS = -1
"""The dst, root or reader that is not a single rank."""


class Exchange(NamedTuple):
    """One rank's part in a collective call.

    root: the only rank that gives data, or takes it, so that ranks can check that they mean the
    same. reader: the only rank that reads. Both are ALL_RANKS if there is no such rank.
    is_scattered: each rank reads its part of what pack_parts() made.
    """

    data: bytes
    root: int = ALL_RANKS
    reader: int = ALL_RANKS
    is_scattered: bool = False


NOTHING = Exchange(b"")
"""The part of a rank that only waits for the others."""


class Group:
    """The ranks of a group, joined; see join_group(). Collective throughout.

    shm_domains: places of the group. segment: of this rank's domain, None if that is this rank
    alone. tree: None unless this rank is the first of its domain and there are several.
    """

    def __init__(
        self,
        key: str,
        session: Session,
        rank: int,
        detector: FailureDetector,
        shm_domains: Sequence[Sequence[int]],
        segment: _node_shm.NodeSegment | None,
        tree: Tree | GlooTransport | None,
    ) -> None:
        self.key, self.session, self.rank = key, session, rank
        self.detector, self.shm_domains = detector, shm_domains
        self.peers: tuple[Peer, ...] = tuple(detector.peers)
        self._segment, self._tree = segment, tree
        self._domain_of = {rank: i for i, domain in enumerate(shm_domains) for rank in domain}
        self._shm_domain = shm_domains[self._domain_of[rank]]
        self._is_one_domain, self._is_first = len(shm_domains) == 1, rank == self._shm_domain[0]
        self._wait_s = session.timings.shm_wait_s
        self._last = (CallSite("start", 0, ""), time.monotonic())
        session.heartbeat.groups[key] = self

    def call_status(self) -> CallStatus:
        """The call this rank was last in."""
        if self._is_one_domain:
            return self.detector.monitor.own_call()
        call, since = self._last
        return CallStatus(*call, time.monotonic() - since)

    def exchange(self, pending: PendingCall, exchange: Exchange) -> list[bytes]:
        """The data of each rank, or nothing where this rank is not to read it."""
        try:
            if self._is_one_domain:
                reads = exchange.reader == ALL_RANKS or exchange.reader == self.rank
                return self._exchange_in_domain(pending, exchange, reads)
            self._last = (pending.call, pending.since)
            self.detector.check_group(pending)
            results = self._exchange_in_all(pending, exchange)
            self._last = (pending.call, time.monotonic())
            return results
        except _node_shm.CallMismatch:
            calls = self.detector.monitor.local_calls()  # all have come, but to different ones
            raise self.detector.disagree(calls, pending) from None
        except TreeLinkBroken as error:
            neighbour = self.shm_domains[error.index][0] if error.index >= 0 else None
            raise self.detector.broken(neighbour, str(error), pending) from error

    def _exchange_in_domain(
        self, pending: PendingCall, exchange: Exchange, reads: bool, check: Check | None = None
    ) -> list[bytes]:
        """Among the ranks of this shm domain, by their place in it."""
        segment = self._segment  # ours, even if another thread closes the group
        if segment is None:
            return [exchange.data]
        # The ranks of a domain compare the root, where it is unsigned: 0 is ALL_RANKS.
        (name, number, where, _, _), wait_s = pending, self._wait_s
        data, root, _, is_scattered = exchange
        results = segment.exchange(name, number, root + 1, where, data, reads, is_scattered, wait_s)
        return results or resumed(segment, wait_s, check or partial(self.detector.check, pending))

    def _exchange_in_all(self, pending: PendingCall, exchange: Exchange) -> list[bytes]:
        """First within the domains, then between their first ranks, then within again."""
        gathered = self._exchange_in_domain(
            pending, exchange._replace(is_scattered=False), self._is_first
        )
        entries: list[tuple[int, int, bytes]] = []
        check = patient(partial(self.detector.check, pending), self.session.timings.lost_grace_s)
        if self._is_first:
            entries = self._exchange_between_domains(pending, gathered, exchange, check)
        packed = pack(entries) if self._is_first and len(self._shm_domain) > 1 else b""
        spread = Exchange(packed, exchange.root)
        from_first = self._exchange_in_domain(pending, spread, not self._is_first, check)
        if not self._is_first:
            entries = unpack(from_first[0])
        results = [b""] * len(self.peers)
        for src, dst, data in entries:
            if dst in (ALL_RANKS, self.rank):
                results[src] = data
        return results

    def _exchange_between_domains(
        self, pending: PendingCall, gathered: list[bytes], exchange: Exchange, check: Check
    ) -> list[tuple[int, int, bytes]]:
        """(src, dst, data) of all entries for ranks of this domain."""
        assert self._tree is not None
        # Headers are equal if name, number and root of the call are.
        own, timings = (*pending[:2], exchange.root), self.session.timings
        headers, entries = self._tree.exchange(
            (own, pending.call),
            self._entries(gathered, exchange),
            self._dst_domain_of,
            pending.deadline + timings.link_extra_s,
            check,
        )
        for index, (header, call) in headers:
            if tuple(header) != own:
                first = self.peers[self.shm_domains[index][0]]
                me = self.peers[self.rank].rank
                calls = {me: pending.call, first.rank: CallSite(*call)}
                raise self.detector.disagree(calls, pending)
        return [(entry.src, entry.dst, entry.data) for entry in entries]

    def _entries(self, gathered: list[bytes], exchange: Exchange) -> list[Entry]:
        index, size = self._domain_of[self.rank], len(self.peers)
        entries: list[Entry] = []
        for src, data in zip(self._shm_domain, gathered, strict=True):
            if exchange.is_scattered and data:
                parts = enumerate(unpack_parts(data, size))
                entries += [Entry(index, src, dst, part) for dst, part in parts]
            elif data:
                entries.append(Entry(index, src, exchange.reader, data))
        return entries

    def _dst_domain_of(self, entry: Entry) -> int:
        return ALL_NODES if entry.dst == ALL_RANKS else self._domain_of[entry.dst]

    def set_status(self, status: int) -> None:
        if self._segment is not None:
            self._segment.set_status(status)

    def close(self) -> None:
        self.session.heartbeat.groups.pop(self.key, None)
        if self._tree is not None:
            self._tree.close()
        self.detector.close()
        self._segment = self._tree = None


def resumed(segment: _node_shm.NodeSegment, wait_s: float, check: Check) -> list[bytes]:
    """The results of an exchange, once all have come. check: raises if some will not."""
    results = None
    while results is None:
        try:
            check()
        except CoordinatorError:
            results = segment.resume(0.0)  # the last one may have come since, and left after it
            if results is None:
                raise
        else:
            results = segment.resume(wait_s)
    return results


def patient(check: Check, grace_s: float) -> Check:
    """A check that raises PeerLost only grace_s later, for who awaits what other ranks hand on: if
    the lost one left with the result, that is still on its way."""
    first_at = 0.0

    def check_patiently() -> None:
        nonlocal first_at
        try:
            check()
        except PeerLost:
            first_at = first_at or time.monotonic()
            if time.monotonic() - first_at >= grace_s:
                raise

    return check_patiently


def pack_parts(parts: Sequence[bytes]) -> bytes:
    """The parts for each rank in one piece: a table of their offsets, and then the parts."""
    offsets = [0]
    for part in parts:
        offsets.append(offsets[-1] + len(part))
    return struct.pack(f"={len(offsets)}Q", *offsets) + b"".join(parts)


def unpack_parts(data: bytes, size: int) -> list[bytes]:
    """The parts that pack_parts() was given."""
    table = struct.calcsize(f"={size + 1}Q")
    offsets = struct.unpack_from(f"={size + 1}Q", data)
    view = memoryview(data)[table:]
    return [bytes(view[offsets[i] : offsets[i + 1]]) for i in range(size)]
