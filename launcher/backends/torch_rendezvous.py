"""Rendezvous by variables: launch_id and master address where the backend sets none."""

from __future__ import annotations

from collections.abc import Mapping

from launcher import launch_secret, ports
from launcher.job import LOOPBACK, Job
from launcher.launch_info import integer
from launcher.runtime import rank_environment
from launcher.system import nesting


def rendezvous_info(environ: Mapping[str, str], launch_id: str, addr: str) -> dict[str, object]:
    """launch_id, master_addr and master_port of a LaunchInfo, the same on every rank.

    LAUNCH_ID, MASTER_ADDR and MASTER_PORT override the arguments, each if it is set; the default
    port is the first that hashes from the launch_id. Inside one of our ranks they are that rank's.
    """
    environ = {} if nesting.has_our_run_id(environ) else environ
    name = environ.get("LAUNCH_ID") or launch_id
    port = environ.get("MASTER_PORT")
    return {
        "launch_id": name,
        "master_addr": environ.get("MASTER_ADDR") or addr,
        "master_port": integer(port, "MASTER_PORT") if port else ports.candidates(name)[0],
    }


def environment(job: Job) -> dict[str, str]:
    """The variables that every rank needs: the rendezvous, a new secret, what the job is.

    Without results_dir the job is only shown, and so has no secret.
    """
    variables = {"LAUNCH_ID": job.launch_id, **rank_environment.job_variables(job)}
    if job.results_dir:
        variables.update(launch_secret.variables())
    if job.master_addr != LOOPBACK:
        variables["MASTER_ADDR"] = job.master_addr
    if job.master_port:
        variables["MASTER_PORT"] = str(job.master_port)
    return variables
