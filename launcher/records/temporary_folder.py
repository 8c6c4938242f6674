"""A folder of a launcher that nothing leaves behind, not even SIGKILL."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launcher.system.held_forks import explained_limit

# More than one try: what still writes into the folder may stand between a look and the removal.
KEEPER = """
import os, shutil, sys, time
sys.stdin.read()
for _ in range(20):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.1 * os.path.exists(sys.argv[1]))
"""


@contextlib.contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[tuple[Path, int]]:
    """(A new folder of this user alone, a pipe's end); removed at the end of the body.

    If this process is killed in the body, another one removes the folder, once nothing holds the
    end of its pipe: a process that inherits it keeps the folder until its own end. The other one is
    started first, so that the folder is never without it.
    """
    owner = os.getpid()
    path = (parent or Path(tempfile.gettempdir())) / f"{prefix}{owner}-{secrets.token_hex(8)}"
    # Signals to the launcher's process group do not reach it. -I, -S: it starts at once.
    command = [sys.executable, "-I", "-S", "-c", KEEPER, str(path)]
    null = subprocess.DEVNULL
    with explained_limit():
        keeper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=null, stderr=null, cwd="/", process_group=0
        )
    assert keeper.stdin is not None
    try:
        path.mkdir(mode=0o700)
        yield path, keeper.stdin.fileno()
    finally:
        if os.getpid() == owner:  # not in a forked rank that unwinds through here
            shutil.rmtree(path, ignore_errors=True)
            keeper.kill()  # also if somebody has suspended it
            keeper.wait()
            keeper.stdin.close()
