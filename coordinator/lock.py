"""A lock that one process of a node holds at a time."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from coordinator.errors import CoordinatorTimeout


def lock_path(launch_id: str, name: str) -> Path:
    """The file of a lock: private to the user, different for every launch and name."""
    folder = Path(tempfile.gettempdir()) / f"drumline-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
        raise PermissionError(f"{folder} belongs to another user; set TMPDIR to a folder of yours")
    digest = hashlib.sha256(f"{launch_id}\0{name}".encode()).hexdigest()[:24]
    return folder / f"{digest}.lock"


@contextmanager
def hold(path: Path, name: str, who: str, timeout_s: float) -> Iterator[None]:
    """Hold the lock; the error of one who waits in vain names the holder and since when."""
    holder = path.with_suffix(".holder")
    try:
        lock = _acquire(path, timeout_s)
    except Timeout as error:
        raise CoordinatorTimeout(
            f"{who} waited {timeout_s:g} s for lock {name!r}, held by {_read(holder)}. "
            "Give a longer timeout_s, or look at what the holder does; if it is dead, the file "
            f"{path} is left from it and may be removed."
        ) from error
    try:
        holder.write_text(f"{who} since {time.strftime('%H:%M:%S')}")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _acquire(path: Path, timeout_s: float) -> BaseFileLock:
    """A lock of the kernel; on filesystems that have none, a file that is there or not."""
    try:
        lock: BaseFileLock = FileLock(path, timeout_s, thread_local=False, is_singleton=False)
        lock.acquire()
    except NotImplementedError:
        soft = path.with_suffix(".soft")
        lock = SoftFileLock(soft, timeout_s, thread_local=False, is_singleton=False)
        lock.acquire()
    return lock


def _read(holder: Path) -> str:
    try:
        return holder.read_text()
    except FileNotFoundError:
        return "nobody by now"
