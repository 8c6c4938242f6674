"""The launch secret: bytes that only the ranks of one launch know, so that a stranger on the
network is not a peer.
"""

from __future__ import annotations

import fcntl
import os
import secrets

NBYTES = 32


def create() -> int:
    """A descriptor of fresh secret bytes, sealed, in no file and in no environment. Read it with
    os.pread(fd, 32, 0).
    """
    return store(secrets.token_bytes(NBYTES))


def store(data: bytes) -> int:
    """A descriptor that holds data: memory with no name in any file system, gone with its last
    holder.
    """
    fd = os.memfd_create("launch-secret", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
