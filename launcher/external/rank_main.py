"""The main program of a rank that a backend launcher starts.

    python -m launcher.external.rank_main FOLDER KIND NAME ARGUMENTS...

It runs a target, and writes the result, or the failure, to FOLDER, into a file named after its
rank.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher import detection, ports
from launcher.errors import Failure
from launcher.external import rank_wrapper
from launcher.job import Job, Target
from launcher.launch_info import LaunchInfo
from launcher.records import json_values
from launcher.runtime import rank_environment, rank_process
from launcher.system import linux, nesting

LOGS = "logs"  # in FOLDER, a link to the folder for the output of ranks, if there is one


def main(folder: str, kind: str, name: str, *arguments: str) -> int:
    """The exit code of the target. arguments: those of a script, or a function's as one JSON."""
    args = json_values.loads(arguments[0]) if kind == "function" else arguments
    job = Job(Target(kind, name), args=tuple(args))  # type: ignore[arg-type]
    run_rank = functools.partial(_run_rank, Path(folder), job)
    ended = rank_wrapper.run_wrapped(run_rank, Path(folder, LOGS))
    if isinstance(ended, int):
        return ended
    rank = ended.identity.get("rank")
    if ended.exit_code and rank is not None:
        complete_record(Path(folder), rank, ended.failure)
    return ended.exit_code


def complete_record(folder: Path, rank: int, failure: dict[str, Any]) -> None:
    """Write the file of a rank that was killed; of others, the traceback to their log.

    Where it cannot be written, a signal that the launcher did not send is told here.
    """
    file, log = _file(folder, rank), folder / LOGS / f"rank-{rank}.err"
    reported = json_values.loads(file.read_bytes()).get("failure") if file.exists() else None
    if reported is None:  # or it has a result, and died in an exit handler
        is_cause = failure.get("signal") and not failure.get("ended_by_launcher")
        if not write_record(folder, rank, {"failure": failure}) and is_cause:
            print(Failure(**failure).summary(), failure["traceback"], sep="\n", file=sys.stderr)
    elif log.exists():
        with _naming_unwritable(log), log.open("a", encoding="utf-8", errors="replace") as end:
            end.write(reported["traceback"])


def _run_rank(folder: Path, job: Job, report_identity: Callable[..., None]) -> int:
    info = detection.current()
    report_identity(rank=info.rank, local_rank=info.local_rank)
    linux.set_process_name(f"rank {info.rank}")
    if info.rank != 0:
        rank_process.close_stdin()
    with _torchrun_variables(info):
        return rank_process.run_target(job, info, functools.partial(_report, folder, info.rank))


def _report(folder: Path, rank: int, record: dict[str, Any]) -> None:
    failure = record.get("failure", {"type": "SystemExit"})
    if not write_record(folder, rank, record) and failure["type"] != "SystemExit":
        print(failure["traceback"], file=sys.stderr, end="")  # the launcher will not


@contextlib.contextmanager
def _torchrun_variables(info: LaunchInfo) -> Iterator[None]:
    """Set torchrun's variables, unless torchrun has. MASTER_PORT stays free within this context.

    Backends that read MASTER_PORT take it for the Coordinator's. So the LaunchInfo goes into the
    environment too, and the next `launcher.current()` finds it there.
    """
    with contextlib.ExitStack() as held:
        rank_environment.set_default_device()
        restart_count = int(os.environ.get(rank_environment.RESTART_COUNT, 0))
        if restart_count:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restart_count)
        if info.extras.get("store") != "agent":
            variable = os.environ.get(rank_environment.TORCH_PORT)
            port = int(variable or 0) or ports.torch_candidates(info.launch_id, info.master_port)[0]
            if info.rank == 0 and info.local_world_size < info.world_size:
                # The port of the variable may be kept already, by the launcher on this host.
                with contextlib.suppress(*((OSError,) if variable else ())):
                    held.enter_context(ports.reserve([port]))
            extras = {name: text for name, text in info.extras.items() if name != "secret_fd"}
            rank_info = replace(info, extras={**extras, **nesting.extras(os.environ)})
            rank_environment.set_variables(rank_info, port, restart_count)
        yield


def write_record(folder: Path, rank: int, record: dict[str, Any]) -> bool:
    """Write a whole file or none: the launcher may read at any time.

    False if FOLDER is not here: it is on the node of the launcher; or if it cannot be written.
    """
    part = folder / f".{rank}.part"
    if folder.is_dir():
        with _naming_unwritable(folder):
            part.write_text(json_values.dumps(record))
            part.rename(_file(folder, rank))
            return True
    return False


@contextlib.contextmanager
def _naming_unwritable(path: Path) -> Iterator[None]:
    """Print that the path cannot be written, in place of an error, which would hide the rank's."""
    try:
        yield
    except OSError as error:
        print(f"[launcher] {path} cannot be written: {error.strerror}", file=sys.stderr)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
