"""The process of ranks that are threads, below the reaper that ends what they leave.

    python -m launcher.backends.threads_main JOB

It runs a job, and writes how each rank has ended to the job's folder if one has failed.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from launcher.authentication import launch_token
from launcher.errors import LaunchError
from launcher.external import rank_main
from launcher.job import Job, Target
from launcher.local import auto_preload, rank_threads
from launcher.records import json_values
from launcher.runtime import log_setup, mpi_import_check, rank_process
from launcher.system import linux, stop_signals
from launcher.system.stop_signals import STOP_SIGNALS, Stopped

NAME = "the process of the threads"
# What knows ranks as processes only: names by module, "" for the module itself.
OF_PROCESSES = {
    "torch.distributed": {"", "init_process_group"},
    "accelerate": {"Accelerator", "PartialState"},
    "transformers": {"Trainer", "Seq2SeqTrainer"},
}

log = logging.getLogger("launcher")


def command(job: Job) -> list[str]:
    """The command that runs a job of a script or a module."""
    target = [job.target.kind, job.target.name]
    fields = {**vars(job), "target": target, "timeout_s": None}  # the launcher ends it then
    return [sys.executable, "-m", __name__, json_values.dumps(fields)]


def main(text: str) -> int:
    """The exit code: of the first failed rank, 128 + a stop signal's number, or 2 if none began."""
    fields = json_values.loads(text)
    job = Job(**{**fields, "target": Target(*fields["target"]), "args": tuple(fields["args"])})
    logs, began_s = Path(str(job.results_dir), rank_main.LOGS), time.monotonic()
    # The threads draw a secret of their own.
    linux.remove_variables(os.environ, launch_token.VARIABLES)
    faulthandler.enable()
    log_setup.configure()
    mpi_import_check.install("the ranks, threads of one process", job.nprocs)
    linux.set_process_name("ranks (threads)")
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, _raise_stopped)
        stop_signals.unblock()
        _import_before_threads(job)
        with rank_threads.rank_streams(replace(job, log_dir=str(logs) if logs.is_dir() else None)):
            rank_threads.run(job)
    except LaunchError as error:
        if error.failures:
            _write_records(job, error, began_s)
        else:
            print(error, file=sys.stderr)
        return error.exit_code
    except Stopped as stopped:
        return linux.shell_exit_code(-stopped.number)
    except (ValueError, OSError) as error:  # before a rank has started
        print(error, file=sys.stderr)
        return 2
    return 0


def _import_before_threads(job: Job) -> None:
    """Import libraries that the script wants: two threads at once get a lazy package half made.

    Warn of those to which the ranks would be as many worlds of one.
    """
    for names in auto_preload.choose(job).imports:
        if OF_PROCESSES.get(names.module, set()) & set(names.names or [""]):
            log.warning(
                "%s sees one process, not the %d ranks of this launch, which are threads: use "
                "another --launcher",
                names.module,
                job.nprocs,
            )
        try:
            names.load()
        except Exception:
            pass  # a rank will report it


def _raise_stopped(number: int, _frame: object) -> None:
    """Raise Stopped for the first stop signal; another, not SIGTERM, ends the process."""
    for again in STOP_SIGNALS:
        signal.signal(again, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: None)  # SIG_IGN would reach children
    raise Stopped(number)


def _write_records(job: Job, error: LaunchError, began_s: float) -> None:
    """Write each rank's record; one that still runs has none, and the launcher would miss it."""
    reports = {
        failure.rank: {**vars(failure), "time_s": began_s + failure.time_s}
        for failure in error.failures
    }
    for rank in range(job.nprocs):
        record = {"failure": reports[rank]} if rank in reports else {"result": None}
        rank_main.write_record(Path(str(job.results_dir)), rank, record)


if __name__ == "__main__":
    rank_process.end_process(main(*sys.argv[1:]))
