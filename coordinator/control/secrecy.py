"""The launch secret of a rank, and whether it can encrypt."""

from __future__ import annotations

import hashlib
import logging
import os
import socket

from coordinator.errors import CoordinatorError
from launcher import LaunchInfo, encryption_problem, linux

SECRET_NBYTES = 32

log = logging.getLogger("coordinator")


def check_encryption(info: LaunchInfo) -> None:
    """Raise CoordinatorError if this rank cannot encrypt."""
    if problem := encryption_problem():
        raise CoordinatorError(
            f"rank {info.rank} (host {socket.gethostname()}) cannot encrypt: {problem}, or start "
            "all ranks without --encrypt."
        )


def warn_without_secret(info: LaunchInfo, encrypts: bool) -> None:
    """Log who can become a rank of a launch that has no secret of its own, if it has none."""
    if "secret_fd" not in info.extras:
        log.warning(
            "launch %s has no secret of its own: %swhoever %s can become a rank and read all. Set "
            "DRUMLINE_TOKEN to the same token (`openssl rand -hex 32`) on every host, see "
            "docs/security.md",
            info.launch_id,
            "encryption keeps out who reads the network, and " if encrypts else "",
            "reaches the ranks' store" if "store" in info.extras else "knows this launch id",
        )


def launch_secret(info: LaunchInfo) -> bytes:
    """The launch secret; without one, bytes that are derived from the launch_id.

    Those keep launches apart that meet by accident, and do not stop an attacker: see
    docs/security.md for what a stranger can do then.
    """
    fd = info.extras.get("secret_fd")
    if fd is None:
        return hashlib.sha256(f"drumline, no secret\0{info.launch_id}".encode()).digest()
    try:
        is_ours = "launch-secret" in linux.link_of_fd(fd)
        secret = os.pread(int(fd), SECRET_NBYTES, 0) if is_ours else b""
    except OSError:
        secret = b""
    if len(secret) != SECRET_NBYTES:
        raise CoordinatorError(
            f"rank {info.rank} cannot read the launch secret from descriptor {fd}, so the others "
            "would reject it. Was this process started by a rank without its descriptors? Pass "
            "them on (subprocess: pass_fds), or let the rank itself make the Coordinator."
        )
    return secret
