"""Who is missing when a call does not end, and what is known of them.

Whoever finds out first writes the verdict where the others look: on the board of its node, and to
rank 0 for the other nodes. So all survivors raise soon, and say the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coordinator._board import Board
from coordinator.calls import Call
from coordinator.errors import KINDS, CoordinatorError, CoordinatorTimeout, PeerLost
from coordinator.peers import Peer
from coordinator.session import Session
from coordinator.vitals import Process
from coordinator.wire import pack, unpack

PRESENT, CLOSED, FORGOTTEN = 0, 1, 2  # status of a rank on the board
STATUS = {CLOSED: "closed its Coordinator", FORGOTTEN: "dropped its Coordinator without close()"}
GRACE_S = 0.5  # what a lost rank had sent may still be on its way
VERDICT_S = 1.5  # how long the reason of a broken connection may take to arrive
SILENT_S = 2.5  # without a beat
MAX_TEXT = 12_000  # of a verdict, which must fit the board
ADVICE = "The group is out of step: end the launch, and look at what those ranks printed last."

SAME_CALLS = (
    "All ranks must make the same calls, with the same src or dst, in the same order: end the "
    "launch, and look where the program goes different ways."
)


class Waiting(NamedTuple):
    """A call that this rank is in."""

    call: Call
    since: float
    timeout_s: float

    @property
    def deadline(self) -> float:
        return self.since + self.timeout_s


class Culprit(NamedTuple):
    rank: int
    state: str  # what it does instead, in a few words
    last: str = ""  # where it was seen, and when

    def describe(self, peers: Sequence[Peer]) -> str:
        peer = peers[self.rank]
        facts = [f"host {peer.host}", f"pid {peer.pid}", self.last, self.state]
        return f"rank {self.rank} ({', '.join(fact for fact in facts if fact)})"


class Watch:
    """Looks after the ranks of one group while this one waits for them."""

    def __init__(self, key: str, session: Session, rank: int, peers: Sequence[Peer]) -> None:
        self.key, self.session, self.rank, self.peers = key, session, rank, peers
        self.island: Sequence[int] = [rank]
        self.board: Board | None = None
        self._processes: dict[int, Process] = {}
        self._remote = {peer.rank: rank for rank, peer in enumerate(peers)}

    def share(self, island: Sequence[int], board: Board) -> None:
        """From now on these ranks share memory with us."""
        self.island, self.board = island, board
        others = [self.peers[rank] for rank in island if self.peers[rank].pid != self._me.pid]
        self._processes = {self._remote[peer.rank]: Process(peer) for peer in others}
        self._remote = {
            peer.rank: rank for rank, peer in enumerate(self.peers) if rank not in island
        }

    @property
    def _me(self) -> Peer:
        return self.peers[self.rank]

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    # ---- while waiting ----

    def check(self, waiting: Waiting) -> None:
        """Return if there is still reason to wait; else raise why not."""
        verdict = self.verdict()
        if verdict is not None:
            raise self._error(verdict, waiting)
        gone = self._gone_here() + self._gone_elsewhere()
        if gone:
            raise self.fail(PeerLost, gone, waiting)
        if time.monotonic() >= waiting.deadline:
            raise self.fail(CoordinatorTimeout, self.stragglers(waiting.call), waiting)

    def check_members(self, launch_ranks: Sequence[int], waiting: Waiting) -> None:
        """Raise if one of them will not come to what is no call of this group."""
        verdict = self.verdict()
        if verdict is not None:
            raise self._error(verdict, waiting)
        gone = [
            culprit
            for culprit in self._gone_here(everybody=True) + self._gone_elsewhere()
            if self.peers[culprit.rank].rank in launch_ranks
        ]
        if gone:
            raise self.fail(PeerLost, gone, waiting)

    def verdict(self) -> bytes | None:
        found = self.board.verdict() if self.board is not None else None
        return found if found is not None else self.session.verdicts.get(self.key)

    def _gone_here(self, everybody: bool = False) -> list[Culprit]:
        """Ranks of this node that will not come any more, of those waited for or of everybody."""
        found = []
        for index, rank in self._others_here() if everybody else self._missing_here():
            status, _, calls, name, number, site, ago_s = self._glimpse(index)
            last = _last_seen(name, number, site, ago_s) if calls else ""
            process = self._processes.get(rank)
            if status != PRESENT:
                found.append(Culprit(rank, STATUS[status], last))
            elif process is not None and process.is_dead():
                found.append(Culprit(rank, process.state(), last))
        return found

    def _others_here(self) -> list[tuple[int, int]]:
        """Places on the board and ranks, but our own."""
        there = enumerate(self.island) if self.board is not None else ()
        return [(index, rank) for index, rank in there if rank != self.rank]

    def _missing_here(self) -> list[tuple[int, int]]:
        return [(index, rank) for index, rank in self._others_here() if not self._glimpse(index)[1]]

    def _glimpse(self, index: int) -> tuple[int, int, int, str, int, str, float]:
        assert self.board is not None
        return self.board.glimpse(index)

    def _gone_elsewhere(self) -> list[Culprit]:
        now = time.monotonic()
        return [
            Culprit(self._remote[rank], "exited, or its connection broke")
            for rank, since in list(self.session.lost.items())
            if rank in self._remote and now - since > GRACE_S
        ]

    def broken(self, rank: int, why: str, waiting: Waiting) -> CoordinatorError:
        """The error for a connection to rank that broke: the reason, if it arrives shortly."""
        until = time.monotonic() + VERDICT_S
        while time.monotonic() < until:
            self.session.refresh(timeout_s=0.5)
            try:
                self.check(waiting)
            except CoordinatorError as error:
                return error
            if self.session.hub_lost_at:
                break  # nobody is left who could tell
            time.sleep(0.05)
        return self.fail(PeerLost, [Culprit(rank, f"its connection broke: {why}")], waiting)

    # ---- verdicts ----

    def fail(
        self, kind: type[CoordinatorError], culprits: Sequence[Culprit], waiting: Waiting
    ) -> CoordinatorError:
        """Break the group for a reason; the error for this rank, or that of who was quicker."""
        text = " and ".join(culprit.describe(self.peers) for culprit in culprits)
        text = text or "a rank that nobody can name"
        ranks = [culprit.rank for culprit in culprits]
        return self._error(self._give(kind, text, ranks, str(waiting.call)), waiting)

    def abandon(self, why: str, where: str) -> None:
        """Break the group because this rank leaves it in the middle."""
        if len(self.peers) > 1:
            tail = why if len(why) < MAX_TEXT else "..." + why[-MAX_TEXT:]
            text = f"{self._me}, which left because of\n{tail}"
            self._give(PeerLost, text, [self.rank], where)

    def _give(self, kind: type[CoordinatorError], text: str, ranks: list[int], where: str) -> bytes:
        text = text[:MAX_TEXT] + text[MAX_TEXT:][-1000:]
        mine = pack((kind.__name__, self.rank, where, text, ranks[:256]))
        if self.board is not None and not self.board.give_verdict(mine):
            return self.verdict() or mine
        if len(self.island) < len(self.peers):
            self.session.report(self.key, mine)
        return mine

    def _error(self, verdict: bytes, waiting: Waiting) -> CoordinatorError:
        kind, by, where, text, ranks = unpack(verdict)
        self._pass_on(verdict)
        waited_s = time.monotonic() - waiting.since
        if KINDS[kind] is CoordinatorError:
            message = (
                f"rank {self.rank} was in {waiting.call}, but the ranks are in different calls: "
                f"{text}. {SAME_CALLS}"
            )
        elif self.rank in ranks and by != self.rank:
            message = (
                f"rank {self.rank} came to {waiting.call} when rank {by} had already given up, "
                f"in {where}, waiting for {text}. {ADVICE}"
            )
        else:
            found = f" (found by rank {by} in {where})" if by != self.rank else ""
            message = f"rank {self.rank} waited {waited_s:.1f} s in {waiting.call} for {text}"
            message += f".{found} {ADVICE}" if not text.endswith("\n") else f"{found}{ADVICE}"
        return KINDS[kind](message)

    def _pass_on(self, verdict: bytes) -> None:
        """What was heard from another node, the ranks of this one shall see at once."""
        if self.board is not None and self.board.verdict() is None:
            self.board.give_verdict(verdict)

    # ---- who is late, and what they do ----

    def in_different_calls(self, waiting: Waiting) -> CoordinatorError:
        """The error when all of this node have come, but to different calls."""
        seen = [self._glimpse(index) for index in range(len(self.island))]
        calls = {rank: Call(*row[3:6]) for rank, row in zip(self.island, seen, strict=True)}
        return self.disagree(calls, waiting)

    def disagree(self, calls: Mapping[int, Call], waiting: Waiting) -> CoordinatorError:
        """The error for ranks that made these calls instead of one."""
        alike: dict[tuple[str, int], list[int]] = {}
        for rank, call in calls.items():
            alike.setdefault(call[:2], []).append(rank)
        said = [f"{self._who(ranks)} in {calls[ranks[0]]}" for ranks in alike.values()]
        text = " and ".join(said)
        if len(alike) == 1:
            text += " with another src or dst"
        return self._error(self._give(CoordinatorError, text, [], str(waiting.call)), waiting)

    def _who(self, ranks: Sequence[int]) -> str:
        others = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
        return f"{self.peers[ranks[0]]}{others}"

    def stragglers(self, call: Call) -> list[Culprit]:
        """The ranks that are not in this call, with what they do instead."""
        here = [self._straggler_here(index, rank, call) for index, rank in self._missing_here()]
        found = [culprit for culprit in here if culprit is not None]
        return found + self._stragglers_elsewhere(call)

    def _straggler_here(self, index: int, rank: int, call: Call) -> Culprit | None:
        _, _, calls, name, number, site, ago_s = self._glimpse(index)
        if (name, number) == call[:2]:
            return None  # it waits in this very call, for somebody on another node
        last = _last_seen(name, number, site, ago_s) if calls else "not seen in any call"
        process = self._processes.get(rank)
        return Culprit(rank, process.state() if process else "a thread of this process", last)

    def _stragglers_elsewhere(self, call: Call) -> list[Culprit]:
        if not self._remote:
            return []
        census = self.session.census()
        if not census:
            return self._silent_hub()
        found = [self._sight(rank, census.get(rank), call) for rank in self._remote]
        return [culprit for culprit in found if culprit is not None]

    def _sight(self, launch_rank: int, seen: Any, call: Call | None) -> Culprit | None:
        """What rank 0 knows of a rank on another node; None if it is in the call."""
        rank = self._remote[launch_rank]
        if seen is None:
            return Culprit(rank, "never seen by rank 0")
        beat_s, rows, note, lost_s, is_cut_off = seen
        name, number, site, ago_s = (rows or {}).get(self.key, ("", 0, "", 0.0))
        last = _last_seen(name, number, site, ago_s + beat_s) if number else "not seen in any call"
        if lost_s >= 0:
            return Culprit(rank, f"exited, or its connection broke, {lost_s:.0f} s ago", last)
        if beat_s > SILENT_S and is_cut_off:
            return Culprit(rank, f"its host has not answered rank 0 for {beat_s:.0f} s", last)
        if beat_s > SILENT_S and note:
            return Culprit(rank, note, last)
        if beat_s > SILENT_S:
            return Culprit(rank, f"silent for {beat_s:.0f} s: stopped, or stuck", last)
        if call is not None and number == call.number and name == call.name:
            return None
        return Culprit(rank, note or "running", last)

    def _silent_hub(self) -> list[Culprit]:
        for launch_rank, rank in self._remote.items():
            if launch_rank == 0:
                state = "gone" if self.session.hub_lost_at else "stopped, or its host cut off"
                return [Culprit(rank, f"it does not answer: {state}")]
        return []

    def table(self) -> str:
        """A line for every rank: where it is and how it does."""
        census = self.session.census() if self._remote else {}
        lines = []
        for index, rank in enumerate(self.island):
            if self.board is not None:
                _, _, calls, name, number, site, ago_s = self._glimpse(index)
                last = _last_seen(name, number, site, ago_s) if calls else "not seen in any call"
                process = self._processes.get(rank)
                state = process.state() if process else "in this process"
                lines.append(Culprit(rank, state, last).describe(self.peers))
        for launch_rank in self._remote:
            if launch_rank != self._me.rank:
                sight = self._sight(launch_rank, census.get(launch_rank), None)
                lines.append(sight.describe(self.peers) if sight else f"rank {launch_rank}")
        return "\n".join(lines or [Culprit(self.rank, "alone").describe(self.peers)])


def _last_seen(name: str, number: int, site: str, ago_s: float) -> str:
    ago = f"{ago_s:.1f}" if ago_s < 10 else f"{ago_s:.0f}"
    return f"last seen {ago} s ago in {name} #{number}, {site}"
