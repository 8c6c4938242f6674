"""A rank that an external launcher has started.

    python -m launcher.external.rank_main FOLDER KIND NAME ARGUMENTS...

It runs a target, and leaves the result, or the failure, in FOLDER, in a file named after its rank.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher import detection, target
from launcher.backends import torchrun
from launcher.external import rank_wrapper
from launcher.job import Job, Target
from launcher.launch_info import LaunchInfo
from launcher.records import json_values
from launcher.runtime import rank_process
from launcher.trace import recorder

LOGS = "logs"  # in FOLDER, a link to the folder for what ranks print, if that is wanted


def main(folder: str, kind: str, name: str, *arguments: str) -> int:
    """The exit code of the target. arguments: those of a script, or a function's as one JSON."""
    args = json_values.loads(arguments[0]) if kind == "function" else arguments
    job = Job(Target(kind, name), args=tuple(args))  # type: ignore[arg-type]
    end = rank_wrapper.attended(functools.partial(_rank, Path(folder), job), Path(folder, LOGS))
    if isinstance(end, int):
        return end
    is_silent = end.who and not _file(Path(folder), end.who["rank"]).exists()
    if end.exit_code and is_silent:
        _leave(Path(folder), end.who["rank"], json_values.dumps({"failure": end.failure}))
    return end.exit_code


def _rank(folder: Path, job: Job, tell: Callable[..., None]) -> int:
    info = detection.current()
    tell(rank=info.rank, local_rank=info.local_rank)
    if info.rank != 0:
        _close_input()
    record = outcome(job, info)
    failure = record.get("failure", {"exit_code": 0, "type": "SystemExit"})
    if failure["type"] != "SystemExit":
        print(failure["traceback"], file=sys.stderr, end="")
    _leave(folder, info.rank, json_values.dumps(record))
    return int(failure["exit_code"])


def _close_input() -> None:
    """Standard input is rank 0's: any other finds its end at once, where engines leave it open."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if null != 0:
        os.close(null)


def outcome(job: Job, info: LaunchInfo) -> dict[str, Any]:
    """Run the job's target; how that went is {"result": ...} or {"failure": ...}."""
    try:
        with recorder.whole(info, job.target.name):
            result = target.call(job)
        json_values.dumps(result)  # what cannot travel is this rank's failure
        return {"result": result}
    except BaseException as error:
        if rank_process.exit_code(error) == 0:
            return {"result": None}
        torchrun.leave_error(os.environ, error)
        who = {"rank": info.rank, "local_rank": info.local_rank, "pid": os.getpid()}
        return {"failure": {**rank_process.describe(error), **who}}


def _leave(folder: Path, rank: int, text: str) -> None:
    """A whole file or none, for whoever looks."""
    part = folder / f".{rank}.part"
    part.write_text(text)
    part.rename(_file(folder, rank))


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
