"""What the ranks of a launch know and nobody else does."""

from __future__ import annotations

import hashlib
import os

from coordinator.errors import CoordinatorError
from launcher import LaunchInfo

NBYTES = 32


def secret_of(info: LaunchInfo) -> bytes:
    """The launch secret; without one, bytes that follow from the launch_id.

    The second keeps apart launches that meet by accident, and nobody who wants in: see
    docs/security.md for what a stranger can do then.
    """
    fd = info.extras.get("secret_fd")
    if fd is None:
        return hashlib.sha256(f"drumline, no secret\0{info.launch_id}".encode()).digest()
    try:
        is_ours = "launch-secret" in os.readlink(f"/proc/self/fd/{fd}")
        found = os.pread(int(fd), NBYTES, 0) if is_ours else b""
    except OSError:
        found = b""
    if len(found) != NBYTES:
        raise CoordinatorError(
            f"rank {info.rank} cannot read the launch secret from descriptor {fd}, so the others "
            "would not believe it. Was this process started by a rank without its descriptors? "
            "Pass them on (subprocess: pass_fds), or let the rank itself make the Coordinator."
        )
    return found
