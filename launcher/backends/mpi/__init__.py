"""MPI: the variables of Open MPI, MPICH and Intel MPI, and the command that starts them.

mpiexec -n 2 python script.py       # launcher.current() works inside script.py
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping

from launcher import launch_secret, timings
from launcher.backends.env_table import build, read_numbers, read_variables
from launcher.backends.mpi import mpi_rendezvous
from launcher.backends.torch_rendezvous import environment, rendezvous_info
from launcher.job import LOOPBACK, Job
from launcher.launch_info import LaunchInfo, LaunchInfoError
from launcher.runtime import rank_environment

__all__ = ["NAME", "command", "detect", "environment"]

NAME = "mpi"
STARTS_ALL_NODES = True
SUPPORTS = frozenset({"bind", "encrypt", "log_dir", "nnodes", "trace"})
# OMPI_COMM_WORLD_NODE_RANK is not a node's index: it is this rank among all jobs of its node.
OPEN_MPI = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "world_size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
HYDRA = {  # the process manager of MPICH and of Intel MPI
    "rank": "PMI_RANK",
    "world_size": "PMI_SIZE",
    "local_rank": "MPI_LOCALRANKID",
    "local_world_size": "MPI_LOCALNRANKS",
}


def detect(environ: Mapping[str, str]) -> LaunchInfo | None:
    """The rank that mpiexec made of this process; None if no mpiexec started it.

    Over several nodes no MPI puts the address of rank 0 into the environment: set MASTER_ADDR (and,
    under MPICH, LAUNCH_ID), or install mpi4py: the ranks then exchange it, which makes the first
    call collective.
    """
    return _open_mpi(environ) or _hydra(environ)


def _open_mpi(environ: Mapping[str, str]) -> LaunchInfo | None:
    names = (*OPEN_MPI.values(), "PMIX_NAMESPACE")
    variables = read_variables(environ, "Open MPI's mpiexec", OPEN_MPI.values(), names)
    if variables is None:
        return None
    # Its suffix @N stays: it tells a spawned job from the job that spawned it.
    return _info(environ, variables, OPEN_MPI, variables["PMIX_NAMESPACE"])


def _hydra(environ: Mapping[str, str]) -> LaunchInfo | None:
    if "SLURM_STEP_ID" in environ and not {"MPI_LOCALRANKID", "MPI_LOCALNRANKS"} & environ.keys():
        return None  # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE: slurm.py detects it
    variables = read_variables(environ, "mpiexec", HYDRA.values(), HYDRA.values())
    if variables is None:
        return None
    return _info(environ, variables, HYDRA, environ.get("I_MPI_HYDRA_UUID", ""))


def _info(
    environ: Mapping[str, str], variables: dict[str, str], table: Mapping[str, str], launch_id: str
) -> LaunchInfo:
    sizes, outer_addr = read_numbers(variables, table), environ.get("MASTER_ADDR")
    environ = rank_environment.without_rendezvous(environ)
    one_node = sizes["local_world_size"] == sizes["world_size"]
    launch_id = environ.get("LAUNCH_ID") or launch_id
    if one_node and not launch_id:
        launch_id = mpi_rendezvous.name_from_pmi(environ)
    addr, port = LOOPBACK if one_node else environ.get("MASTER_ADDR"), 0
    if not (launch_id and addr):
        # The name under which mpiexec reached this node, if it sets one.
        host = environ.get("PMIX_HOSTNAME") or environ.get("PMI_HOSTNAME") or socket.gethostname()
        try:
            size = sizes["world_size"]
            launch_id, exchanged_addr, port = mpi_rendezvous.exchange(size, host, launch_id)
        except LaunchInfoError:  # without mpi4py; then that of this rank, or of the one around it
            if not (launch_id and outer_addr and outer_addr != LOOPBACK):
                raise
            exchanged_addr = outer_addr
        addr = addr or exchanged_addr
    rendezvous = rendezvous_info(environ, launch_id, addr, port)
    return build(NAME, variables, **sizes, **rendezvous, extras={"launcher": NAME})


def command(job: Job) -> list[str]:
    """The command line of the mpiexec found on PATH, which starts the ranks of all nodes at once.

    The nodes are those of the allocation, or of the host file that this MPI's own variables name.
    Raises LaunchInfoError if there is no mpiexec, or one of no MPI known here.
    """
    mpiexec = shutil.which("mpiexec") or ""
    size = ["-n", str(job.nnodes * job.nprocs)]
    if _is_open_mpi(mpiexec):
        return [mpiexec, *size, *_open_mpi_options(job), *job.rank_command()]
    abort = [sys.executable, "-m", "launcher.backends.mpi.mpi_abort"]
    return [mpiexec, *size, *_hydra_options(job), *abort, *job.rank_command()]


def _open_mpi_options(job: Job) -> list[str]:
    """Allow more ranks than cores, and name the variables that this MPI must export."""
    where = f"ppr:{job.nprocs}:node" if job.nnodes > 1 else ""
    options = ["--map-by", f"{where}:OVERSUBSCRIBE"]
    if not job.bind:
        options += ["--bind-to", "none"]
    secret = [launch_secret.SECRET] if job.results_dir else []  # else it is only shown
    variables = {**rank_environment.job_variables(job), **environment(job)}
    names = [*secret, *variables, *rank_environment.settings(os.environ)]
    return options + [word for name in names for word in ("-x", name)]


def _hydra_options(job: Job) -> list[str]:
    options = ["-ppn", str(job.nprocs)] if job.nnodes > 1 else []
    if job.bind:
        options += ["-bind-to", "core"]
    return options


@functools.cache
def _is_open_mpi(mpiexec: str) -> bool:
    """True if mpiexec is Open MPI's; False for the Hydra of MPICH and Intel MPI."""
    if not mpiexec:
        raise LaunchInfoError(
            "no mpiexec on PATH, so no ranks can be started under MPI. Load the module of an MPI, "
            "or `pip install mpich`."
        )
    ask, timeout_s = [mpiexec, "--version"], timings.TIMINGS.version_answer_s
    try:
        says = subprocess.run(ask, capture_output=True, text=True, timeout=timeout_s).stdout
    except subprocess.TimeoutExpired as error:
        raise LaunchInfoError(f"{error}: is its file system there?") from error
    if "Open MPI" in says:
        return True
    if "HYDRA" in says or "Intel(R) MPI" in says:
        return False
    raise LaunchInfoError(
        f"{mpiexec} is neither Open MPI's nor MPICH's nor Intel MPI's, so its options are unknown "
        f"(it prints {says[:80]!r}). Put one of theirs first on PATH, or start the ranks "
        "with this one yourself: `launcher.current()` may detect them."
    )
