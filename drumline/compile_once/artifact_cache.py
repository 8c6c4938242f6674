"""A cache of compiled artifacts on disk, by key: written atomically, authenticated before use.

cache = ArtifactCache()
with cache.lock(key):
    data = cache.load(key) or build_and_store(key)
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from drumline import timings
from drumline.errors import DrumlineError
from launcher import make_private, user_cache_folder

SECRET_NBYTES = 32
"""Length of the key that artifacts are authenticated with."""


class BuildError(DrumlineError):
    """An artifact could not be built, or is not what was built; every rank raises this."""


class ArtifactCache:
    """Artifacts by key, in a folder that only this user can enter."""

    def __init__(self, folder: str | Path | None = None):
        self.folder = Path(folder) if folder else user_cache_folder() / "artifacts"
        try:
            make_private(self.folder)
        except OSError as error:
            raise BuildError(f"{error} Or give a folder of your own.") from error

    def path(self, key: str) -> Path:
        if not re.fullmatch(r"[\w.-]+", key):
            raise BuildError(
                f"the key {key!r} is not a file name, so its artifact would lie in another "
                "folder or none; use drumline.fingerprint(...), or letters, digits, '.', '_', '-'."
            )
        return self.folder / f"{key}.artifact"

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Hold a lock, as one process of the node; the kernel frees it if that process dies."""
        path = self.folder / f"{key}.lock"
        with self._errors_named():
            lock = FileLock(path, timings.TIMINGS.load_s, thread_local=False, is_singleton=False)
            held = lock.acquire()
        with held:
            yield

    def load(self, key: str) -> bytes | None:
        """The artifact, or None if it is absent or damaged.

        A damaged one is not deleted: another process may just be replacing it.
        """
        with contextlib.suppress(FileNotFoundError), self._errors_named():
            data, mac = self.path(key).read_bytes(), self._mac_path(key).read_bytes()
            return data if hmac.compare_digest(mac, self._mac(key, data).encode()) else None
        return None

    def store(self, key: str, data: bytes) -> None:
        """Store the artifact atomically."""
        self._write(self.path(key), data)
        self._write(self._mac_path(key), self._mac(key, data).encode())

    def _write(self, path: Path, data: bytes) -> None:
        with (
            self._errors_named(),
            tempfile.TemporaryDirectory(dir=self.folder) as folder,
            Path(folder, path.name).open("wb") as file,
        ):
            os.fchmod(file.fileno(), 0o600)
            file.write(data)
            file.flush()
            os.fsync(file)
            os.replace(file.name, path)

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise BuildError(
                f"the cache of compiled artifacts cannot be used: {error}. Delete what is there, "
                f"or let this user read and write {self.folder}, or give another folder."
            ) from error

    def _mac_path(self, key: str) -> Path:
        return self.folder / f"{key}.seal"

    def _mac(self, key: str, data: bytes) -> str:
        return hmac.new(self._secret(), key.encode() + b"\0" + data, "sha256").hexdigest()

    def _secret(self) -> bytes:
        path = self.folder / "secret"
        with self.lock("secret~"):  # which is no key
            if not path.exists() or path.stat().st_size != SECRET_NBYTES:  # cut short by a crash
                self._write(path, secrets.token_bytes(SECRET_NBYTES))
        return path.read_bytes()
