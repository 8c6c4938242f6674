"""Ray: one actor per rank, placed by a placement group."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.info import LaunchInfo

NAME = "ray"


def detect(environ: Mapping[str, str]) -> LaunchInfo | None:
    """None: an actor learns its rank from the one who called it, and not from its environment."""
    return None
