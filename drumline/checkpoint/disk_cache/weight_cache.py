"""Weights that came from another machine, kept on this one's disk: bounded, checked when read.

with WeightCache().open(identity, "Qwen3-0.6B of host a") as kept:
    if not kept.read(key, buffer):       # absent or damaged
        ...                              # receive it
        kept.write(key, buffer)

A checkpoint is a folder, named by the identity of its files; a block of weights in it is a file,
its digest before its bytes. Whoever loads holds a shared lock on the folder's `lock`, which the
kernel frees when that process ends; a checkpoint is deleted under an exclusive one alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher import make_private, user_cache_folder

log = logging.getLogger("drumline")

LIMIT_NBYTES = 64 << 30
"""Of all checkpoints together. They also leave as much of the disk free as they take."""
NUM_RECOUNTS = 64
"""Files of other processes are counted again after each such part of the limit."""
DIGEST_NBYTES = 32
LOCK_S = 10.0
"""For a process that deletes a checkpoint, which takes moments."""
LOCK, ABOUT, UNFINISHED = "lock", "name", ".part"


@dataclass(frozen=True)
class CachedCheckpoint:
    """A checkpoint in the cache: its name, its bytes here, and when it was last loaded.

    last_used: seconds since 1970. is_in_use: a process is loading from it now.
    """

    folder: Path
    name: str
    nbytes: int
    last_used: float
    is_in_use: bool


class WeightCache:
    """The cache of this user on this machine, which all processes share.

    folder: below XDG_CACHE_HOME, or ~/.cache, if not given.
    """

    def __init__(self, folder: str | Path | None = None, limit_nbytes: int = LIMIT_NBYTES):
        self.folder = Path(folder) if folder else user_cache_folder() / "weights"
        self.limit_nbytes = limit_nbytes
        self._refused: set[Path] = set()  # by their permissions

    def checkpoints(self) -> list[CachedCheckpoint]:
        """All that is kept, the least recently used first; says once what may not be read."""
        checkpoints = []
        for folder in (self.folder, *self.folder.glob("*/")):
            try:
                checkpoints.append(_describe(folder))
            except PermissionError as error:
                if folder not in self._refused:
                    log.warning("of the cache of weights, this is not counted: %s", error)
                self._refused.add(folder)
            except OSError:  # it is none, or another process deletes it meanwhile
                continue
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.last_used)

    def clear(self) -> int:
        """Delete every checkpoint that no process is loading from; the bytes that were freed."""
        return sum(kept.nbytes for kept in self.checkpoints() if _delete(kept.folder))

    def make_room(self, nbytes: int) -> bool:
        """Delete the least recently used until `nbytes` more fit; False if they do not."""
        checkpoints = self.checkpoints()
        used = sum(checkpoint.nbytes for checkpoint in checkpoints)
        for oldest in checkpoints:
            if self._fits(used, nbytes):
                break
            used -= oldest.nbytes if _delete(oldest.folder) else 0
        return self._fits(used, nbytes)

    def _fits(self, used: int, more: int) -> bool:
        free = shutil.disk_usage(self.folder).free
        return used + more <= min(self.limit_nbytes, free - more)

    @contextlib.contextmanager
    def open(self, identity: str, name: str) -> Iterator[CachedWeights]:
        """The kept blocks of the checkpoint with this identity. It is in use inside of the block.

        name: for those who list the cache. Raises OSError where the folder cannot be written, or
        others can write it.
        """
        folder = self.folder / identity
        make_private(self.folder)
        lock = _lock_shared(folder)
        try:
            with contextlib.suppress(OSError):  # of a full disk, from which to read
                (folder / ABOUT).write_bytes(name.encode(errors="backslashreplace"))
            yield CachedWeights(self, folder)
        finally:
            os.close(lock)


class CachedWeights:
    """The kept blocks of one checkpoint, by key."""

    def __init__(self, cache: WeightCache, folder: Path):
        self._cache, self._folder = cache, folder
        self._room, self._is_full = 0, False

    def read(self, key: str, out: memoryview) -> bool:
        """Fill `out` with a block of its size; False if it is absent, or damaged (and deleted)."""
        digest, path = bytearray(DIGEST_NBYTES), self._folder / key
        try:
            with path.open("rb") as file:
                is_whole = os.fstat(file.fileno()).st_size == len(digest) + len(out)
                is_whole = is_whole and file.readinto(digest) + file.readinto(out) > len(out)
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("%s, so these weights are received again", error)
            return False
        if is_whole and _digest(key, out) == digest:
            return True
        log.warning("%s is damaged, so it is deleted and these weights are received again", path)
        path.unlink(missing_ok=True)
        return False

    def write(self, key: str, block: memoryview) -> None:
        """Keep a block, if there is room: as a whole file or not at all, whoever else writes it."""
        try:
            if self._has_room(len(block)):
                self._write(key, block)
        except OSError as error:
            self._is_full = True
            log.warning("weights are not kept in %s: %s", self._folder, error)

    def _write(self, key: str, block: memoryview) -> None:
        handle, name = tempfile.mkstemp(UNFINISHED, dir=self._folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines((_digest(key, block), block))
                file.flush()  # and to the disk, for unwritten pages are not free for the next start
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.replace(name, self._folder / key)
        except BaseException:
            os.unlink(name)
            raise

    def _has_room(self, nbytes: int) -> bool:
        if self._room < nbytes and not self._is_full:
            self._room = max(nbytes, self._cache.limit_nbytes // NUM_RECOUNTS)
            self._is_full = not self._cache.make_room(self._room)
            if self._is_full:
                text = (
                    "%s is full (at most %d bytes, and no more than stays free on the disk), so "
                    "weights are not kept and will be sent again; drumline cache lists them"
                )
                log.warning(text, self._cache.folder, self._cache.limit_nbytes)
        self._room -= nbytes
        return not self._is_full


def _lock_shared(folder: Path) -> int:
    """The open lock of a checkpoint, shared with others that read and write it; makes the folder.

    Where no other process has it, what a killed one left unfinished is deleted. Raises TimeoutError
    where another keeps it to itself.
    """
    deadline = time.monotonic() + LOCK_S
    while time.monotonic() < deadline:
        folder.mkdir(mode=0o700, exist_ok=True)
        with (
            contextlib.suppress(FileNotFoundError, BlockingIOError),  # deleted, or being deleted
            contextlib.ExitStack() as stack,
        ):
            lock = _open_lock(folder, os.O_CREAT)
            stack.callback(os.close, lock)
            if _is_free(lock) and _is_of(folder, lock):
                for file in folder.glob(f"*{UNFINISHED}"):
                    file.unlink()
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _is_of(folder, lock):
                os.utime(lock)
                stack.pop_all()
                return lock
        time.sleep(0.01)
    raise TimeoutError(f"{folder / LOCK} is held by another process")


def _open_lock(folder: Path, flags: int = 0) -> int:
    return os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)


def _is_free(lock: int) -> bool:
    """Take the lock for this process alone; False if another has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_of(folder: Path, lock: int) -> bool:
    """True unless the folder, or its lock, was deleted since that was opened."""
    try:
        return os.path.samestat((folder / LOCK).stat(), os.fstat(lock))
    except FileNotFoundError:
        return False


def _describe(folder: Path) -> CachedCheckpoint:
    """The checkpoint in a folder. Raises OSError if that is none, or may not be read."""
    with _lock_of(folder) as lock:
        nbytes = sum(map(_nbytes, folder.iterdir()))
        last_used = os.fstat(lock).st_mtime
        return CachedCheckpoint(folder, _name(folder), nbytes, last_used, not _is_free(lock))


def _nbytes(file: Path) -> int:
    """The size of a file; 0 if it was renamed or deleted meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_size
    return 0


def _delete(folder: Path) -> bool:
    """Delete a checkpoint, unless a process is loading from it.

    The lock goes last: whoever makes another one in the folder finds nothing that will be deleted.
    """
    with contextlib.suppress(OSError), _lock_of(folder) as lock:
        if _is_free(lock) and _is_of(folder, lock):
            for file in folder.iterdir():
                if file.name != LOCK:
                    file.unlink()
            (folder / LOCK).unlink()
            with contextlib.suppress(OSError):  # another lock is in it
                folder.rmdir()
            return True
    return False


@contextlib.contextmanager
def _lock_of(folder: Path) -> Iterator[int]:
    """The open lock of a folder, which is not taken."""
    lock = _open_lock(folder)
    try:
        yield lock
    finally:
        os.close(lock)


def _name(folder: Path) -> str:
    """The name that was written beside a checkpoint; none if that was cut short."""
    with contextlib.suppress(OSError, ValueError):
        return (folder / ABOUT).read_bytes().decode()
    return ""


def _digest(key: str, block: memoryview) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(block)
    return digest.digest()
