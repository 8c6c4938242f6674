"""Noticing an engine inside one of our ranks.

Its processes inherit our variables beside its own, and are its ranks, not ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

AROUND = "around"  # in LaunchInfo.extras: which engines' variables there were when the rank began
MARKS = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID", "SLURM_PROCID")


def around(environ: Mapping[str, str]) -> str:
    """What tells the engines around a process apart; empty if there are none."""
    there = [f"{mark}={environ[mark]}" for mark in MARKS if mark in environ]
    return hashlib.blake2b("\0".join(there).encode(), digest_size=8).hexdigest() if there else ""


def extras(environ: Mapping[str, str]) -> dict[str, str]:
    """What a rank that starts in this environment has to remember."""
    return {AROUND: around(environ)} if around(environ) else {}


def is_inside_another(remembered: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    """Did an engine start this process, inside the rank that remembers these extras?"""
    return remembered.get(AROUND, "") != around(environ)
