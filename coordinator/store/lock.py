"""Locks that one process of a node holds at a time."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.call_site import PendingCall
from coordinator.errors import CoordinatorTimeout

if TYPE_CHECKING:
    from filelock import BaseFileLock

WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # flock(2): of some filesystems


class Locks:
    """The locks of one rank of a launch: files in a folder that the launch has on the node.

    While a rank may use the folder it shares a lock on a file in it; who gets that file alone is
    the last, and removes the folder. So no file is removed that another may be waiting for.
    """

    def __init__(self, launch_id: str) -> None:
        self._launch_id = launch_id
        self._opening = threading.Lock()
        self._folder: Path | None = None
        self._users_fd = -1

    def path(self, name: str) -> Path:
        """The file of a lock."""
        with self._opening:
            if self._folder is None:
                self._folder, self._users_fd = _enter(self._launch_id)
            return self._folder / f"{_digest(name)}.lock"

    def close(self) -> None:
        with self._opening:
            folder, users_fd = self._folder, self._users_fd
            self._folder, self._users_fd = None, -1
        if folder is not None:
            _leave(folder, users_fd)


def folder_of(launch_id: str) -> Path:
    """Private to the user, and different for every launch."""
    above = Path(tempfile.gettempdir()) / f"drumline-{os.getuid()}"
    _make(above)
    if above.lstat().st_uid != os.getuid() or above.is_symlink():
        raise PermissionError(f"{above} belongs to another user; set TMPDIR to a folder of yours")
    return above / _digest(launch_id)


def _check_is_there(folder: Path) -> None:
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder}, where locks live, is not a folder; set TMPDIR to one")


def _make(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _enter(launch_id: str) -> tuple[Path, int]:
    """Share the folder: it stays until this descriptor is closed."""
    while True:
        try:
            folder = folder_of(launch_id)
            _make(folder)
            users_fd = os.open(folder / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            _check_is_there(Path(tempfile.gettempdir()))
            continue  # removed in between by who was the last
        _flock(users_fd, fcntl.LOCK_SH)
        if _is_at(folder / "users", users_fd):
            return folder, users_fd
        os.close(users_fd)


def _is_at(path: Path, fd: int) -> bool:
    """True if the file at the path is still the one of this descriptor."""
    try:
        return path.stat().st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def _leave(folder: Path, users_fd: int) -> None:
    """Stop sharing the folder; the last to leave removes it, and folders of dead launches."""
    try:
        _remove_if_unused(folder, users_fd)
        for other in folder.parent.iterdir():
            _sweep(other)
        folder.parent.rmdir()
    except OSError:
        pass  # others are there, or other launches
    finally:
        os.close(users_fd)


def _sweep(folder: Path) -> None:
    try:
        fd = os.open(folder / "users", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # somebody was quicker
    try:
        _remove_if_unused(folder, fd)
    finally:
        os.close(fd)


def _remove_if_unused(folder: Path, fd: int) -> None:
    """fd: of its users. Renamed first, so that nobody can come in while it is emptied."""
    with suppress(BlockingIOError):  # others are there
        if _flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB) and _is_at(folder / "users", fd):
            going = folder.with_name(f"{folder.name}-{secrets.token_hex(4)}")
            folder.rename(going)
            shutil.rmtree(going)


def _flock(fd: int, how: int) -> bool:
    """False on filesystems that have no locks: there the folder stays."""
    try:
        fcntl.flock(fd, how)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        return False
    return True


@contextmanager
def hold(path: Path, name: str, owner: str, pending: PendingCall) -> Iterator[None]:
    """Hold the lock of a path; a timeout names its holder and since when. owner: this rank."""
    holder = path.with_suffix(".holder")
    try:
        lock = _acquire(path, pending.timeout_s)
    except TimeoutError as error:
        raise CoordinatorTimeout(
            f"{owner} waited {pending.timeout_s:g} s in {pending.call} for lock {name!r}, held by "
            f"{_read(holder)}. Give a longer timeout_s, or look at what the holder does; if it is "
            f"dead, the file {path} is left from it and may be removed."
        ) from error
    try:
        holder.write_text(f"{owner} since {time.strftime('%H:%M:%S')}")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _acquire(path: Path, timeout_s: float) -> BaseFileLock:
    """A lock of the kernel; on filesystems that have none, a file that is there or not."""
    from filelock import FileLock, SoftFileLock  # slow to import, and few launches lock

    try:
        lock: BaseFileLock = FileLock(path, timeout_s, thread_local=False, is_singleton=False)
        lock.acquire()
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in WITHOUT_LOCKS:
            raise
        soft = path.with_suffix(".soft")
        lock = SoftFileLock(soft, timeout_s, thread_local=False, is_singleton=False)
        lock.acquire()
    return lock


def _read(holder: Path) -> str:
    try:
        return holder.read_text()
    except FileNotFoundError:
        return "nobody by now"
