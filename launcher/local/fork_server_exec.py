"""The fork server in a new interpreter, for a program that must not be forked.

Its plan goes through a pipe as JSON; the pipes to the launcher are inherited under their numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

from launcher import target
from launcher.job import Job, Target
from launcher.launch_info import LaunchInfo
from launcher.local import fork_server
from launcher.local.fork_server import ForkPlan
from launcher.records import json_values
from launcher.runtime.rank_process import RankSetup

PROGRAM = """
import json, sys
with open(int(sys.argv[1])) as pipe:
    text = pipe.read()
sys.path[:] = json.loads(text)["path"]
from launcher.local import fork_server_exec
fork_server_exec.main(text)
"""


def spawn(plan: ForkPlan) -> subprocess.Popen[bytes]:
    """Start the fork server in a new interpreter."""
    text = _dumps(plan)
    reading, writing = os.pipe()
    with open(writing, "w") as pipe:
        command = [sys.executable, "-c", PROGRAM, str(reading)]
        process = subprocess.Popen(command, pass_fds=[reading, *plan.descriptors()])
        os.close(reading)
        pipe.write(text)
    return process


def main(text: str) -> None:
    """Run the fork server in this process, which exists for that alone."""
    sys.exit(fork_server.serve(_loads(text)))


def _dumps(plan: ForkPlan) -> str:
    job = replace(plan.job, target=target.by_reference(plan.job.target))
    plain_job = {**vars(job), "target": {"kind": job.target.kind, "name": job.target.name}}
    ranks = [{**vars(setup), "info": setup.info.to_dict()} for setup in plan.ranks]
    plain_plan = {**vars(plan), "job": plain_job, "ranks": ranks, "owns_process": True}
    plain_plan["environment"] = dict(plan.environment)
    return json_values.dumps({"plan": plain_plan, "path": sys.path})


def _loads(text: str) -> ForkPlan:
    plan: dict[str, Any] = json_values.loads(text)["plan"]
    job = plan["job"]
    job = Job(**{**job, "target": Target(**job["target"]), "args": tuple(job["args"])})
    ranks = [RankSetup(**{**setup, "info": LaunchInfo(**setup["info"])}) for setup in plan["ranks"]]
    return ForkPlan(**{**plan, "job": job, "ranks": ranks})
