"""The end of `load` on every rank but the master: it serves its stage until the master leaves."""

from __future__ import annotations

import os
import time
from typing import Any, NoReturn

from communicator import Communicator
from coordinator import Coordinator
from drumline.errors import WorkerExit
from drumline.stages.stage import Stage
from drumline.timings import TIMINGS


def open_message_communicator(coor: Coordinator, backend: str | None) -> Communicator:
    """A communicator for messages, which are packed in CPU memory wherever layers run."""
    return Communicator(coor, backend, timeout_s=TIMINGS.next_message_s, device_type="cpu")


def serve_and_exit(stage: Stage, coor: Coordinator) -> NoReturn:
    """Run the stage's layers for the master until it leaves, then raise WorkerExit with its code.

    Raises PeerLost if a rank fails instead.
    """
    try:
        code = stage.serve()
    except BaseException as error:
        stage.ring.close(error)
        raise
    stage.ring.close()
    exit_after_master(coor, code)
    raise WorkerExit(code)


def exit_after_master(coor: Any, code: int) -> None:
    """Let a master that ends with a failure end first: the launcher shows the first failure.

    coor: may be closed already. A master that is not seen from here is given some time.
    """
    if not code:
        return
    master = coor.peers[0]
    is_local = master.is_visible and master.pid != os.getpid()
    deadline = time.monotonic() + (
        TIMINGS.master_end_s if is_local else TIMINGS.remote_master_end_s
    )
    while time.monotonic() < deadline and not master.is_known_dead():
        time.sleep(TIMINGS.master_poll_s)
