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
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import FileIO
from traceback import FrameSummary
from types import MappingProxyType
from typing import NamedTuple

from coordinator.call_site import CallSite
from coordinator.control.framing import pack, unpack
from coordinator.control.membership import SUSPENDED
from coordinator.failure import live_view, stack_dump, stuck_ranks
from coordinator.failure.peer_monitor import RUNNING
from coordinator.failure.stuck_ranks import MAX_FRAMES, MAX_RANKS, StuckRank
from coordinator.peers import Peer, boot_id, start_ticks
from launcher import LaunchInfo, gpus, linux

ENDED = "ended"
FRESH_S = 4 * live_view.COUNT_S  # counts that are younger come from a thread that runs
WATCH_S = 5.0  # after its last request, a viewer counts as gone
STACK_WAIT_S = 0.5  # for a process to dump its stack
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class RankLook(NamedTuple):
    """A rank at one moment.

    stuck: where its stack shows it; None if it shows none. waits: in a call, for others.
    pending: the Coordinator's call that it is in, for pending_s. counts: calls, bytes and tokens of
    each operation, at counted_at. cpu_s: of all its threads, at looked_at. device_nbytes: of GPUs.
    """

    peer: Peer
    state: str
    stuck: StuckRank | None = None
    waits: bool = False
    pending: CallSite | None = None
    pending_s: float = 0.0
    counts: Mapping[str, Sequence[int]] = MappingProxyType({})
    counted_at: float = 0.0
    resident_nbytes: int = 0
    cpu_s: float = 0.0
    looked_at: float = 0.0
    device_nbytes: int = 0

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    def pack(self) -> bytes:
        stuck = self.stuck and [
            *self.stuck[:-1],
            [(f.filename, f.lineno, f.name, f.line) for f in self.stuck.frames[:MAX_FRAMES]],
        ]
        return pack([[*vars(self.peer).values()], self.state, stuck, *self[3:]])

    @classmethod
    def unpack(cls, data: bytes) -> RankLook:
        peer, state, stuck, waits, pending, *rest = unpack(data)
        if stuck is not None:
            *fields, frames = stuck
            lines = [FrameSummary(*frame[:3], line=frame[3]) for frame in frames]
            stuck = StuckRank._make([*fields, lines])
        call = CallSite(*pending) if pending is not None else None
        return cls(Peer(*peer), state, stuck, waits, call, *rest)

    def __str__(self) -> str:
        call = "" if self.pending is None else f", {self.pending_s:.1f} s in {self.pending}"
        return f"{self.peer}: {self.state}{call}\n{self.stuck.stack() if self.stuck else ''}"


class ViewedRank:
    """A rank of this host that a viewer looks at. fd: in its process, of its memory for stacks."""

    def __init__(self, pid: int, fd: int, memory: FileIO) -> None:
        self._file = memory
        self._num_read = stack_dump.HEADER_NBYTES  # bytes of dumps that nobody waits for any longer
        shown_pid, packed_info = live_view.read_line(self._file.fileno(), live_view.INFO_PAGE)
        if shown_pid != pid:
            raise ValueError("a child of a rank that has inherited the descriptor")
        self.info = info = LaunchInfo.from_bytes(packed_info.encode())
        ranks = (info.rank, info.local_rank, info.local_world_size)
        started = start_ticks(pid) or 0
        self.peer = Peer(*ranks, socket.gethostname(), boot_id(), pid, started, stack_fd=fd)

    def watch(self, folder: str = "", is_for_hosts: bool = False) -> None:
        """Have it count its calls for WATCH_S more, record them if a folder is given, and ask for
        the ranks of other hosts if it is for them."""
        request = [folder, time.monotonic() + WATCH_S, is_for_hosts]
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
        used = _memory_and_processor(peer.pid)
        place = peer, state, stuck, waits, call, pending_s
        return RankLook(*place, counts, counted_at, *used, time.monotonic())

    def _state(self) -> str:
        stat = linux.process_stat(self.peer.pid)
        if stat is None or self.peer.is_known_dead():
            return ENDED
        return SUSPENDED if stat.is_stopped else RUNNING


def look_at(
    ranks: Sequence[ViewedRank], each: Callable[..., Iterable[RankLook]] = map
) -> list[RankLook]:
    """All of them as they are now. each: a map, which may look at several at once."""
    device_nbytes = gpus.used_nbytes()
    return [
        look._replace(device_nbytes=device_nbytes.get(look.peer.pid, 0))
        for look in each(ViewedRank.look, ranks)
    ]


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


def describe_unseen(looks: Sequence[RankLook], world_size: int) -> str:
    """The ranks of a launch that show nothing, with those processes that are known; "" if none."""
    stats = linux.processes()
    launcher_pid = stats[looks[0].peer.pid].parent if looks[0].peer.pid in stats else -1
    children = [pid for pid, stat in stats.items() if stat.parent == launcher_pid]
    pids = {linux.process_name(pid): f" (pid {pid})" for pid in children}
    seen = {look.peer.rank for look in looks}
    unseen = [f"{n}{pids.get(f'rank {n}', '')}" for n in range(world_size) if n not in seen]
    names = ", ".join(unseen[:MAX_RANKS]) + ", ..." * (len(unseen) > MAX_RANKS)
    reasons = "No Coordinator yet, a thread of a rank's process, or its host does not answer."
    return names and f"Not seen: rank {names}. {reasons}"


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
    num_pages, *ticks = map(linux.kernel_number, (*(pages[1:2] or "0"), *times[11:13]))
    return num_pages * resource.getpagesize(), sum(ticks) / TICKS_PER_S
