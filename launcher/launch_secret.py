"""The launch secret: bytes that only the ranks of one launch know, for authentication.

It travels by an inherited descriptor. Under a backend launcher that passes none on, it travels in
the environment, and the rank removes it from there on reading.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import MutableMapping

from launcher.authentication import launch_token
from launcher.launch_info import ENV_PREFIX, LaunchInfoError
from launcher.system import linux

NBYTES = 32
SECRET = launch_token.OLD_VARIABLE
SECRET_FD = ENV_PREFIX + "SECRET_FD"  # names the descriptor, once the secret was taken


def create() -> int:
    """A descriptor of a fresh secret; read it with os.pread(fd, 32, 0): its position is shared."""
    return store(os.urandom(NBYTES))


def store(data: bytes) -> int:
    """A descriptor that holds data: sealed memory with no name in any file system."""
    fd = os.memfd_create("launch-secret", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def take(environ: MutableMapping[str, str]) -> int | None:
    """Take the secret, or the token in its place, out of environ; its descriptor, or None.

    It is removed from the environment of this process and its children, and from what /proc shows.
    """
    try:
        token = launch_token.take(environ)
    except ValueError as error:
        raise LaunchInfoError(str(error)) from error
    if token is not None:
        environ[SECRET_FD] = str(store(token.key))
    fd = environ.get(SECRET_FD, "")
    # A child that has not inherited the descriptor may have another file under that number.
    return int(fd) if "launch-secret" in linux.link_of_fd(fd) else None
