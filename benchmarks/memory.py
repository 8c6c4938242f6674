"""The most memory that a process held for a while.

with Peak() as peak:
    model = load()
print(peak.nbytes)
"""

from __future__ import annotations

import threading
from pathlib import Path

EVERY_S = 0.002


class Peak:
    """Looks often at how much memory this process holds; above what it held at the start."""

    def __enter__(self) -> Peak:
        self._base = resident_nbytes()
        self.nbytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self.nbytes = max(self.nbytes, resident_nbytes() - self._base)
            if self._ended.wait(EVERY_S):
                return


def resident_nbytes() -> int:
    """VmRSS of proc_pid_status(5): files that are mapped and read count too."""
    _, _, rest = Path("/proc/self/status").read_text().partition("VmRSS:")
    return int(rest.split()[0]) * 1024
