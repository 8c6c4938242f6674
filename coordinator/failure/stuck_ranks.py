"""Ranks of this node that keep a call waiting: where each is in the program, and deadlocks."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from coordinator.control.membership import SUSPENDED
from coordinator.failure import stack_dump
from coordinator.failure.peer_monitor import ObservedRank
from coordinator.failure.stack_dump import CallNote
from coordinator.peers import Peer

ROOT = Path(__file__).parents[2]
OURS = tuple(f"{ROOT}/{name}/" for name in ("launcher", "coordinator", "communicator", "drumline"))
TORCH = f"{os.sep}torch{os.sep}distributed{os.sep}"
LIBRARIES = (*OURS, "<frozen ", f"{sysconfig.get_path('stdlib')}/")
RECORDER = "launcher/trace/recorder.py"  # between the line of the user and its call
MESSAGES = ("send", "recv")
COLLECTIVES = (
    *("allreduce", "all_reduce", "broadcast", "reduce", "allgather", "all_gather"),
    *("reduce_scatter", "alltoall", "all_to_all", "barrier"),
)
WRAPPERS = 2  # functions of ours or torch's at most, from the user's line to the call's own
MAX_FRAMES, MAX_RANKS = 8, 4  # in an error
TOGETHER = "Let one of them send first, or make them in one `with comm.group():`."
OF_ISEND = " What `isend` has sent, `irecv` receives, not `recv`."
SAME_CALLS = "All ranks must make the same collective calls, and every recv needs its send."


class StuckRank(NamedTuple):
    """A rank as its stack shows it: its call of ours, if it is in one, and the user's line.

    other: for a message, the rank of the launch at its other end; -1 if that is not known.
    frames: of the user's program, the innermost first.
    """

    rank: int
    call: str
    other: int
    where: str
    frames: Sequence[traceback.FrameSummary]

    def __str__(self) -> str:
        end = {"send": f" to rank {self.other}", "recv": f" from rank {self.other}"}
        known_end = end.get(self.call, "") if self.other >= 0 else ""
        return f"rank {self.rank} waits in {self.call}{known_end} ({self.where})"

    def stack(self) -> str:
        """Lines as of a traceback, the innermost frame first."""
        return "".join(
            f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}: {frame.line}\n'
            for frame in self.frames[:MAX_FRAMES]
        )


def from_frames(
    rank: int, frames: Sequence[traceback.FrameSummary], note: CallNote
) -> StuckRank | None:
    """A rank by its stack, the innermost frame first; None without a line of the user."""
    frames = [frame for frame in frames if not frame.filename.endswith(RECORDER)]
    user = next((i for i, frame in enumerate(frames) if not _is_library(frame.filename)), None)
    if user is None:
        return None
    where = f"{frames[user].filename.rpartition('/')[2]}:{frames[user].lineno}"
    call = _call_in(frames[max(user - WRAPPERS, 0) : user])
    if user == 0 and note.is_in_allreduce:
        call = "allreduce"
    own = [frame for frame in frames[user:] if not _is_library(frame.filename)]
    return StuckRank(rank, call, note.peer if call in MESSAGES else -1, where, own)


def is_waiting(frames: Sequence[traceback.FrameSummary], call: str) -> bool:
    """True for a rank in a call for others. frames: of its stack; call: as from_frames names it."""
    files = (frame.filename for frame in frames)
    # A Coordinator waits at a connection, which is the launcher's.
    innermost = next((name for name in files if not name.startswith(OURS[0])), "")
    return bool(call) or innermost.startswith(OURS[1:3]) or TORCH in innermost


def _call_in(frames: Sequence[traceback.FrameSummary]) -> str:
    """The call of ours or torch's that the frames are in, the outermost; "" if there is none."""
    names = [f.name for f in frames if f.filename.startswith(OURS) or TORCH in f.filename]
    return next((name for name in reversed(names) if name in (*MESSAGES, *COLLECTIVES)), "")


def _is_library(filename: str) -> bool:
    """True for a file of drumline, or of a library that it or the program calls."""
    return filename.startswith(LIBRARIES) or "/site-packages/" in filename


class PeerStacks:
    """The stacks of the ranks of a group that are other processes of this host."""

    def __init__(self, me: Peer, peers: Sequence[Peer]) -> None:
        self._me = me
        self._peers = {peer.rank: peer for peer in peers if peer.pid != me.pid}

    def describe(self, late: Sequence[ObservedRank], wait_s: float) -> str:
        """The stacks of late ranks, for an error; waits for them at most so long."""
        deadline = time.monotonic() + wait_s
        awake = [rank.peer.rank for rank in late if rank.state != SUSPENDED][:MAX_RANKS]
        looks = [self._look_at(rank, deadline) for rank in awake]
        stacks = [f"rank {stuck.rank} is here:\n{stuck.stack()}" for stuck in looks if stuck]
        return "".join(["; ", *stacks]) if stacks else ""

    def describe_late(
        self, note: CallNote, describe_rank: Callable[[int], str], wait_s: float
    ) -> str:
        """The ranks that keep the calling thread waiting, as far as their stacks can be seen.

        note: of this process. describe_rank: its host, pid, last call and state.
        """
        frames = traceback.extract_stack(sys._getframe(2))[::-1]  # from who asked the Coordinator
        me = from_frames(self._me.rank, frames, note)
        deadline = time.monotonic() + wait_s
        look = functools.cache(lambda rank: self._look_at(rank, deadline))
        return "" if me is None else describe(me, look, [*self._peers], describe_rank)

    def _look_at(self, rank: int, deadline: float) -> StuckRank | None:
        """A rank of the launch; None if it does not show its stacks."""
        if rank not in self._peers:
            return None
        left_s = max(deadline - time.monotonic(), 0.0)
        note, text = stack_dump.read(self._peers[rank], left_s)
        return from_frames(rank, stack_dump.parse(text), note)


def describe(
    me: StuckRank,
    look: Callable[[int], StuckRank | None],
    others: Sequence[int],
    describe_rank: Callable[[int], str],
) -> str:
    """The deadlock that this rank is in; without one, where the ranks are that are not in its call.

    look: for a rank of the launch.
    """
    chain, last, is_seen = [me], me, True
    while last.call in MESSAGES and last.other not in (-1, *(stuck.rank for stuck in chain)):
        next_rank = look(last.other)
        if next_rank is None:  # of another node, perhaps, and at work
            is_seen = False
            break
        chain.append(next_rank)
        last = next_rank
    if len(chain) > 1 and last.call and is_seen:
        waits = ", and ".join(map(str, chain))
        if last.call not in MESSAGES or last.other < 0:
            return f"Deadlock: {waits}. {SAME_CALLS}"
        hint = OF_ISEND * all(stuck.call == "recv" for stuck in chain)
        return f"Deadlock: {waits}. {TOGETHER}{hint}"
    if len(chain) > 1:
        return _describe_late(chain[1:], describe_rank)
    late = [stuck for rank in others if (stuck := look(rank)) and stuck.call != me.call]
    in_messages = [stuck for stuck in late if stuck.call in MESSAGES]
    if me.call in COLLECTIVES and in_messages:
        return f"Deadlock: {', and '.join(map(str, [me, *in_messages]))}. {SAME_CALLS}"
    return _describe_late(late, describe_rank)


def _describe_late(late: Sequence[StuckRank], describe_rank: Callable[[int], str]) -> str:
    texts = [f"{describe_rank(stuck.rank)} is here:\n{stuck.stack()}" for stuck in late[:MAX_RANKS]]
    return "".join(texts)
