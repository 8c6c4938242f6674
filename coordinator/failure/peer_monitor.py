"""The state of the other ranks of a group, from shared memory, from /proc and from rank 0.

Ranks are named as in the launch, whatever their number in a group.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from coordinator._node_shm import NodeSegment
from coordinator.call_site import CallSite, CallStatus
from coordinator.control.membership import LEFT, SUSPENDED, Membership, RankReport
from coordinator.control.process_monitor import PeerProcess
from coordinator.control.session import Session
from coordinator.errors import FailureReason
from coordinator.peers import Peer
from launcher import link_state

PRESENT, CLOSED, FORGOTTEN = 0, 1, 2  # status of a rank in shared memory
CLOSED_ITS_COORDINATOR = "closed its Coordinator"
STATUS_TEXT = {CLOSED: CLOSED_ITS_COORDINATOR, FORGOTTEN: "dropped its Coordinator without close()"}
CONNECTION_LOST = "exited, or its connection broke"
MAX_LINES = 16  # of a table within an error
RUNNING = "running"


class ObservedRank(NamedTuple):
    """A rank as it looks from here.

    state: what it does, in a few words. reason: why it counts as failed, if it does.
    """

    peer: Peer
    state: str
    last_call: CallStatus | None = None
    reason: FailureReason | None = None
    exit_status: int | None = None
    since_s: float = 0.0  # how long it has been so, if that is known

    def __str__(self) -> str:
        peer = self.peer
        last = str(self.last_call or "")
        facts = [f"host {peer.host}", f"pid {peer.pid}", last, self.state]
        return f"rank {peer.rank} ({', '.join(fact for fact in facts if fact)})"

    @property
    def call(self) -> str:
        return self.last_call.call if self.last_call is not None else ""


class PeerStatus(NamedTuple):
    """A rank as it is in shared memory; has_arrived: in the call that this rank is in."""

    status: int
    has_arrived: bool
    last_call: CallStatus


class PeerMonitor:
    """Observes the other ranks of one group."""

    def __init__(self, key: str, session: Session, me: Peer, peers: Sequence[Peer]) -> None:
        self.key, self.session, self.me, self.peers = key, session, me, peers
        self.segment: NodeSegment | None = None
        self._local: dict[int, int] = {}  # rank of the launch: its place in the shared memory
        self._by_rank = {peer.rank: peer for peer in peers}
        self._remote = {peer.rank: peer for peer in peers if peer.rank != me.rank}
        self._processes: dict[int, PeerProcess] = {}
        self._timings, self._master = session.timings, session.info.master_rank
        self._lost: Mapping[int, float] = session.heartbeat.lost
        self._since = time.monotonic()
        self._asked_at = 0.0

    def share(self, shm_domain: Sequence[int], segment: NodeSegment) -> None:
        """Watch these places of the group through the memory that they share, in this order."""
        self.segment = segment
        self._local = {self.peers[place].rank: index for index, place in enumerate(shm_domain)}
        self._remote = {peer.rank: peer for peer in self.peers if peer.rank not in self._local}
        for place in shm_domain:
            self.process(self.peers[place])

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    @property
    def has_remote(self) -> bool:
        """True if some ranks do not share memory with this one."""
        return bool(self._remote)

    def reports(self, ranks: Collection[int], timeout_s: float | None = None) -> Membership:
        """The remote ones of these ranks as rank 0 knows them; waits for its answer."""
        remote = [rank for rank in ranks if rank in self._remote]
        return self.session.reports(remote, timeout_s) if remote else {}

    def unwell(
        self, timeout_s: float | None = None, call: CallSite | None = None
    ) -> Membership | None:
        """The ranks that are not well, as rank 0 knows them; None if it does not answer.

        call: and those that are not in it.
        """
        return self.session.unwell(self.key, call, timeout_s) if self._remote else {}

    def is_remote(self, rank: int) -> bool:
        return rank in self._remote

    def process(self, peer: Peer) -> PeerProcess | None:
        """The process of a rank, if it is another process of this host."""
        if peer.rank not in self._processes and peer.is_visible and peer.pid != self.me.pid:
            self._processes[peer.rank] = PeerProcess(peer)
        return self._processes.get(peer.rank)

    def suspended(self) -> set[int]:
        """The ranks of the launch whose process on this host is suspended."""
        processes = ((peer.rank, self.process(peer)) for peer in self.peers)
        return {rank for rank, process in processes if process and process.is_suspended()}

    # ---- ranks that are gone ----

    def exited(self, ranks: Collection[int] | None = None) -> list[ObservedRank]:
        """Ranks that died or left, among these or among all."""
        local = [self.local_exit(rank) for rank in self._local if ranks is None or rank in ranks]
        lost = [rank for rank in tuple(self._lost) if rank in self._remote]
        remote = [self.remote_exit(rank) for rank in lost if ranks is None or rank in ranks]
        return [observed for observed in (*local, *remote) if observed is not None]

    def departed_remote(self, ranks: Collection[int], timeout_s: float) -> list[ObservedRank]:
        """Ranks among these that have left, as rank 0 says; asks it once in a while."""
        peers = [peer for rank, peer in self._remote.items() if rank in ranks]
        now = time.monotonic()
        if not peers or now - self._asked_at < self._timings.departed_s:
            return []
        self._asked_at = now
        membership = self.unwell(min(self._timings.answer_s, timeout_s)) or {}
        departed = (self.departed(peer, membership.get(peer.rank)) for peer in peers)
        return [observed for observed in departed if observed is not None]

    def departed(self, peer: Peer, report: RankReport | None) -> ObservedRank | None:
        """The rank, if by rank 0's report it has closed the group, or all that it had."""
        if report is None:
            return None
        is_fresh = report.silent_s < self._timings.silent_s
        is_old = time.monotonic() - self._since > self._timings.new_group_s and is_fresh
        is_without_group = report.calls is not None and self.key not in report.calls
        if report.note == LEFT or (is_old and is_without_group):
            return ObservedRank(peer, CLOSED_ITS_COORDINATOR, None, FailureReason.LEFT)
        return None

    def missing(self) -> list[int]:
        """Ranks of this node that have not come to the call that this one is in."""
        return [rank for rank in self._local if not self._read_status(rank).has_arrived]

    def awaited_exits(self) -> list[ObservedRank]:
        """Awaited ranks that can no longer arrive."""
        exited = self.exited({*self.missing(), *tuple(self._lost)})
        missing = self.missing() if exited else ()  # some came, and then left
        awaited = {*missing, *self._remote} if exited else ()
        return [observed for observed in exited if observed.peer.rank in awaited]

    def local_exit(self, rank: int) -> ObservedRank | None:
        """A rank that shares memory, if it died or left."""
        if rank == self.me.rank:
            return None
        status, last_call = self._local_status(rank)
        peer, process = self._by_rank[rank], self._processes.get(rank)
        if status != PRESENT:
            return ObservedRank(peer, STATUS_TEXT[status], last_call, FailureReason.LEFT)
        if process is not None and process.is_dead():
            exited = FailureReason.EXITED
            return ObservedRank(peer, process.state(), last_call, exited, process.exit_status)
        return None

    def remote_exit(self, rank: int) -> ObservedRank | None:
        """A rank that shares no memory, if rank 0 lost its connection."""
        since = self._lost.get(rank)
        if since is None or time.monotonic() - since < self._timings.lost_grace_s:
            return None
        exited, lost_s = FailureReason.EXITED, time.monotonic() - since
        return ObservedRank(self._remote[rank], CONNECTION_LOST, None, exited, None, lost_s)

    def own_call(self) -> CallStatus:
        """The call that this rank was last in; number 0 if in none yet."""
        return self._read_status(self.me.rank).last_call

    def last_call(self, rank: int) -> CallStatus | None:
        """The call that a rank was last in, if it shares memory with this one."""
        return self._local_status(rank)[1] if rank in self._local else None

    def _local_status(self, rank: int) -> tuple[int, CallStatus | None]:
        status = self._read_status(rank)
        return status.status, status.last_call if status.last_call.number else None

    def _read_status(self, rank: int) -> PeerStatus:
        assert self.segment is not None
        fields = self.segment.read_status(self._local[rank])
        status, has_arrived, *_ = fields
        return PeerStatus(status, bool(has_arrived), CallStatus(*fields[3:]))

    # ---- ranks that are late ----

    def local_calls(self) -> dict[int, CallSite]:
        """The call that each rank of this node is in."""
        return {rank: CallSite(*self._read_status(rank).last_call[:3]) for rank in self._local}

    def stragglers(self, call: CallSite, membership: Membership | None) -> list[ObservedRank]:
        """The ranks that are not in this call, with what they do instead.

        membership: the unwell, and those that rank 0 does not know to be in it.
        """
        local = [self._local_straggler(rank, call) for rank in self.missing()]
        if membership is None:
            remote = [self._observe_without_server(rank) for rank in self._remote]
        else:
            remote = [self._remote_straggler(rank, membership[rank], call) for rank in membership]
        return [observed for observed in (*local, *remote) if observed is not None]

    def _local_straggler(self, rank: int, call: CallSite) -> ObservedRank | None:
        if self._read_status(rank).last_call[:2] == call[:2]:
            return None  # it waits in this very call, for a rank of another node
        return self._observe_local(rank)

    def _observe_local(self, rank: int) -> ObservedRank:
        _, last_call = self._local_status(rank)
        process = self._processes.get(rank)
        state = process.state() if process else "in this process"
        if last_call is None:
            state = f"not seen in any call, {state}"
        return ObservedRank(self._by_rank[rank], state, last_call)

    def _remote_straggler(
        self, rank: int, report: RankReport, call: CallSite
    ) -> ObservedRank | None:
        if rank not in self._remote:
            return None  # it is better known from here
        observed = self.observe_report(self._remote[rank], report)
        last_call = observed.last_call
        is_in_call = last_call is not None and last_call[:2] == call[:2]
        return None if observed.state == RUNNING and is_in_call else observed

    def _observe_remote(self, rank: int, membership: Membership) -> ObservedRank | None:
        """A rank that shares no memory, as rank 0 knows it."""
        if not membership:
            return self._observe_without_server(rank)
        report = membership.get(rank)
        if report is None:
            return ObservedRank(self._remote[rank], "never seen by rank 0")
        return self.observe_report(self._remote[rank], report)

    def observe_report(self, peer: Peer, report: RankReport) -> ObservedRank:
        """A rank as rank 0 reports it."""
        last_call = (report.calls or {}).get(self.key)
        if last_call is not None and last_call.number:
            last_call = last_call._replace(ago_s=last_call.ago_s + report.silent_s)
        else:
            last_call = None
        state, reason = judge_report(report, self._timings.silent_s)
        if reason is FailureReason.UNREACHABLE:
            state = self._network_failure(peer, report.silent_s)
        if last_call is None:
            state = f"not seen in any call, {state}"
        return ObservedRank(peer, state, last_call, reason, None, report.silent_s)

    def _network_failure(self, peer: Peer, silent_s: float) -> str:
        """A network failure between rank 0's host and the peer's, which rank 0 reports."""
        hosts = (other.host for other in self.peers if other.rank == self._master)
        here = f"{next(hosts, 'rank 0')} ({self.session.info.master_addr})"
        return link_state.network_failure(here, f"{peer.host} ({peer.address})", silent_s)

    def _observe_without_server(self, rank: int) -> ObservedRank | None:
        if rank == self._master:
            if self.session.server_lost_at:
                return ObservedRank(self._remote[rank], "it does not answer: gone")
            is_cut_off = bool(self.session.client.network_failure())
            reason = FailureReason.UNREACHABLE if is_cut_off else None
            return ObservedRank(self._remote[rank], self.session.describe_silence(), None, reason)
        if self._master in self._remote:
            return None  # rank 0 is to blame, as far as we can see
        return ObservedRank(self._remote[rank], "unknown, for rank 0 does not answer")

    def unwell_remote(self) -> list[ObservedRank]:
        """Ranks of other nodes that rank 0 knows to be stopped, cut off or gone, or rank 0 itself.

        Waits shortly for its answer.
        """
        membership = self.unwell(self._timings.last_answer_s)
        if membership is None:
            if self._master not in self._remote:
                return []
            master = self._observe_without_server(self._master)
            return [master] if master is not None else []
        reports = [(peer, membership.get(rank)) for rank, peer in self._remote.items()]
        observed = [self.observe_report(peer, report) for peer, report in reports if report]
        return [rank for rank in observed if rank.reason is not None]

    def observe(self, ranks: Iterable[int], membership: Membership) -> list[ObservedRank]:
        """These ranks and what they do, as far as it can be seen."""
        observed = [
            self._observe_local(rank)
            if rank in self._local
            else self._observe_remote(rank, membership)
            for rank in ranks
            if rank in self._local or rank in self._remote
        ]
        return [rank for rank in observed if rank is not None]

    def describe(self, ranks: Collection[int]) -> str:
        """These ranks of the launch: where they are, and what they do."""
        membership = self.reports(ranks, self._timings.last_answer_s)
        return " and ".join(map(str, self.observe(ranks, membership))) or f"ranks {list(ranks)}"

    def describe_local(self, rank: int) -> str:
        """A rank of the launch, and what it does if it shares memory with this one."""
        if rank in self._local:
            return str(self._observe_local(rank))
        return str(self._by_rank.get(rank, f"rank {rank}"))

    def table(self) -> str:
        """A line for every rank: where it is and what it does."""
        return self._table([*self._by_rank])

    def short_table(self) -> str:
        """The table for an error that is due already: at most MAX_LINES, and little waiting."""
        ranks = [*self._by_rank]
        lines = self._table(ranks[:MAX_LINES], self._timings.last_answer_s)
        rest = len(ranks) - MAX_LINES
        return lines + f"\nand {rest} more" * (rest > 0)

    def _table(self, ranks: Collection[int], timeout_s: float | None = None) -> str:
        return "\n".join(map(str, self.observe(ranks, self.reports(ranks, timeout_s))))


def judge_report(report: RankReport, silent_s: float) -> tuple[str, FailureReason | None]:
    """The state of a rank that rank 0 reports, in a few words, and why it counts as failed.

    silent_s: without a heartbeat for so long, a rank does not run.
    """
    if report.lost_s >= 0:
        return f"{CONNECTION_LOST}, {report.lost_s:.0f} s ago", FailureReason.EXITED
    if report.note == LEFT:
        return CLOSED_ITS_COORDINATOR, FailureReason.LEFT
    if report.silent_s > silent_s and report.is_unreachable:
        return "its host does not answer rank 0", FailureReason.UNREACHABLE
    if report.note == SUSPENDED:
        return SUSPENDED, FailureReason.SUSPENDED
    if report.silent_s > silent_s:
        state = f"silent for {report.silent_s:.0f} s: suspended, or stuck"
        return state, FailureReason.SUSPENDED
    return RUNNING, None
