"""A keeper in a fresh interpreter, for a program that must not be forked.

What it is to keep goes through a pipe as JSON; the pipes to the launcher are inherited under their
numbers.
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
from launcher.local.fork_server import Plan
from launcher.records import json_values
from launcher.runtime.rank_process import Seat

PROGRAM = """
import json, sys
with open(int(sys.argv[1])) as pipe:
    text = pipe.read()
sys.path[:] = json.loads(text)["path"]
from launcher import fresh
fresh.main(text)
"""


def spawn(plan: Plan) -> subprocess.Popen[bytes]:
    """The fresh keeper."""
    text = _dumps(plan)
    reading, writing = os.pipe()
    with open(writing, "w") as pipe:
        command = [sys.executable, "-c", PROGRAM, str(reading)]
        process = subprocess.Popen(command, pass_fds=[reading, *plan.descriptors()])
        os.close(reading)
        pipe.write(text)
    return process


def main(text: str) -> None:
    sys.exit(fork_server.keep(_loads(text)))


def _dumps(plan: Plan) -> str:
    job = replace(plan.job, target=target.by_reference(plan.job.target))
    plain_job = {**vars(job), "target": {"kind": job.target.kind, "name": job.target.name}}
    seats = [{**vars(seat), "info": seat.info.to_dict()} for seat in plan.seats]
    whole = {**vars(plan), "job": plain_job, "seats": seats, "is_fresh": True}
    whole["environment"] = dict(plan.environment)
    return json_values.dumps({"plan": whole, "path": sys.path})


def _loads(text: str) -> Plan:
    found: dict[str, Any] = json_values.loads(text)["plan"]
    job = found["job"]
    job = Job(**{**job, "target": Target(**job["target"]), "args": tuple(job["args"])})
    seats = [Seat(**{**seat, "info": LaunchInfo(**seat["info"])}) for seat in found["seats"]]
    return Plan(**{**found, "job": job, "seats": seats})
