"""Launches through a backend launcher (torchrun, mpiexec, srun): run and watch its command.

The backend launcher owns its processes: it is asked to end, and launcher/external/reaper.py kills
what is left of it then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher import errors, launch_secret, target, timings
from launcher.errors import Failure, LaunchError
from launcher.external.rank_main import LOGS
from launcher.job import Job
from launcher.launch_info import ENV_PREFIX
from launcher.records import json_values
from launcher.runtime import outcome
from launcher.runtime.output import Output
from launcher.system import linux, shadowing
from launcher.system.stop_signals import STOP_SIGNALS
from launcher.trace import recorder


def run(backend: Any, job: Job) -> list[Any]:
    """Run the backend's command for this node; the results of a function by rank.

    The results come through a folder of this machine: None each for a script or a module.
    """
    shadowing.check(["."])  # `python -m` of each rank looks there first
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"drumline-launch-{os.getpid()}-") as folder:
        job = replace(job, target=target.by_reference(job.target), results_dir=folder)
        if job.log_dir:
            _link_logs(job.log_dir, Path(folder))
            job = replace(job, log_dir=None)
        code = _watch(folder, backend.command(job), environment(backend, job), job.timeout_s)
        files = sorted(Path(folder).glob("[0-9]*.json"), key=lambda file: int(file.stem))
        records = [json_values.loads(file.read_bytes()) for file in files]
    reports = [record["failure"] for record in records if "failure" in record]
    failures = [Failure(**{**report, "time_s": report["time_s"] - began_s}) for report in reports]
    failures.sort(key=outcome.by_cause)
    if failures:
        raise errors.failed(failures)
    if code:
        raise LaunchError(f"{backend.NAME} exited with code {code}", exit_code=code)
    if job.target.kind == "function" and len(records) < job.nprocs:
        raise LaunchError(f"only {len(records)} of {job.nprocs} ranks wrote a result")
    return [record["result"] for record in records] or [None] * job.nprocs


def _link_logs(log_dir: str, folder: Path) -> None:
    """Link log_dir into folder for the wrapper of each rank: no backend needs to know of it."""
    logs = Path(log_dir).absolute()
    Output(str(logs)).close()
    try:
        with tempfile.TemporaryFile(dir=logs):  # refused here, and not by a rank later
            (folder / LOGS).symlink_to(logs)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the log folder {log_dir!r} cannot be written ({error.strerror}), so the output of "
            "the ranks would be lost and none was started. Name another with --log-dir.",
        ) from error


def environment(backend: Any, job: Job) -> dict[str, str]:
    """Ours, without the LaunchInfo of an enclosing launch, with the variables of the backend.

    Where one command starts every rank, it carries the launch secret. Where each node has its own,
    the same secret may be set for all.
    """
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)
    }
    if job.nnodes == 1:
        variables.update(launch_secret.variables())
    elif launch_secret.SECRET in os.environ:
        variables[launch_secret.SECRET] = os.environ[launch_secret.SECRET]
    if job.trace:
        variables[recorder.VARIABLE] = job.trace
    return {**variables, **(backend.environment(job) if hasattr(backend, "environment") else {})}


def _watch(
    folder: str, command: list[str], environ: dict[str, str], timeout_s: float | None
) -> int:
    reaper = [sys.executable, "-m", "launcher.external.reaper", str(os.getpid()), folder]
    process = subprocess.Popen([*reaper, *command], env=environ, start_new_session=True)
    try:
        with _passing_signals(process) as signals:
            code = process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        raise errors.timed_out(timeout_s) from error
    finally:
        _end(process)
    if signals:
        raise errors.interrupted(signals[0])
    return linux.shell_exit_code(code)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timings.TIMINGS.reaper_exit_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _passing_signals(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass stop signals on to the reaper, which kills at the second; yield those received."""
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return

    def handle(number: int, _frame: object) -> None:
        signals.append(number)
        process.send_signal(number)

    old = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
