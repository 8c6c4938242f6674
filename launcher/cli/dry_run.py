"""What would be started, without starting it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from launcher import ports, registry, target
from launcher.backends import env_table
from launcher.job import Job
from launcher.local.launch_infos import of_node

FOLDER = "FOLDER"  # stands for the temporary folder in which ranks leave how they ended


def lines(job: Job, name: str) -> Iterator[str]:
    """The command, and the LaunchInfo of each rank that it starts, as far as it is known now."""
    chosen = registry.find(name)
    target.check(job.target)
    if hasattr(chosen, "command"):
        variables = chosen.environment(job) if hasattr(chosen, "environment") else {}
        settings = [f"{key}={shlex.quote(value)}" for key, value in sorted(variables.items())]
        real = replace(job, results_dir=FOLDER, log_dir=None)
        yield " ".join([*settings, shlex.join(chosen.command(real))])
    else:
        what = "threads" if name == "threads" else "processes"
        yield f"{job.nprocs} {what} of {shlex.join(job.rank_command())}"
    yield from map(json.dumps, _ranks(job, chosen))


def _ranks(job: Job, chosen: Any) -> Iterator[dict[str, object]]:
    port = job.master_port or ports.candidates(job.launch_id)[0]
    starts_all = getattr(chosen, "STARTS_ALL_NODES", False)
    foreseen = env_table.foreseen(chosen.NAME, job) if starts_all else {}
    if hasattr(chosen, "foreseen"):
        foreseen = chosen.foreseen(job)
    for node in range(job.nnodes) if starts_all else [job.node_rank]:
        for info in of_node(replace(job, node_rank=node), port, {}, {}):
            yield {**info.to_dict(), **foreseen}
