"""Nested launches: detecting a backend launcher that was started inside one of our ranks.

Its processes inherit our variables beside its own, and are its ranks, not ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from launcher.launch_info import ENV_PREFIX

TORCH_RUN_ID = "TORCHELASTIC_RUN_ID"  # our ranks have it too, with their launch_id
LAUNCH_ID = ENV_PREFIX + "LAUNCH_ID"
KEY = "enclosing_launchers"  # in LaunchInfo.extras: a digest of MARKS as the rank was started
MARKS = (TORCH_RUN_ID, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID", "SLURM_PROCID")


def _digest(environ: Mapping[str, str], has_our_run_id: bool) -> str:
    """A digest of the backend launchers that this process runs under; empty if there are none."""
    others = [mark for mark in MARKS if not (has_our_run_id and mark == TORCH_RUN_ID)]
    marks = [f"{mark}={environ[mark]}" for mark in others if mark in environ]
    return hashlib.blake2b("\0".join(marks).encode(), digest_size=8).hexdigest() if marks else ""


def has_our_run_id(environ: Mapping[str, str]) -> bool:
    """True if the run id is that of our own rank, and not that of a torchrun inside it."""
    return TORCH_RUN_ID in environ and environ[TORCH_RUN_ID] == environ.get(LAUNCH_ID)


def extras(environ: Mapping[str, str]) -> dict[str, str]:
    """The LaunchInfo.extras of a rank that starts in this environment, with a run id of ours."""
    digest = _digest(environ, has_our_run_id=True)
    return {KEY: digest} if digest else {}


def is_inside_another(rank_extras: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    """True if a backend launcher started this process, inside the rank with these extras."""
    return rank_extras.get(KEY, "") != _digest(environ, has_our_run_id(environ))
