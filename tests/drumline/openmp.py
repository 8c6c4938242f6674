"""The threads that OpenMP starts for a thread of Python, as the system names them."""

from __future__ import annotations

import os
import time

import torch

LARGE = torch.ones(1 << 20)


def threads_of_the_system() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def compute_in_two_threads() -> set[str]:
    """Compute with this thread and one of OpenMP's; returns what had to be started for it."""
    torch.set_num_threads(2)
    before = threads_of_the_system()
    assert LARGE.add(1).sum() == 2 * len(LARGE)
    return threads_of_the_system() - before


def has_ended(thread: str) -> bool:
    deadline = time.monotonic() + 20
    while thread in threads_of_the_system() and time.monotonic() < deadline:
        time.sleep(0.001)
    return thread not in threads_of_the_system()
