"""`--dry-run`: show what would be started."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from launcher import ports, registry, target
from launcher.backends import env_table
from launcher.job import Job
from launcher.local import auto_preload
from launcher.local.launch_infos import infos_for_node
from launcher.runtime import rank_environment

FOLDER = "FOLDER"  # stands for the temporary folder of the results


def lines(job: Job, name: str) -> Iterator[str]:
    """The command, and the LaunchInfo of each rank that it starts, as far as it is known before."""
    backend = registry.find(name)
    target.check(job.target)
    if hasattr(backend, "command"):
        variables = rank_environment.job_variables(job)
        variables |= backend.environment(job) if hasattr(backend, "environment") else {}
        settings = [f"{key}={shlex.quote(value)}" for key, value in sorted(variables.items())]
        shown_job = replace(job, results_dir=FOLDER, log_dir=None)
        yield " ".join([*settings, shlex.join(backend.command(shown_job))])
    else:
        kind = "threads" if name == "threads" else "processes"
        preload = f"; {_preload_text(job)}" if name == "multiprocessing" else ""
        yield f"{job.nprocs} {kind} of {shlex.join(job.rank_command())}{preload}"
    yield from map(json.dumps, _ranks(job, backend))


def _preload_text(job: Job) -> str:
    imports, note, _ = auto_preload.choose(job)
    modules = ", ".join(module for module, _ in imports) or "nothing"
    return f"imported once, before they are forked: {modules} ({note})"


def _ranks(job: Job, backend: Any) -> Iterator[dict[str, object]]:
    port = job.master_port or ports.candidates(job.launch_id)[0]
    starts_all = getattr(backend, "STARTS_ALL_NODES", False)
    expected = env_table.expected_info(backend.NAME, job) if starts_all else {}
    if hasattr(backend, "expected_info"):
        expected = backend.expected_info(job)
    for node in range(job.nnodes) if starts_all else [job.node_rank]:
        for info in infos_for_node(replace(job, node_rank=node), port, {}, {}):
            yield {**info.to_dict(), **expected}
