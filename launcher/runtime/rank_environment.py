"""The variables by which a rank knows its place, under torchrun's names: scripts read them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from launcher import launch_secret
from launcher.authentication import launch_token
from launcher.job import Job
from launcher.launch_info import (
    CHOICE,
    ENCRYPT_VARIABLE,
    ENV_PREFIX,
    NODE_RANK,
    PATIENCE,
    LaunchInfo,
)
from launcher.system import linux, nesting
from launcher.system.nesting import TORCH_RUN_ID
from launcher.trace import recorder

log = logging.getLogger("launcher")
# By these a backend launcher's ranks learn what their launcher knows.
TORCH_PORT = ENV_PREFIX + "TORCH_PORT"
RESTART_COUNT = ENV_PREFIX + "RESTART_COUNT"
OF_LAUNCH = (
    *LaunchInfo("none").to_env(),
    *(TORCH_PORT, RESTART_COUNT, CHOICE, recorder.VARIABLE),
    *(launch_secret.SECRET_FD, *launch_token.VARIABLES),
)
RENDEZVOUS = {  # each with the variable that has the same value in a rank of ours
    "LAUNCH_ID": nesting.LAUNCH_ID,
    "MASTER_ADDR": ENV_PREFIX + "MASTER_ADDR",
    "MASTER_PORT": TORCH_PORT,
}
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
    if "LAUNCH_ID" in os.environ:  # not the name of a launch by mpiexec or srun inside this rank
        os.environ["LAUNCH_ID"] = info.launch_id
    if info.encrypts:
        os.environ[ENCRYPT_VARIABLE] = "1"
    os.environ.update(torchrun_variables(info, torch_port, restart_count))
    set_default_device()


def set_patience(patience_s: float | None) -> None:
    """Let this process and those that it starts bear silence for so long; see `patience_s`."""
    if patience_s is not None:
        os.environ[PATIENCE] = str(patience_s)


def job_variables(job: Job) -> dict[str, str]:
    """The variables by which a backend launcher's ranks learn of restarts, traces, encryption."""
    restarts = {RESTART_COUNT: str(job.restart_count)} if job.restart_count else {}
    traced = {recorder.VARIABLE: job.trace} if job.trace else {}
    return {**restarts, **traced, **({ENCRYPT_VARIABLE: "1"} if job.encrypt else {})}


def forget_torchrun() -> None:
    """Let libraries of this rank take it for a process alone: Accelerate waits for the other ranks.

    `launcher.current()` still knows its place, except in a rank that torchrun itself started, where
    nothing changes.
    """
    if nesting.has_our_run_id(os.environ):
        linux.remove_variables(os.environ, torchrun_variables(LaunchInfo("none"), 0, 0))


def without_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without those of an enclosing launch, if this is a rank of ours.

    ENCRYPT_VARIABLE stays: the user may have set it, and not that launch.
    """
    is_ours = nesting.has_our_run_id(environ)
    names = {*OF_LAUNCH, *(torchrun_variables(LaunchInfo("none"), 0, 0) if is_ours else ())}
    kept = without_rendezvous(environ).items()
    return {name: text for name, text in kept if name not in names - RENDEZVOUS.keys()}


def without_rendezvous(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables without LAUNCH_ID, MASTER_ADDR and MASTER_PORT of an enclosing rank of ours.

    What its user has set in place of them stays.
    """
    ours = {name for name, twin in RENDEZVOUS.items() if environ.get(name) == environ.get(twin)}
    return {name: text for name, text in environ.items() if name not in ours}


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of drumline that its user has set: for the ranks of every host."""
    variables = without_launch(environ)
    return {name: text for name, text in variables.items() if name.startswith(ENV_PREFIX)}


def set_default_device() -> None:
    """Let Accelerate use the CPU on a node without accelerators, unless its user has chosen."""
    if not linux.has_accelerator():
        os.environ.setdefault(ACCELERATE_USE_CPU, "true")


def torchrun_variables(info: LaunchInfo, torch_port: int, restart_count: int) -> dict[str, str]:
    """torchrun's variables for this rank, and TORCH_PORT, by which MASTER_PORT is known as ours.

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
        TORCH_PORT: str(torch_port),
        TORCH_RUN_ID: info.launch_id,
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
