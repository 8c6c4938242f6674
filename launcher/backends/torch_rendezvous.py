"""Rendezvous by variables: launch_id and master address where the backend sets none."""

from __future__ import annotations

from collections.abc import Mapping

from launcher import ports
from launcher.job import LOOPBACK, Job
from launcher.launch_info import integer
from launcher.runtime import rank_environment


def rendezvous_info(
    environ: Mapping[str, str], launch_id: str, addr: str, default_port: int = 0
) -> dict[str, object]:
    """launch_id, master_addr and master_port of a LaunchInfo, the same on every rank.

    LAUNCH_ID, MASTER_ADDR and MASTER_PORT override the arguments, each if it is set, and not by a
    rank of ours around this. default_port: 0 for the first that hashes from the launch_id.
    """
    environ = rank_environment.without_rendezvous(environ)
    name = environ.get("LAUNCH_ID") or launch_id
    text = environ.get("MASTER_PORT")
    port = default_port or ports.candidates(name)[0]
    return {
        "launch_id": name,
        "master_addr": environ.get("MASTER_ADDR") or addr,
        "master_port": integer(text, "MASTER_PORT") if text else port,
    }


def environment(job: Job) -> dict[str, str]:
    """The variables by which the ranks meet."""
    variables = {"LAUNCH_ID": job.launch_id}
    if job.master_addr != LOOPBACK:
        variables["MASTER_ADDR"] = job.master_addr
    if job.master_port:
        variables["MASTER_PORT"] = str(job.master_port)
    if job.torch_port:
        variables[rank_environment.TORCH_PORT] = str(job.torch_port)
    return variables
