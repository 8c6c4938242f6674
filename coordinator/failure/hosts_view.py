"""Ranks of other hosts for a viewer of this one: rank 0 passes them on while somebody looks.

The viewer asks a rank of its host, as live_view has it. With its heartbeats that rank asks rank 0,
whose answers to the heartbeats of other hosts say for how long somebody looks. The rank that speaks
for its host then looks at all ranks there, as a viewer does, and sends what it sees.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.control.framing import unpack
from coordinator.control.heartbeat import CHECKSUM_NBYTES, NO_ANSWER, OwnRecord, is_whole
from coordinator.control.operations import Op
from coordinator.failure import live_view
from coordinator.failure.rank_view import ENDED, RankLook, ViewedRank, launches, look_at
from coordinator.peers import Peer
from launcher import LaunchInfo, linux

NAME = "drumline-hosts"
STALE_S = 5.0  # what is older says that a rank is not heard of


class HostsView:
    """The part of one rank in this. ask: as Session.ask."""

    def __init__(self, info: LaunchInfo, ask: Callable[..., Any]) -> None:
        self._info, self._ask = info, ask
        self._ranks: Sequence[ViewedRank] = ()
        self._pages: dict[int, bytes] = {}
        self._thread: threading.Thread | None = None
        self._record: OwnRecord | None = None

    def after_beat(self, viewed_s: float, limit_s: float) -> None:
        """Show the ranks of this host for viewers on others, who look for viewed_s more, and those
        of others to a viewer on this one. Blocks for limit_s at most, twice."""
        with contextlib.suppress(*NO_ANSWER, OSError):  # the next heartbeat tries again
            if viewed_s > 0:
                self._show(limit_s)
            else:
                self._ranks = ()
            self._publish(live_view.hosts_wanted_s(os.getpid()), limit_s)

    def _show(self, limit_s: float) -> None:
        """Send what was seen since the last heartbeat, and look again meanwhile."""
        pages, self._pages = self._pages, {}
        if pages:
            self._ask(Op.SHOW, pages, timeout_s=limit_s)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="drumline-view", daemon=True)
            self._thread.start()

    def _look(self) -> None:
        if len(self._ranks) < self._info.local_world_size:
            self._ranks = launches().get(self._info.launch_id, ())
        for rank in self._ranks:
            rank.watch()
        self._pages = {look.peer.rank: look.pack() for look in look_at(self._ranks)}

    def _publish(self, wanted_s: float, limit_s: float) -> None:
        if wanted_s > 0:
            pages = self._ask(Op.LOOK, wanted_s, timeout_s=limit_s)
            self._record = self._record or OwnRecord(NAME)
            self._record.write([time.monotonic(), pages])
        elif self._record is not None:
            self._record.close()
            self._record = None


class OtherHosts:
    """The ranks of a launch on other hosts, through its ranks on this one."""

    def __init__(self, ranks: Sequence[ViewedRank]) -> None:
        self.ranks = ranks
        self._num_silent = 0  # ranks that have not answered in time
        self._answered_at = time.monotonic()
        self._pages: dict[int, Any] = {}

    @property
    def guide(self) -> ViewedRank | None:
        """The rank to ask: another one if the last has not answered; None if all ranks are here."""
        if len(self.ranks) == self.ranks[0].info.world_size:
            return None
        return self.ranks[self._num_silent % len(self.ranks)]

    def looks(self) -> list[RankLook]:
        """Ranks that have been seen so far, as they were then."""
        guide, now = self.guide, time.monotonic()
        if guide is None:
            return []
        answer = _read(guide.peer.pid)
        if answer is not None and answer[0] > self._answered_at:
            self._answered_at, self._pages = answer
        elif now - self._answered_at > STALE_S * (self._num_silent + 1):
            self._num_silent += 1
        age_s = now - self._answered_at
        own = {rank.peer.rank for rank in self.ranks}
        return [_look(n, age_s, *page) for n, page in self._pages.items() if n not in own]


def _read(pid: int) -> tuple[float, dict[int, Any]] | None:
    opened = linux.open_memory(pid, NAME)
    if opened is None:
        return None
    with opened[1] as file:
        data = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
    return tuple(unpack(data[CHECKSUM_NBYTES:])) if data and is_whole(data) else None


def _look(
    rank: int, answer_s: float, page_s: float, page: bytes, process: str, has_ended: bool
) -> RankLook:
    """A rank by the page that it had shown page_s before an answer of answer_s ago, if it had."""
    unseen = RankLook(Peer(rank, 0, 0, process, "", 0, 0), "not seen yet")
    look = RankLook.unpack(page) if page else unseen
    if has_ended:
        return look._replace(state=ENDED)
    silent_s = answer_s + page_s
    is_silent = page and silent_s > STALE_S
    return look._replace(state=f"silent for {silent_s:.0f} s") if is_silent else look
