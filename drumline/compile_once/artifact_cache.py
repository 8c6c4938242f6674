"""Compiled artifacts on disk, by key: written whole or not at all, checked before use.

cache = ArtifactCache()
with cache.lock(key):
    data = cache.load(key) or build_and_store(key)
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import tempfile
from pathlib import Path

from filelock import FileLock

from drumline.errors import DrumlineError

SECRET = 32
"""Bytes of the key that artifacts are authenticated with."""


class BuildError(DrumlineError):
    """An artifact could not be built, or is not what was built; every rank raises this."""


class ArtifactCache:
    """Artifacts by key, in a folder of this user's alone."""

    def __init__(self, folder: str | Path | None = None):
        self.folder = Path(folder) if folder else Path.home() / ".cache" / "drumline" / "artifacts"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise BuildError(
                f"{self.folder} can be written or read by others (owner {status.st_uid}, mode "
                f"{status.st_mode & 0o777:o}), and what lies in it would be run; "
                f"chmod 700 {self.folder}, or give a folder of your own."
            )

    def path(self, key: str) -> Path:
        if not re.fullmatch(r"[\w.-]+", key):
            raise BuildError(
                f"the key {key!r} is no name of a file, so its artifact would lie elsewhere or "
                "nowhere; use drumline.fingerprint(...), or letters, digits, '.', '_' and '-'."
            )
        return self.folder / f"{key}.artifact"

    def lock(self, key: str) -> FileLock:
        """Held by one process of the node; the kernel frees it if that one dies."""
        return FileLock(self.folder / f"{key}.lock", thread_local=False, is_singleton=False)

    def load(self, key: str) -> bytes | None:
        """The artifact, if it is there and is what was stored.

        A damaged one is left to who builds it again: it may be one that is just being replaced.
        """
        try:
            data, seal = self.path(key).read_bytes(), self._seal(key).read_bytes()
        except FileNotFoundError:
            return None
        return data if hmac.compare_digest(seal, self._mac(key, data).encode()) else None

    def store(self, key: str, data: bytes) -> None:
        """Whole or not at all, whatever happens meanwhile."""
        self._write(self.path(key), data)
        self._write(self._seal(key), self._mac(key, data).encode())

    def _write(self, path: Path, data: bytes) -> None:
        handle, name = tempfile.mkstemp(dir=self.folder)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        os.replace(name, path)

    def _seal(self, key: str) -> Path:
        return self.folder / f"{key}.seal"

    def _mac(self, key: str, data: bytes) -> str:
        return hmac.new(self._secret(), key.encode() + b"\0" + data, "sha256").hexdigest()

    def _secret(self) -> bytes:
        path = self.folder / "secret"
        with self.lock("secret"):
            if not path.exists() or path.stat().st_size != SECRET:  # cut short by a crash
                self._write(path, secrets.token_bytes(SECRET))
        return path.read_bytes()
