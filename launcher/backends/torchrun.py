"""torchrun: its variables, and the command that starts it.

torchrun --nproc-per-node 2 script.py       # launcher.current() works inside script.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from launcher import ports
from launcher.backends.env_table import PLAIN, build_plain, chosen_by, read_variables
from launcher.job import Job
from launcher.launch_info import LaunchInfo
from launcher.system import nesting

NAME = "torchrun"
SUPPORTS = frozenset({"encrypt", "log_dir", "nnodes", "trace"})
MARKS = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
# Backends whose ranks may have RANK and the like beside their own variables.
OTHERS = (*nesting.MARKS, "RAY_JOB_ID")


def detect(environ: Mapping[str, str]) -> LaunchInfo | None:
    """The rank of torchrun, or of `env://` variables set by hand; None if neither is there.

    The launch_id holds the port and the restart count: the run id is "none" by default, and the
    ranks of a restart must not read what the previous attempt left in the store.
    extras["store"] is "agent" if torchrun itself already listens at master_addr:master_port.
    """
    if nesting.has_our_run_id(environ):  # a rank of another launcher of ours
        return None
    variables = read_variables(environ, NAME, MARKS, (*MARKS, *PLAIN))
    if variables is None:
        return _detect_plain(environ)
    agent_listens = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    launch_id = "-".join(variables[name] for name in (MARKS[0], "MASTER_PORT", MARKS[1]))
    store = {"store": "agent"} if agent_listens else {}
    return build_plain(NAME, variables, launch_id, launcher=NAME, **store)


def _detect_plain(environ: Mapping[str, str]) -> LaunchInfo | None:
    """A rank whose variables are those of env:// alone, without a known backend launcher."""
    if any(mark in environ for mark in OTHERS):
        return None
    variables = read_variables(environ, "env://", ("RANK", "WORLD_SIZE"), PLAIN)
    if variables is None:
        return None
    launch_id = f"env-{variables['MASTER_ADDR']}-{variables['MASTER_PORT']}"
    return build_plain("env://", variables, launch_id, launcher=NAME)


def expected_info(job: Job) -> dict[str, object]:
    """The fields of a rank's LaunchInfo that differ from the job's."""
    fields: dict[str, object] = {"extras": {"launcher": NAME, "store": "agent"}}
    if job.nnodes == 1:
        return fields | dict.fromkeys(("launch_id", "master_addr", "master_port"), chosen_by(NAME))
    port = ports.of_torch(job.launch_id, job.master_port)
    return fields | {"launch_id": f"{job.launch_id}-{port}-0"}


def command(job: Job) -> list[str]:
    """torchrun's command line for this node; each of several nodes runs its own."""
    options = ["--nproc-per-node", str(job.nprocs), "--rdzv-id", job.launch_id, *_rendezvous(job)]
    start = ["torch.distributed.run"]
    if job.results_dir:  # else it creates a folder in /tmp
        options += ["--log-dir", f"{job.results_dir}/torchrun"]
        start = ["launcher.external.torchrun_main", job.results_dir]
    return [sys.executable, "-m", *start, *options, *job.python_arguments()]


def _rendezvous(job: Job) -> list[str]:
    if job.nnodes == 1:  # as --standalone, but with our launch_id, and whatever the host's name is
        endpoint = ["--rdzv-endpoint", f"{job.master_addr}:{job.master_port}"]
        return ["--rdzv-backend", "c10d", *endpoint, "--local-addr", job.master_addr]
    port = ports.of_torch(job.launch_id, job.master_port)
    nodes = ["--nnodes", str(job.nnodes), "--node-rank", str(job.node_rank)]
    return [*nodes, "--master-addr", job.master_addr, "--master-port", str(port)]
