"""What would be started, without starting it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace

from launcher import ports, registry, target
from launcher.infos import of_node
from launcher.job import Job


def lines(job: Job, name: str) -> Iterator[str]:
    """The command, and the LaunchInfo of each rank of this node as far as it is known now."""
    chosen = registry.find(name)
    target.check(job.target)
    if hasattr(chosen, "command"):
        variables = chosen.environment(job) if hasattr(chosen, "environment") else {}
        settings = [f"{key}={shlex.quote(value)}" for key, value in sorted(variables.items())]
        yield " ".join([*settings, shlex.join(chosen.command(job))])
    else:
        what = "threads" if name == "threads" else "processes"
        yield f"{job.nprocs} {what} of {shlex.join(job.rank_command())}"
    likely = replace(job, master_port=job.master_port or ports.candidates(job.launch_id)[0])
    for info in of_node(likely, likely.master_port, {}, {}):
        yield info.to_bytes().decode()
