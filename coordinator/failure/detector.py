"""Why a call does not end: the verdict on a group, which all its ranks shall hear.

Whoever finds out first writes it where the others look: on the board of its node, and to rank 0
for the other nodes. So all survivors raise soon, and say the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from coordinator._node_shm import Board
from coordinator.call_site import Call, Waiting
from coordinator.control.framing import pack, unpack
from coordinator.control.session import ANSWER_S, Session
from coordinator.errors import KINDS, CoordinatorError, CoordinatorTimeout, PeerLost
from coordinator.failure.peer_monitor import MAX_LINES, Culprit, Sights
from coordinator.peers import Peer

VERDICT_S = 1.5  # how long the reason of a broken connection may take to arrive
LAST_ANSWER_S = 0.2  # for rank 0 to say who is late, where it was not asked before the deadline
MAX_TEXT = 12_000  # of a verdict, which must fit the board
ADVICE = "The group is out of step: end the launch, and look at what those ranks printed last."
SAME_CALLS = (
    "All ranks must make the same calls, with the same src or dst, in the same order: end the "
    "launch, and look where the program goes different ways."
)


class Watch:
    """Looks after the ranks of one group while this one waits for them."""

    def __init__(self, key: str, session: Session, rank: int, peers: Sequence[Peer]) -> None:
        self.key, self.session, self.peers = key, session, peers
        self.me = peers[rank]
        self.sights = Sights(key, session, self.me, peers)
        self._foreseen: tuple[float, Mapping[int, Any]] = (0.0, {})

    def share(self, island: Sequence[int], board: Board) -> None:
        """From now on these places of the group share memory with us."""
        self.sights.share(island, board)

    def close(self) -> None:
        self.sights.close()

    # ---- while waiting ----

    def check(self, waiting: Waiting) -> None:
        """Return if there is still reason to wait; else raise why not."""
        self.check_verdict(waiting)
        gone = self.sights.gone_missing()
        if gone:
            raise self._lost(gone, waiting)
        now = time.monotonic()
        if now >= waiting.deadline:
            late = self.sights.stragglers(waiting.call, self._census(waiting))
            raise self.fail(CoordinatorTimeout, late, waiting)
        if waiting.deadline - now < min(ANSWER_S, waiting.timeout_s / 4):
            self._foresee(waiting)

    def check_verdict(self, waiting: Waiting) -> None:
        """Raise if the group is broken."""
        verdict = self.verdict()
        if verdict is not None:
            raise self._error(verdict, waiting)

    def check_members(
        self,
        ranks: Collection[int],
        waiting: Waiting,
        has_come: Callable[[], bool] = lambda: False,
    ) -> None:
        """Raise if one of these ranks of the launch will not come to what is no call of ours.

        has_come: asked before that: is what they were to do done already?
        """
        verdict = self.verdict()
        gone = self.sights.gone(ranks) or self.sights.left_elsewhere(ranks, waiting.left_s)
        if (verdict is not None or gone) and has_come():
            return
        self.check_verdict(waiting)
        if gone:
            raise self._lost(gone, waiting)

    def check_alive(self, waiting: Waiting) -> None:
        """Raise if a rank has died: one that has left did what it had to do, perhaps."""
        self.check_verdict(waiting)
        dead = self.sights.dead()
        if dead:
            raise self._lost(dead, waiting)

    def _lost(self, gone: Sequence[Culprit], waiting: Waiting) -> CoordinatorError:
        """The error for ranks that are gone, or what they said last: it may still be at rank 0."""
        if any(self.sights.is_remote(culprit.peer.rank) for culprit in gone):
            self.session.refresh(LAST_ANSWER_S)
        verdict = self.verdict()
        if verdict is not None:
            return self._error(verdict, waiting)
        return self.fail(PeerLost, gone, waiting)

    def verdict(self) -> bytes | None:
        board = self.sights.board
        found = board.verdict() if board is not None else None
        return found if found is not None else self.session.verdicts.get(self.key)

    def _foresee(self, waiting: Waiting) -> None:
        """Ask rank 0 who is late before the deadline, since it may not answer."""
        if self.sights.has_remote and self._foreseen[0] != waiting.since:
            self._foreseen = (waiting.since, self.session.census(waiting.left_s))

    def _census(self, waiting: Waiting) -> Mapping[int, Any]:
        if not self.sights.has_remote:
            return {}
        since, census = self._foreseen
        return census if since == waiting.since else self.session.census(LAST_ANSWER_S)

    def broken(self, rank: int, why: str, waiting: Waiting) -> CoordinatorError:
        """The error for a connection to a rank of the group that broke: the reason, if it arrives
        shortly."""
        until = min(time.monotonic() + VERDICT_S, waiting.deadline + ANSWER_S)
        while time.monotonic() < until:
            self.session.refresh(timeout_s=0.5)
            try:
                self.check(waiting)
            except CoordinatorError as error:
                return error
            if self.session.hub_lost_at:
                break  # nobody is left who could tell
            time.sleep(0.05)
        culprit = Culprit(self.peers[rank], f"its connection broke: {why}")
        return self.fail(PeerLost, [culprit], waiting)

    # ---- verdicts ----

    def fail(
        self, kind: type[CoordinatorError], culprits: Sequence[Culprit], waiting: Waiting
    ) -> CoordinatorError:
        """Break the group for a reason; the error for this rank, or that of who was quicker."""
        text = " and ".join(map(str, culprits)) or "a rank that nobody can name"
        ranks = [culprit.peer.rank for culprit in culprits]
        return self._error(self._give(kind, text, ranks, str(waiting.call)), waiting)

    def abandon(self, why: str, where: str) -> None:
        """Break the group because this rank leaves it in the middle."""
        if len(self.peers) > 1:
            tail = why if len(why) < MAX_TEXT else "..." + why[-MAX_TEXT:]
            text = f"{self.me}, which left because of\n{tail}"
            self._give(PeerLost, text, [self.me.rank], where)

    def report_failure(self, peer: Peer, how: str, where: str) -> None:
        """Break the group because one of its ranks, `how` it is, keeps all others waiting."""
        self._give(PeerLost, str(Culprit(peer, how)), [peer.rank], where)

    def _give(self, kind: type[CoordinatorError], text: str, ranks: list[int], where: str) -> bytes:
        text = text.encode(errors="backslashreplace").decode()  # names of files need not be UTF-8
        text = text[:MAX_TEXT] + text[MAX_TEXT:][-1000:]
        mine = pack((kind.__name__, self.me.rank, where, text, ranks[:256]))
        board = self.sights.board
        if board is not None and not board.give_verdict(mine):
            return self.verdict() or mine
        if board is None:
            mine = self.session.verdicts.setdefault(self.key, mine)  # for our other threads
        if self.sights.has_remote:
            self.session.report(self.key, mine)
        return mine

    def _error(self, verdict: bytes, waiting: Waiting) -> CoordinatorError:
        kind, by, where, text, ranks = unpack(verdict)
        self._pass_on(verdict)
        me, call = self.me.rank, waiting.call
        if KINDS[kind] is CoordinatorError:
            return CoordinatorError(
                f"rank {me} was in {call}, but the ranks are in different calls: {text}. "
                f"{SAME_CALLS}"
            )
        if me in ranks and by != me:
            return KINDS[kind](
                f"rank {me} came to {call} when rank {by} had already given up, in {where}, "
                f"waiting for {text}. {ADVICE}"
            )
        found = "" if by == me else f"Rank {by} found it out, in {where}. "
        end = "" if text.endswith("\n") else ". "
        return KINDS[kind](
            f"rank {me} waited {waiting.waited_s:.1f} s in {call} for {text}{end}{found}{ADVICE}"
        )

    def _pass_on(self, verdict: bytes) -> None:
        """What was heard from another node, the ranks of this one shall see at once."""
        board = self.sights.board
        if board is not None and board.verdict() is None:
            board.give_verdict(verdict)

    def in_different_calls(self, waiting: Waiting) -> CoordinatorError:
        """The error when all of this node have come, but to different calls."""
        return self.disagree(self.sights.calls_here(), waiting)

    def disagree(self, calls: Mapping[int, Call], waiting: Waiting) -> CoordinatorError:
        """The error for ranks of the launch that made these calls instead of one."""
        alike: dict[tuple[str, int], list[int]] = {}
        for rank, call in calls.items():
            alike.setdefault(call[:2], []).append(rank)
        said = [f"{self._who(ranks)} in {calls[ranks[0]]}" for ranks in alike.values()]
        text = " and ".join(said)
        if len(alike) == 1:
            text += " with another src or dst"
        return self._error(self._give(CoordinatorError, text, [], str(waiting.call)), waiting)

    def _who(self, ranks: Sequence[int]) -> str:
        first = next(peer for peer in self.peers if peer.rank == ranks[0])
        return f"{first} and {len(ranks) - 1} more" if len(ranks) > 1 else str(first)

    # ---- looking ----

    def described(self, ranks: Collection[int]) -> str:
        """Where these ranks of the launch are, and what they do."""
        census = self.session.census(LAST_ANSWER_S) if self.sights.has_remote else {}
        return " and ".join(map(str, self.sights.of(ranks, census))) or f"ranks {list(ranks)}"

    def named(self, rank: int) -> str:
        """A rank of the launch, and how it does if that is seen from here."""
        found = self.sights.near(rank)
        known = (str(peer) for peer in self.peers if peer.rank == rank)
        return str(found) if found is not None else next(known, f"rank {rank}")

    def table(self, timeout_s: float = ANSWER_S, limit: int | None = None) -> str:
        """A line for every rank: where it is and how it does."""
        census = self.session.census(timeout_s) if self.sights.has_remote else {}
        return self.sights.table(census, limit)

    def short_table(self) -> str:
        """As table(), for an error that is due already."""
        return self.table(LAST_ANSWER_S, MAX_LINES)
