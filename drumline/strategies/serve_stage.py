"""The end of `load` on every rank but the master: it serves its stage until the master leaves."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Any, NoReturn

import torch

from communicator import Communicator, import_builtin
from coordinator import Coordinator
from drumline.errors import DrumlineError, PeerLost, WorkerExit
from drumline.planner.memory import unit_id
from drumline.stages.stage import Stage
from drumline.timings import TIMINGS

log = logging.getLogger("drumline")

import_builtin()  # once for all ranks, where a launcher imports this before it forks them


def open_message_communicator(coor: Coordinator, backend: str | None) -> Communicator:
    """A communicator for messages, which are packed in CPU memory wherever layers run."""
    return Communicator(coor, backend, timeout_s=TIMINGS.next_message_s, device_type="cpu")


def open_ring_communicators(
    coor: Coordinator, device: torch.device, backend: str | None, stack: contextlib.ExitStack
) -> list[Communicator]:
    """Forward and back, for messages; and two more between the ranks' devices, where there are
    such. Collective."""
    messages = [stack.enter_context(open_message_communicator(coor, backend)) for _ in range(2)]
    return messages + open_device_communicators(coor, device, backend, stack)


def open_device_communicators(
    coor: Coordinator, device: torch.device, backend: str | None, stack: contextlib.ExitStack
) -> list[Communicator]:
    """Two communicators between the ranks' devices, for tensors of messages. Collective.

    None where one rank computes on a CPU, two share a GPU, a backend was named, or the GPUs do not
    reach each other: then tensors go through the memory of the CPU.
    """
    ids = coor.allgather_object("" if backend else _gpu_id(device))
    if "" in ids or len({*ids}) < len(ids):
        return []
    comms, problem = contextlib.ExitStack(), ""
    try:
        made = [comms.enter_context(Communicator(coor, device=device)) for _ in range(2)]
    except PeerLost:
        raise
    except DrumlineError as error:
        problem = str(error)
    if problems := [text for text in coor.allgather_object(problem) if text]:
        unusable = DrumlineError(problems[0])
        comms.__exit__(DrumlineError, unusable, None)
        log.warning("rank %d: hidden states go through the CPU's memory: %s", coor.rank, unusable)
        return []
    stack.enter_context(comms)
    return made


def _gpu_id(device: torch.device) -> str:
    """An id that no other GPU has; nothing for what no backend moves tensors between."""
    return unit_id(device) if device.type == "cuda" else ""


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
