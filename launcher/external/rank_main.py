"""The main program of a rank that a backend launcher starts.

    python -m launcher.external.rank_main FOLDER KIND NAME ARGUMENTS...

It runs a target, and writes the result, or the failure, to FOLDER, into a file named after its
rank.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher import detection, target
from launcher.external import rank_wrapper, torch_error_file
from launcher.job import Job, Target
from launcher.launch_info import LaunchInfo
from launcher.records import json_values
from launcher.runtime import rank_process
from launcher.trace import recorder

LOGS = "logs"  # in FOLDER, a link to the folder for the output of ranks, if there is one


def main(folder: str, kind: str, name: str, *arguments: str) -> int:
    """The exit code of the target. arguments: those of a script, or a function's as one JSON."""
    args = json_values.loads(arguments[0]) if kind == "function" else arguments
    job = Job(Target(kind, name), args=tuple(args))  # type: ignore[arg-type]
    run_rank = functools.partial(_run_rank, Path(folder), job)
    ended = rank_wrapper.run_wrapped(run_rank, Path(folder, LOGS))
    if isinstance(ended, int):
        return ended
    # A rank that was killed has written no file: the wrapper writes it in its place.
    rank = ended.identity.get("rank")
    if ended.exit_code and rank is not None and not _file(Path(folder), rank).exists():
        _write_record(Path(folder), rank, {"failure": ended.failure})
    return ended.exit_code


def _run_rank(folder: Path, job: Job, report_identity: Callable[..., None]) -> int:
    info = detection.current()
    report_identity(rank=info.rank, local_rank=info.local_rank)
    if info.rank != 0:
        rank_process.close_stdin()
    record = run_target(job, info)
    failure = record.get("failure", {"exit_code": 0, "type": "SystemExit"})
    if failure["type"] != "SystemExit":
        print(failure["traceback"], file=sys.stderr, end="")
    _write_record(folder, info.rank, record)
    return int(failure["exit_code"])


def run_target(job: Job, info: LaunchInfo) -> dict[str, Any]:
    """Run the job's target; the record of that is {"result": ...} or {"failure": ...}."""
    try:
        with recorder.recording_span(info, job.target.name):
            result = target.call(job)
        json_values.dumps(result)  # a result that cannot be sent is this rank's failure
        return {"result": result}
    except BaseException as error:
        if rank_process.exit_code(error) == 0:
            return {"result": None}
        torch_error_file.write_error_file(os.environ, error)
        identity = {"rank": info.rank, "local_rank": info.local_rank, "pid": os.getpid()}
        return {"failure": {**rank_process.describe(error), **identity}}


def _write_record(folder: Path, rank: int, record: dict[str, Any]) -> None:
    """Write a whole file or none: the launcher may read at any time."""
    part = folder / f".{rank}.part"
    part.write_text(json_values.dumps(record))
    part.rename(_file(folder, rank))


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
