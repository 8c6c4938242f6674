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
from launcher.info import LaunchInfo, integer
from launcher.job import Job
from launcher.table import build, family

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


def detect(environ: Mapping[str, str]) -> LaunchInfo | None:
    """The rank that torchrun made of this process; None if torchrun did not start it.

    The launch_id holds the port and the restart count: the run id is "none" unless somebody chose
    one, and a gang that torchrun restarts must not meet what the dead one left in the store.
    extras["store"] is "agent" if torchrun itself already listens at master_addr:master_port.
    """
    names = (*MARKS, *NUMBERS.values(), "MASTER_ADDR")
    found = family(environ, NAME, MARKS, names)
    if found is None:
        return None
    return build(
        NAME,
        found,
        launch_id="-".join(found[name] for name in (MARKS[0], "MASTER_PORT", MARKS[1])),
        master_addr=found["MASTER_ADDR"],
        extras=_extras(environ),
        **{field: integer(found[name], name) for field, name in NUMBERS.items()},
    )


def _extras(environ: Mapping[str, str]) -> dict[str, str]:
    agent_listens = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return {"launcher": NAME} | ({"store": "agent"} if agent_listens else {})


def command(job: Job) -> list[str]:
    """torchrun's command line for this node; each of several nodes runs its own."""
    options = ["--nproc-per-node", str(job.nprocs), "--rdzv-id", job.launch_id, *_rendezvous(job)]
    logs = ["--log-dir", job.log_dir, "--tee", "3"] if job.log_dir else []
    start = [sys.executable, "-m", "torch.distributed.run"]
    return [*start, *options, *logs, *job.python_arguments()]


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
