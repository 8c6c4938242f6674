"""The ranks of this host as a viewer outside their launch sees them.

for ranks in launches().values():
    looks = [rank.look() for rank in ranks]

Only processes of the same user can be seen so: the kernel opens their descriptors to no other.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from typing import NamedTuple

from coordinator.call_site import CallSite
from coordinator.control.membership import SUSPENDED
from coordinator.failure import live_view, stack_dump, stuck_ranks
from coordinator.failure.peer_monitor import RUNNING
from coordinator.failure.stuck_ranks import StuckRank
from coordinator.peers import Peer, boot_id, start_ticks
from launcher import LaunchInfo, linux

ENDED = "ended"
FRESH_S = 4 * live_view.COUNT_S  # counts that are younger come from a thread that runs
WATCH_S = 5.0  # after its last request, a viewer counts as gone
STACK_WAIT_S = 0.5  # for a process to dump its stack
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class RankLook(NamedTuple):
    """A rank at one moment.

    stuck: where its stack shows it; None if it shows none. waits: in a call, for others.
    pending: the Coordinator's call that it is in, for pending_s. counts: calls, bytes and tokens of
    each operation, at counted_at. cpu_s: of all its threads.
    """

    peer: Peer
    state: str
    stuck: StuckRank | None
    waits: bool
    pending: CallSite | None
    pending_s: float
    counts: Mapping[str, Sequence[int]]
    counted_at: float
    resident_nbytes: int
    cpu_s: float

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    def __str__(self) -> str:
        call = "" if self.pending is None else f", {self.pending_s:.1f} s in {self.pending}"
        return f"{self.peer}: {self.state}{call}\n{self.stuck.stack() if self.stuck else ''}"


class ViewedRank:
    """A rank of this host that a viewer looks at. fd: in its process, of its memory for stacks."""

    def __init__(self, pid: int, fd: int, memory: FileIO) -> None:
        self._file = memory
        self._num_read = stack_dump.HEADER_NBYTES  # bytes of dumps that nobody waits for any more
        shown_pid, packed_info = live_view.read_line(self._file.fileno(), live_view.INFO_PAGE)
        if shown_pid != pid:
            raise ValueError("a child of a rank that has inherited the descriptor")
        self.info = info = LaunchInfo.from_bytes(packed_info.encode())
        ranks = (info.rank, info.local_rank, info.local_world_size)
        started = start_ticks(pid) or 0
        self.peer = Peer(*ranks, socket.gethostname(), boot_id(), pid, started, stack_fd=fd)

    def watch(self, folder: str = "") -> None:
        """Have it count its calls for WATCH_S more, and record them if a folder is given."""
        request = [folder, time.monotonic() + WATCH_S]
        live_view.write_line(self._file.fileno(), live_view.REQUEST_PAGE, request)
        page = live_view.read_line(self._file.fileno(), live_view.COUNTS_PAGE)
        if page and time.monotonic() - page[0] < FRESH_S:
            return
        if not self.peer.is_known_dead() and linux.catches_signal(
            self.peer.pid, live_view.VIEW_SIGNAL
        ):
            linux.send_signal(self.peer.pid, live_view.VIEW_SIGNAL)

    def look(self) -> RankLook:
        """The rank as it is now; waits for its stack at most STACK_WAIT_S."""
        peer, state = self.peer, self._state()
        note, text = stack_dump.CallNote(), ""
        if state == RUNNING:
            note, text = stack_dump.read(peer, STACK_WAIT_S)
        linux.free_pages(self._file.fileno(), stack_dump.HEADER_NBYTES, self._num_read)
        self._num_read = os.fstat(self._file.fileno()).st_size
        frames = stack_dump.parse(text)
        stuck = stuck_ranks.from_frames(peer.rank, frames, note)
        if stuck is None and frames:  # a program of ours alone, such as `drumline serve`
            stuck = StuckRank(peer.rank, "", -1, frames[0].name, frames)
        waits = stuck_ranks.is_waiting(frames, stuck.call if stuck is not None else "")
        page = live_view.read_line(self._file.fileno(), live_view.COUNTS_PAGE)
        counted_at, counts, pending = page or (0.0, {}, [])
        since = pending.pop() if pending else 0.0
        call = CallSite(*pending) if pending else None
        pending_s = time.monotonic() - since if pending else 0.0
        nbytes, cpu_s = _memory_and_processor(peer.pid)
        return RankLook(
            peer, state, stuck, waits, call, pending_s, counts, counted_at, nbytes, cpu_s
        )

    def _state(self) -> str:
        stat = linux.process_stat(self.peer.pid)
        if stat is None or self.peer.is_known_dead():
            return ENDED
        return SUSPENDED if stat.is_stopped else RUNNING


def launches() -> dict[str, list[ViewedRank]]:
    """The ranks of every launch of this user on this host, by launch id, in order."""
    ranks = filter(None, map(_rank_of, linux.processes()))
    result: dict[str, list[ViewedRank]] = {}
    for rank in sorted(ranks, key=lambda rank: rank.peer.rank):
        result.setdefault(rank.info.launch_id, []).append(rank)
    return result


def describe_deadlock(looks: Sequence[RankLook]) -> str:
    """The deadlock that ranks are in if all of them wait; "" if there is none."""
    stuck = {look.peer.rank: look.stuck for look in looks if look.stuck is not None and look.waits}
    if len(stuck) < len(looks):
        return ""
    texts = (stuck_ranks.describe(me, stuck.get, [*stuck], str) for me in stuck.values())
    return next((text for text in texts if text.startswith("Deadlock")), "")


def _rank_of(pid: int) -> ViewedRank | None:
    """The rank that a process is, if it is one and can be seen."""
    opened = linux.open_memory(pid, stack_dump.NAME)
    try:
        return None if opened is None else ViewedRank(pid, *opened)
    except (TypeError, ValueError):  # it has not said yet who it is, or it is a child of a rank
        return None


def _memory_and_processor(pid: int) -> tuple[int, float]:
    """Resident bytes, and seconds of processor time; 0 for a process that has ended."""
    pages = linux.read_proc(f"{pid}/statm").split()
    times = linux.read_proc(f"{pid}/stat").rpartition(")")[2].split()
    nbytes = int(pages[1]) * resource.getpagesize() if pages else 0
    return nbytes, (int(times[11]) + int(times[12])) / TICKS_PER_S if times else 0.0
