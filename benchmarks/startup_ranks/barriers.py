"""Barriers of a rank of benchmarks.startup, and its death between them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

MARK = "past the barrier at"
DIES = "--dies"


def pass_barriers(rank: int, barrier: Callable[[], object], dies: bool | None = None) -> None:
    """Pass one and print the time; or let rank 1 die while the others wait in the next."""
    dies = DIES in sys.argv if dies is None else dies
    barrier()
    if not dies or rank == 1:
        os.write(1, f"{MARK} {time.monotonic()}\n".encode())  # at once: ranks may share the pipe
    if dies and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if dies:
        barrier()
