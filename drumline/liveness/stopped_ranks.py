"""Notices a rank that is stopped: it neither dies nor answers, so nobody else would.

Whoever waits for a message is asleep in the Communicator. So each rank has a thread that looks
around now and then: whether a rank of this host is stopped, and whether those of other hosts still
say that they are there. The master decides, while it waits; all others give up when it does. Where
any rank may keep all others waiting, the master too, each decides by what it sees on its own host.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError

import communicator
import coordinator
from drumline.errors import PeerLost

LOOK_S = 0.5
STOPPED_S = 1.0
"""So long at least a process must have been stopped: a debugger lets it go on before. It may have
been well until a moment before it was first seen stopped."""

SILENT_S = 3.0
LOADING_S = 10.0
"""How long ranks of other hosts wait for an answer of rank 0 while a model is loaded: starting on
all GPUs may keep it from all else for seconds. It names a silent one of them after SILENT_S even
then, for the master's call is to raise within 5 s."""

NEAR_END_S, FAR_END_S, END_LOOK_S = 5.0, 1.0, 0.02
VERDICT = "verdict"


@contextlib.contextmanager
def on_lookout(coor: Any, holds: Callable[[int], str]) -> Iterator[None]:
    """Within this block, a rank that dies or is stopped is PeerLost on every rank. Collective.

    holds: what a rank has of the model, in words, as far as that is known by then.
    """
    over = threading.Event()
    if spans_processes(coor):
        store = coor.store("inference loading", timeout_s=LOADING_S)
        out = Lookout(
            coor,
            store,
            lambda: True,
            coor.report_failure,
            over,
            is_mutual=True,
            patience_s=LOADING_S,
        )
        out.start()
    try:
        yield
    except (coordinator.PeerLost, communicator.PeerLost) as error:
        why = str(_verdict(coor) or error)
        named = [rank for rank, peer in enumerate(coor.peers) if str(peer).removesuffix(")") in why]
        lost = "".join(f" Rank {rank} was to hold {holds(rank)}." for rank in named if holds(rank))
        raise PeerLost(f"{why}{lost}") from error
    finally:
        over.set()


def _verdict(coor: Any) -> coordinator.CoordinatorError | None:
    """What broke the group, of which others may hear by a connection that was closed."""
    try:
        coor.check()
    except coordinator.CoordinatorError as error:
        return error
    return None


def outlast_master(coor: Any, code: int) -> None:
    """Let a master that ends with a failure end first, so that this is taken for the cause.

    coor: may be closed already. A master that is not seen from here is given some time.
    """
    master = coor.peers[0]
    is_near = _shares_host(master, coor.peers[coor.rank]) and master.pid != os.getpid()
    until = time.monotonic() + (NEAR_END_S if is_near else FAR_END_S) * bool(code)
    while time.monotonic() < until and not (is_near and _state(master.pid) in "ZX"):
        time.sleep(END_LOOK_S)


def spans_processes(coor: Any) -> bool:
    """Whether one rank can be stopped without the others: they are not all threads of one."""
    return len({process_of(peer) for peer in coor.peers}) > 1


def process_of(peer: Any) -> tuple[str, str, str, int]:
    """The same for ranks that are threads of one process; containers may count pids alike."""
    return peer.host, peer.boot_id, peer.memory, peer.pid


class Lookout(threading.Thread):
    """Looks after the ranks for one of them until `over` is set.

    waits: whether this rank waits for the others now. give_up: what ends that waiting, given the
        rank that is at fault and how it is. is_mutual: whether ranks wait for the master too, so
        that each looks at those of its own host, and at whether the store answers.
    patience_s: the timeout of the store, which rank 0 keeps.
    """

    def __init__(
        self,
        coor: Any,
        store: Any,
        waits: Callable[[], bool],
        give_up: Callable[[int, str], None],
        over: threading.Event | None = None,
        *,
        is_mutual: bool = False,
        patience_s: float = SILENT_S,
    ):
        super().__init__(name="drumline-lookout", daemon=True)
        self.coor, self.store, self.waits, self.give_up = coor, store, waits, give_up
        self.me = coor.peers[coor.rank]
        self.over = over or threading.Event()
        others = [rank for rank in range(coor.world_size) if rank != coor.rank]
        near = [rank for rank in others if _shares_host(self.me, coor.peers[rank])]
        self.watched = others if coor.rank == 0 else near if is_mutual else []
        self.is_mutual, self.sees_all = is_mutual, is_mutual and near == others
        self.patience_s = patience_s
        self.fine_at = dict.fromkeys(others, time.monotonic())
        self.beats: dict[int, bytes] = {}

    def run(self) -> None:
        number, looked_at = 0, time.monotonic()
        with contextlib.suppress(DistNetworkError, DistStoreError):
            self._beat(number)  # for whoever is not heard of is not missed either
        while not self.over.wait(LOOK_S):
            number += 1
            now, before = time.monotonic(), looked_at
            looked_at = now
            if now - before > LOOK_S + STOPPED_S:  # this one was stopped, perhaps all were
                self.fine_at = dict.fromkeys(self.fine_at, now)
            try:
                verdict = self._look(number)
            except (DistNetworkError, DistStoreError) as error:
                verdict = self._without_answer(error, time.monotonic() - now)
            if verdict is not None:
                if not self.over.is_set():  # the store may have gone with the group
                    self.give_up(*verdict)
                return

    def _look(self, number: int) -> tuple[int, str] | None:
        """The rank that stops all others, and how it is."""
        now = time.monotonic()
        for rank in self.watched:
            how = self._trouble(rank, now)
            if how and self.waits():
                if self.coor.rank == 0 and not self.sees_all:
                    self.store.set(VERDICT, f"{rank} {how}")
                return rank, how
        if self.coor.rank == 0 or self.sees_all:
            return None
        self._beat(number)
        return self._verdict()

    def _beat(self, number: int) -> None:
        """Say that this rank is there, if the master cannot see it."""
        if not _shares_host(self.me, self.coor.peers[0]):
            self.store.set(f"beat {self.coor.rank}", str(number))

    def _without_answer(self, error: Exception, for_s: float) -> tuple[int, str] | None:
        """What it means that the store failed, which rank 0 keeps."""
        if self.coor.rank == 0:
            return None
        if not isinstance(error, TimeoutError):
            return 0, "is gone"
        was_stopped_itself = for_s > self.patience_s + STOPPED_S
        if not self.is_mutual or was_stopped_itself or not self.waits():
            return None
        return 0, _silent(for_s)

    def _verdict(self) -> tuple[int, str] | None:
        if not self.store.check([VERDICT]):
            return None
        rank, how = self.store.get(VERDICT).decode().split(" ", 1)
        return (int(rank), how) if int(rank) != self.coor.rank else None

    def _trouble(self, rank: int, now: float) -> str:
        """How a rank is that has not been well for some time; nothing else."""
        peer = self.coor.peers[rank]
        is_near = _shares_host(self.me, peer)
        if not self._is_frozen(peer) if is_near else self._beats(rank):
            self.fine_at[rank] = now
        for_s = now - self.fine_at[rank]
        if for_s < (STOPPED_S + LOOK_S if is_near else SILENT_S):
            return ""
        return "is stopped" if is_near else _silent(for_s)

    def _is_frozen(self, peer: Any) -> bool:
        return peer.pid != self.me.pid and _state(peer.pid) in ("T", "t")

    def _beats(self, rank: int) -> bool:
        """Whether a rank has said that it is there, since the last look; or has not come yet."""
        key = f"beat {rank}"
        if not self.store.check([key]):
            return True
        beat = self.store.get(key)
        is_new: bool = beat != self.beats.get(rank)
        self.beats[rank] = beat
        return is_new


def _silent(for_s: float) -> str:
    return f"has said nothing for {for_s:.0f} s: stopped, or stuck"


def _shares_host(one: Any, other: Any) -> bool:
    return bool(one.is_visible and other.is_visible)


def _state(pid: int) -> str:
    """Of a process of this host, by one letter (proc(5)); nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
