"""The launch secret: bytes that only the ranks of one launch know, for authentication.

It travels by an inherited descriptor. Under a backend launcher that passes none on, it travels in
the environment, and the rank removes it from there on reading.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import MutableMapping

from launcher.launch_info import ENV_PREFIX, LaunchInfoError
from launcher.system import linux

NBYTES = 32
SECRET = ENV_PREFIX + "SECRET"
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


def variables() -> dict[str, str]:
    """A new secret as the variable that a backend launcher passes on to every rank."""
    return {SECRET: os.urandom(NBYTES).hex()}


def take(environ: MutableMapping[str, str]) -> int | None:
    """Take the secret out of environ; return its descriptor, or None if there is none.

    It is removed from the environment of this process and its children, and from what /proc shows.
    """
    if SECRET in environ:
        secret = _parse(environ[SECRET])
        if environ is os.environ:
            linux.erase_variable(SECRET)
        del environ[SECRET]
        environ[SECRET_FD] = str(store(secret))
    fd = environ.get(SECRET_FD, "")
    # A child that has not inherited the descriptor may have another file under that number.
    return int(fd) if "launch-secret" in linux.link_of_fd(fd) else None


def _parse(text: str) -> bytes:
    """The secret. Errors do not show the text, for it may be one."""
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) != NBYTES:
        raise LaunchInfoError(
            f"{SECRET} has {len(text)} characters, and a launch secret is {2 * NBYTES} hexadecimal "
            "digits, so no rank would accept this one. Unset it, or set the same secret for every "
            "rank of the launch."
        )
    return data
