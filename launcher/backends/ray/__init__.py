"""Ray: a worker's variables, and one actor per rank.

results = launcher.launch(work, nprocs=5, launcher="ray")
"""

from __future__ import annotations

from typing import Any

from launcher.backends.ray.ray_variables import NAME, detect
from launcher.job import Job

__all__ = ["NAME", "STARTS_ALL_NODES", "SUPPORTS", "detect", "run"]

STARTS_ALL_NODES = True
SUPPORTS = frozenset({"encrypt", "nnodes"})


def run(job: Job) -> list[Any]:
    """Each rank's result, by rank; see launcher/backends/ray/ray_cluster.py."""
    from launcher.backends.ray import ray_cluster  # not needed for detection

    return ray_cluster.run(job)
