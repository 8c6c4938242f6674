"""Who is missing when a call does not end, and what is known of them.

Ranks are named as in the launch, whatever their number in a group.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from coordinator._node_shm import Board
from coordinator.call_site import Call
from coordinator.control.process_monitor import Process
from coordinator.control.session import ANSWER_S, Session
from coordinator.peers import Peer

PRESENT, CLOSED, FORGOTTEN = 0, 1, 2  # status of a rank on the board
LEFT = "closed its Coordinator"
STATUS = {CLOSED: LEFT, FORGOTTEN: "dropped its Coordinator without close()"}
GRACE_S = 0.5  # what a lost rank had sent may still be on its way
SILENT_S = 2.5  # without a beat
LOOK_S = 1.0  # between two questions to rank 0 about who has left
NEW_S = 5.0  # until when a group may be missing from what its ranks tell rank 0
MAX_LINES = 16  # of a table within an error


class Culprit(NamedTuple):
    """A rank that keeps others waiting."""

    peer: Peer
    state: str  # what it does instead, in a few words
    last: str = ""  # where it was seen, and when

    def __str__(self) -> str:
        peer = self.peer
        facts = [f"host {peer.host}", f"pid {peer.pid}", self.last, self.state]
        return f"rank {peer.rank} ({', '.join(fact for fact in facts if fact)})"


class Sights:
    """What this rank can see of the others of its group: on the board, in /proc, from rank 0."""

    def __init__(self, key: str, session: Session, me: Peer, peers: Sequence[Peer]) -> None:
        self.key, self.session, self.me, self.peers = key, session, me, peers
        self.board: Board | None = None
        self._here: dict[int, int] = {}  # rank of the launch: its place on the board
        self._remote = {peer.rank: peer for peer in peers if peer.rank != me.rank}
        self._processes: dict[int, Process] = {}
        self._since = time.monotonic()
        self._census_at = 0.0

    def share(self, island: Sequence[int], board: Board) -> None:
        """From now on these places of the group share memory with us, in this order."""
        self.board = board
        self._here = {self.peers[place].rank: index for index, place in enumerate(island)}
        self._remote = {peer.rank: peer for peer in self.peers if peer.rank not in self._here}
        others = [self.peers[place] for place in island]
        self._processes = {peer.rank: Process(peer) for peer in others if peer.pid != self.me.pid}

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    @property
    def has_remote(self) -> bool:
        """Are there ranks that do not share memory with this one?"""
        return bool(self._remote)

    def is_remote(self, rank: int) -> bool:
        return rank in self._remote

    # ---- who will not come any more ----

    def gone(self, ranks: Collection[int] | None = None) -> list[Culprit]:
        """Those of these ranks, or of all, that are dead or have left."""
        wanted = self._here.keys() | self._remote.keys() if ranks is None else set(ranks)
        here = [self._gone_here(rank) for rank in self._here if rank in wanted]
        there = [self._lost(rank) for rank in self._remote if rank in wanted]
        return [culprit for culprit in (*here, *there) if culprit is not None]

    def dead(self) -> list[Culprit]:
        """Ranks that ended before they left."""
        return [culprit for culprit in self.gone() if culprit.state not in STATUS.values()]

    def left_elsewhere(self, ranks: Collection[int], timeout_s: float) -> list[Culprit]:
        """Those of these ranks that rank 0 knows to have left; asked for once in a while."""
        there = [peer for rank, peer in self._remote.items() if rank in ranks]
        now = time.monotonic()
        if not there or now - self._census_at < LOOK_S:
            return []
        self._census_at, census = now, self.session.census(min(ANSWER_S, timeout_s))
        return [Culprit(peer, LEFT) for peer in there if self._has_left(census.get(peer.rank), now)]

    def _has_left(self, seen: Any, now: float) -> bool:
        if seen is None:
            return False
        beat_s, rows, note, _, _ = seen
        is_old = now - self._since > NEW_S and beat_s < SILENT_S
        return note == "left" or (is_old and rows is not None and self.key not in rows)

    def missing(self) -> list[int]:
        """Ranks of this node that have not come to the call that this one is in."""
        return [rank for rank in self._here if not self._glimpse(rank)[1]]

    def gone_missing(self) -> list[Culprit]:
        """Those that are waited for and will not come any more."""
        gone = self.gone({*self.missing(), *self._remote})
        awaited = {*self.missing(), *self._remote} if gone else ()  # some came first, and then left
        return [culprit for culprit in gone if culprit.peer.rank in awaited]

    def _gone_here(self, rank: int) -> Culprit | None:
        status, _, calls, name, number, site, ago_s = self._glimpse(rank)
        peer = self._peer(rank)
        last = _last_seen(name, number, site, ago_s) if calls else ""
        process = self._processes.get(rank)
        if rank == self.me.rank:
            return None
        if status != PRESENT:
            return Culprit(peer, STATUS[status], last)
        if process is not None and process.is_dead():
            return Culprit(peer, process.state(), last)
        return None

    def _lost(self, rank: int) -> Culprit | None:
        since = self.session.lost.get(rank)
        if since is None or time.monotonic() - since < GRACE_S:
            return None
        return Culprit(self._remote[rank], "exited, or its connection broke")

    def _glimpse(self, rank: int) -> tuple[int, int, int, str, int, str, float]:
        assert self.board is not None
        return self.board.glimpse(self._here[rank])

    def _peer(self, rank: int) -> Peer:
        return next(peer for peer in self.peers if peer.rank == rank)

    # ---- who is late, and what they do ----

    def calls_here(self) -> dict[int, Call]:
        """The call that each rank of this node is in."""
        return {rank: Call(*self._glimpse(rank)[3:6]) for rank in self._here}

    def stragglers(self, call: Call, census: Mapping[int, Any]) -> list[Culprit]:
        """The ranks that are not in this call, with what they do instead."""
        here = [self._straggler_here(rank, call) for rank in self.missing()]
        there = [self._sight(rank, census, call) for rank in self._remote]
        return [culprit for culprit in (*here, *there) if culprit is not None]

    def _straggler_here(self, rank: int, call: Call) -> Culprit | None:
        if self._glimpse(rank)[3:5] == call[:2]:
            return None  # it waits in this very call, for somebody on another node
        return self._sight_here(rank)

    def near(self, rank: int) -> Culprit | None:
        """A rank that shares memory with this one, and what it does."""
        return self._sight_here(rank) if rank in self._here else None

    def _sight_here(self, rank: int) -> Culprit:
        _, _, calls, name, number, site, ago_s = self._glimpse(rank)
        last = _last_seen(name, number, site, ago_s) if calls else "not seen in any call"
        process = self._processes.get(rank)
        state = process.state() if process else "in this process"
        return Culprit(self._peer(rank), state, last)

    def _sight(self, rank: int, census: Mapping[int, Any], call: Call | None) -> Culprit | None:
        """What rank 0 knows of a rank that shares no memory; None if it is in the call."""
        if not census:
            return self._sight_without_hub(rank)
        if rank not in census:
            return Culprit(self._remote[rank], "never seen by rank 0")
        _, rows, _, _, _ = census[rank]
        beat_s = census[rank][0]
        name, number, site, ago_s = (rows or {}).get(self.key, ("", 0, "", 0.0))
        last = _last_seen(name, number, site, ago_s + beat_s) if number else "not seen in any call"
        state = _state_of(census[rank])
        if state == "running" and call is not None and (name, number) == call[:2]:
            return None
        return Culprit(self._remote[rank], state, last)

    def _sight_without_hub(self, rank: int) -> Culprit | None:
        if rank == 0:
            state = "gone" if self.session.hub_lost_at else "stopped, or its host cut off"
            return Culprit(self._remote[rank], f"it does not answer: {state}")
        if 0 in self._remote:
            return None  # rank 0 is to blame, as far as we can see
        return Culprit(self._remote[rank], "unknown, for rank 0 does not answer")

    def of(self, ranks: Iterable[int], census: Mapping[int, Any]) -> list[Culprit]:
        """What these ranks do, as far as it can be seen."""
        found = [
            self._sight_here(rank) if rank in self._here else self._sight(rank, census, None)
            for rank in ranks
            if rank in self._here or rank in self._remote
        ]
        return [culprit for culprit in found if culprit is not None]

    def table(self, census: Mapping[int, Any], limit: int | None = None) -> str:
        """A line for every rank: where it is and how it does."""
        lines = [str(each) for each in self.of([peer.rank for peer in self.peers], census)]
        cut = [f"and {len(lines) - limit} more"] if limit and len(lines) > limit else []
        return "\n".join(lines[:limit] + cut)


def _state_of(seen: Any) -> str:
    """What rank 0 makes of a rank, in a few words."""
    beat_s, _, note, lost_s, is_cut_off = seen
    if lost_s >= 0:
        return f"exited, or its connection broke, {lost_s:.0f} s ago"
    if note == "left":
        return LEFT
    if beat_s > SILENT_S and is_cut_off:
        return f"its host has not answered rank 0 for {beat_s:.0f} s"
    if beat_s > SILENT_S and not note:
        return f"silent for {beat_s:.0f} s: stopped, or stuck"
    return str(note or "running")


def _last_seen(name: str, number: int, site: str, ago_s: float) -> str:
    ago = f"{ago_s:.1f}" if ago_s < 10 else f"{ago_s:.0f}"
    return f"last seen {ago} s ago in {name} #{number}, {site}"
