"""The fork server in a new interpreter, where the program or what it imports must not be forked.

Its plan goes through a file as JSON; the pipes to the launcher are inherited under their numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any, NoReturn

from launcher import target
from launcher.job import Job, Target
from launcher.launch_info import LaunchInfo
from launcher.local import fork_server
from launcher.local.auto_preload import ImportedNames, Preload
from launcher.local.fork_server import ForkPlan
from launcher.records import json_values
from launcher.runtime.rank_process import RankPipes, RankSetup

PROGRAM = """
import json, sys
with open(int(sys.argv[1])) as file:
    text = file.read()
sys.path[:] = json.loads(text)["path"]
from launcher.local import fork_server_exec
fork_server_exec.main(text)
"""


def spawn(plan: ForkPlan) -> subprocess.Popen[bytes]:
    """Start the fork server in a new interpreter."""
    file = _written(plan)
    try:
        return subprocess.Popen(_command(file), pass_fds=[file, *plan.descriptors()])
    finally:
        os.close(file)


def restart(plan: ForkPlan) -> NoReturn:
    """Turn this process, a fork server, into a new interpreter that serves this plan."""
    file = _written(plan)
    for fd in (file, *plan.descriptors()):
        os.set_inheritable(fd, True)
    os.execv(sys.executable, _command(file))


def _command(file: int) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(file)]


def _written(plan: ForkPlan) -> int:
    file = os.memfd_create("plan")
    os.write(file, _dumps(plan).encode())
    os.lseek(file, 0, os.SEEK_SET)
    return file


def main(text: str) -> None:
    """Run the fork server in this process, which exists for that alone."""
    plan = _loads(text)
    for fd in plan.descriptors():  # inheritable for this interpreter alone: not for what ranks run
        os.set_inheritable(fd, False)
    sys.exit(fork_server.serve(plan, restart))


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
    ranks = [
        RankSetup(LaunchInfo(**setup.pop("info")), RankPipes(*setup.pop("pipes")), **setup)
        for setup in plan["ranks"]
    ]
    imports, *rest = plan["preload"]
    preload = Preload([ImportedNames(*names) for names in imports], *rest)
    return ForkPlan(**{**plan, "job": job, "ranks": ranks, "preload": preload})
