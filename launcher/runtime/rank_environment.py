"""The variables by which a rank knows its place, under torchrun's names: scripts read them."""

from __future__ import annotations

import logging
import os

from launcher.job import Job
from launcher.launch_info import ENCRYPT_VARIABLE, ENV_PREFIX, NODE_RANK, PATIENCE, LaunchInfo
from launcher.system import linux
from launcher.system.nesting import TORCH_RUN_ID

log = logging.getLogger("launcher")
# By these a backend launcher's ranks learn what their launcher knows.
TORCH_PORT = ENV_PREFIX + "TORCH_PORT"
RESTART_COUNT = ENV_PREFIX + "RESTART_COUNT"
# Without it Accelerate, on a node without accelerators, makes each rank a world of its own.
ACCELERATE_USE_CPU = "ACCELERATE_USE_CPU"


def set_variables(info: LaunchInfo, torch_port: int, restart_count: int = 0) -> None:
    """Make this process the rank of info, for `launcher.current()` and for scripts of torchrun.

    torch_port: where rank 0's torch.distributed may listen, beside info.master_port, which is the
    Coordinator's.
    """
    place = info.rank, info.world_size, info.master_addr, info.master_port
    log.info("rank %d of %d: Coordinator at %s:%d, MASTER_PORT %d", *place, torch_port)
    os.environ.update(info.to_env())
    if info.encrypts:
        os.environ[ENCRYPT_VARIABLE] = "1"
    os.environ.update(torchrun_variables(info, torch_port, restart_count))
    set_default_device()


def set_patience(patience_s: float | None) -> None:
    """Let this process and those that it starts bear silence for so long; see `patience_s`."""
    if patience_s is not None:
        os.environ[PATIENCE] = str(patience_s)


def job_variables(job: Job) -> dict[str, str]:
    """The variables by which a backend launcher's ranks learn of restarts and encryption."""
    restarts = {RESTART_COUNT: str(job.restart_count)} if job.restart_count else {}
    return {**restarts, **({ENCRYPT_VARIABLE: "1"} if job.encrypt else {})}


def set_default_device() -> None:
    """Let Accelerate use the CPU on a node without accelerators, unless its user has chosen."""
    if not linux.has_accelerator():
        os.environ.setdefault(ACCELERATE_USE_CPU, "true")


def torchrun_variables(info: LaunchInfo, torch_port: int, restart_count: int) -> dict[str, str]:
    """torchrun's variables for this rank.

    The run id is there because libraries recognise torchrun by it. That no agent has a store is
    said because an enclosing torchrun may have set the opposite.
    """
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.local_world_size),
        "GROUP_RANK": info.extras.get(NODE_RANK, str(info.rank // info.local_world_size)),
        "MASTER_ADDR": info.master_addr,
        "MASTER_PORT": str(torch_port),
        TORCH_RUN_ID: info.launch_id,
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
