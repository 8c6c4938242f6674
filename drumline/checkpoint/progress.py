"""How far loading is on all ranks together, as a bar on the master.

with LoadProgress(coor, total=plan.nbytes, show=None) as landed:
    on_progress(nbytes)      # on any rank, whenever some more has arrived
"""

from __future__ import annotations

import threading
import time

from tqdm.auto import tqdm  # type: ignore[import-untyped]

from coordinator import Coordinator

EVERY_S = 0.2
"""How often a rank tells what it has, and how often the master looks."""


class LoadProgress:
    """Counts the bytes that land on this rank, and shows those of all ranks on the master.

    total: the bytes that all ranks together will load. show: None means if stderr is a terminal.
    Not collective, but to be made before a collective call of the same load: what ranks told in an
    earlier load is cleared here.
    """

    def __init__(self, coor: Coordinator, total: int, show: bool | None):
        self.coor, self.nbytes = coor, 0
        self._told_s = 0.0
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None
        self.tell()
        if coor.is_master() and show is not False:
            disable = None if show is None else False
            self._bar = tqdm(
                total=total, unit="B", unit_scale=True, desc="loading", disable=disable
            )
            if not self._bar.disable:
                self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> LoadProgress:
        if self._watcher is not None:
            self._watcher.start()
        return self

    def __call__(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if time.monotonic() - self._told_s > EVERY_S:
            self.tell()

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()
            self._bar.close()

    def tell(self) -> None:
        """Let the master know what has landed so far."""
        if not self.coor.is_master():
            self.coor.put(f"inference loaded {self.coor.rank}", str(self.nbytes).encode())
        self._told_s = time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            self._show()
        self._show()

    def _show(self) -> None:
        others = [self.coor.get(f"inference loaded {r}") for r in range(1, self.coor.world_size)]
        self._bar.update(self.nbytes + sum(int(found or 0) for found in others) - self._bar.n)
