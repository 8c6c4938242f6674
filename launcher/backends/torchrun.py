"""torchrun: its variables, and the command that starts it.

torchrun --nproc-per-node 2 script.py       # launcher.current() works inside script.py
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Mapping

from launcher import ports
from launcher.backends.env_table import build, chosen_by, family, numbers
from launcher.job import Job
from launcher.launch_info import LaunchInfo
from launcher.system import nesting

NAME = "torchrun"
HONOURS = frozenset({"log_dir", "nnodes", "trace"})
MARKS = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
NUMBERS = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "master_port": "MASTER_PORT",
}
PLAIN = (*NUMBERS.values(), "MASTER_ADDR")
# Whose ranks may well have RANK and the like beside their own variables.
OTHERS = (*nesting.MARKS, "RAY_JOB_ID")


def detect(environ: Mapping[str, str]) -> LaunchInfo | None:
    """The rank that torchrun made of this process, or somebody who set the same variables by hand;
    None if neither did.

    The launch_id holds the port and the restart count: the run id is "none" unless somebody chose
    one, and a gang that torchrun restarts must not meet what the dead one left in the store.
    extras["store"] is "agent" if torchrun itself already listens at master_addr:master_port.
    """
    found = family(environ, NAME, MARKS, (*MARKS, *PLAIN))
    if found is None:
        return _detect_plain(environ)
    return build(
        NAME,
        found,
        launch_id="-".join(found[name] for name in (MARKS[0], "MASTER_PORT", MARKS[1])),
        master_addr=found["MASTER_ADDR"],
        extras=_extras(environ),
        **numbers(found, NUMBERS),
    )


def _detect_plain(environ: Mapping[str, str]) -> LaunchInfo | None:
    """A rank whose variables are those of env:// alone, without an engine that is known here."""
    if any(mark in environ for mark in OTHERS):
        return None
    found = family(environ, "env://", ("RANK", "WORLD_SIZE"), PLAIN)
    if found is None:
        return None
    return build(
        "env://",
        found,
        launch_id=f"env-{found['MASTER_ADDR']}-{found['MASTER_PORT']}",
        master_addr=found["MASTER_ADDR"],
        extras={"launcher": NAME},
        **numbers(found, NUMBERS),
    )


def foreseen(job: Job) -> dict[str, object]:
    """What a rank's LaunchInfo will have beside the job's own."""
    known: dict[str, object] = {"extras": {"launcher": NAME, "store": "agent"}}
    if job.nnodes == 1:
        return known | dict.fromkeys(("launch_id", "master_addr", "master_port"), chosen_by(NAME))
    port = job.master_port or ports.candidates(job.launch_id)[0]
    return known | {"launch_id": f"{job.launch_id}-{port}-0"}


def _extras(environ: Mapping[str, str]) -> dict[str, str]:
    agent_listens = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return {"launcher": NAME} | ({"store": "agent"} if agent_listens else {})


def command(job: Job) -> list[str]:
    """torchrun's command line for this node; each of several nodes runs its own."""
    options = ["--nproc-per-node", str(job.nprocs), "--rdzv-id", job.launch_id, *_rendezvous(job)]
    if job.results_dir:  # else it leaves a folder of its own in /tmp
        options += ["--log-dir", f"{job.results_dir}/torchrun"]
    start = [sys.executable, "-m", "torch.distributed.run"]
    return [*start, *options, *job.python_arguments()]


def _rendezvous(job: Job) -> list[str]:
    if job.nnodes == 1:  # what --standalone does, but under our launch_id
        return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{job.master_addr}:{job.master_port}"]
    port = job.master_port or ports.candidates(job.launch_id)[0]
    nodes = ["--nnodes", str(job.nnodes), "--node-rank", str(job.node_rank)]
    return [*nodes, "--master-addr", job.master_addr, "--master-port", str(port)]


def leave_error(environ: Mapping[str, str], error: BaseException) -> None:
    """Leave error where torchrun looks for the root cause of a rank's death, if it looks at all.

    The form is torch.distributed.elastic.multiprocessing.errors.ErrorHandler's.
    """
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(time.time())),
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with contextlib.suppress(OSError), open(path, "w") as file:  # error itself matters more
        json.dump({"message": message}, file)
