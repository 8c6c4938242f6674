"""Nested launches: detecting a backend launcher that was started inside one of our ranks.

Its processes inherit our variables beside its own, and are its ranks, not ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

KEY = "enclosing_launchers"  # in LaunchInfo.extras: a digest of MARKS as the rank was started
MARKS = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID", "SLURM_PROCID")


def enclosing_launchers(environ: Mapping[str, str]) -> str:
    """A digest of the backend launchers that this process runs under; empty if there are none."""
    marks = [f"{mark}={environ[mark]}" for mark in MARKS if mark in environ]
    return hashlib.blake2b("\0".join(marks).encode(), digest_size=8).hexdigest() if marks else ""


def extras(environ: Mapping[str, str]) -> dict[str, str]:
    """The LaunchInfo.extras of a rank that starts in this environment."""
    digest = enclosing_launchers(environ)
    return {KEY: digest} if digest else {}


def is_inside_another(rank_extras: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    """True if a backend launcher started this process, inside the rank with these extras."""
    return rank_extras.get(KEY, "") != enclosing_launchers(environ)
