"""The threads that OpenMP keeps for a thread of Python that has computed, and may not again.

release_idle_threads()
"""

from __future__ import annotations

import ctypes

PAUSE_SOFT = 1
"""omp_pause_soft of OpenMP 5.0."""


def release_idle_threads() -> None:
    """End the OpenMP threads that the calling thread keeps; its next large operation starts others.

    While there are more of them than processors, those of every other thread sleep between two
    operations, where they would look for work: on two processors a token of SmolLM2 took 64 ms so,
    and 48 without.
    Without effect where torch was built without OpenMP 5.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(PAUSE_SOFT)
