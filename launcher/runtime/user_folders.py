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


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter, unless it is there.

    Raises PermissionError if others can read or write one that is there.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{folder} can be written or read by others (owner {status.st_uid}, mode "
            f"{status.st_mode & 0o777:o}), and what lies in it would be used; chmod 700 {folder}."
        )
