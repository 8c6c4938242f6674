"""The launch secret: bytes that only the ranks of one launch know, so that a stranger is no peer.

It travels by an inherited descriptor. Under an engine that passes none on, it travels in the
environment, and the rank takes it out on reading.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import MutableMapping

from launcher.launch_info import ENV_PREFIX, LaunchInfoError

NBYTES = 32
SECRET = ENV_PREFIX + "SECRET"
TAKEN = ENV_PREFIX + "SECRET_FD"  # where this process has put what it took


def create() -> int:
    """A descriptor of a fresh secret; read it with os.pread(fd, 32, 0): its position is shared."""
    return store(secrets.token_bytes(NBYTES))


def store(data: bytes) -> int:
    """A descriptor that holds data: sealed memory with no name in any file system."""
    fd = os.memfd_create("launch-secret", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def variables() -> dict[str, str]:
    """What an engine that only passes on variables should pass on to every rank of one launch."""
    return {SECRET: secrets.token_hex(NBYTES)}


def take(environ: MutableMapping[str, str]) -> int | None:
    """The descriptor of the secret that came in environ; None if none did.

    Once read, it is gone from the environment, that of children and what /proc shows included.
    """
    if SECRET in environ:
        fd = store(_parse(environ[SECRET]))
        if environ is os.environ:
            from launcher.system import linux

            linux.wipe_variable(SECRET)
        del environ[SECRET]
        environ[TAKEN] = str(fd)
    return _still_there(environ.get(TAKEN, ""))


def _parse(text: str) -> bytes:
    """The secret; whatever was there instead is not shown, for it may be one."""
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) != NBYTES:
        raise LaunchInfoError(
            f"{SECRET} is no launch secret: that is {2 * NBYTES} hexadecimal digits, and this is "
            f"{len(text)} characters, so no rank would believe this one. Unset it, or set the same "
            "right one for every rank of the launch."
        )
    return data


def _still_there(text: str) -> int | None:
    """The descriptor, unless this is a child that has not inherited it."""
    try:
        return int(text) if "launch-secret" in os.readlink(f"/proc/self/fd/{text}") else None
    except (OSError, ValueError):
        return None
