"""The folders in which a user's programs keep what they can make again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """The folder of drumline below XDG_CACHE_HOME, or below ~/.cache; it may not exist yet.

    A relative path is ignored, as the XDG Base Directory Specification (0.8) asks.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (folder if folder.is_absolute() else Path.home() / ".cache") / "drumline"
