"""Progress of loading on all ranks together, as a bar on rank 0.

with LoadProgress(coor, total=plan.nbytes, show=None) as on_progress:
    on_progress(nbytes)      # on any rank, whenever more bytes have arrived
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from coordinator import Coordinator
from drumline import timings

if TYPE_CHECKING:
    from rich.progress import Progress


class LoadProgress:
    """Counts the bytes that arrive on this rank; rank 0 shows those of all ranks.

    Collective, and so is its end where there is a bar, which waits for all of them.

    total: the bytes that all ranks together will load. show: None means if the stderr of rank 0 is
    a terminal.
    """

    def __init__(self, coor: Coordinator, total: int, show: bool | None):
        self.coor, self.total, self.nbytes = coor, total, 0
        self._is_shown = coor.broadcast_object(sys.stderr.isatty() if show is None else show)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._over = threading.Event()
        self._report()

    def __enter__(self) -> LoadProgress:
        if self._is_shown and self.coor.is_master():
            self._watcher.start()
        return self

    def __call__(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if time.monotonic() - self._reported_at > timings.TIMINGS.progress_s:
            self._report()

    def __exit__(self, kind: object, *exc: object) -> None:
        try:
            if self._is_shown and kind is None:
                self._report()
                self.coor.barrier(timeout_s=timings.TIMINGS.load_s)
        finally:
            self._over.set()
            if self._watcher.is_alive():
                self._watcher.join()

    def _report(self) -> None:
        """Tell rank 0 the bytes that have arrived here so far, if there is a bar."""
        if self._is_shown and not self.coor.is_master():
            self.coor.put(_key(self.coor.rank), str(self.nbytes).encode())
        self._reported_at = time.monotonic()

    def _watch(self) -> None:
        with _bar() as bar:
            task = bar.add_task("loading", total=self.total)
            while not self._over.wait(timings.TIMINGS.progress_s):
                bar.update(task, completed=self._sum())
            bar.update(task, completed=self._sum())

    def _sum(self) -> int:
        """The bytes that have arrived on all ranks, as far as they have reported."""
        others = [self.coor.get(_key(rank)) for rank in range(1, self.coor.world_size)]
        return self.nbytes + sum(int(reported or 0) for reported in others)


def _key(rank: int) -> str:
    return f"drumline loaded {rank}"


def _bar() -> Progress:
    """A bar with bytes, speed and time on stderr; on no terminal, its last state alone."""
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    )
