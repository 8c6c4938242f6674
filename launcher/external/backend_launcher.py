"""Letting an engine (torchrun, mpiexec, srun) start the ranks: its command line, run and watched.

The engine owns its processes: it is asked to end; launcher/external/reaper.py kills what then is
left of it.
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

from launcher import launch_secret, target
from launcher.errors import Failure, LaunchError, LaunchInterrupted, LaunchTimeout, signal_name
from launcher.external.rank_main import LOGS
from launcher.job import Job
from launcher.launch_info import ENV_PREFIX
from launcher.records import json_values
from launcher.runtime import outcome
from launcher.runtime.output import Output
from launcher.trace import recorder

GRACE_S = 10.0  # longer than the leash takes to end the engine, and all that descends from it
STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(chosen: Any, job: Job) -> list[Any]:
    """Run the engine's command for this node; results of a function by rank, from this machine."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"drumline-launch-{os.getpid()}-") as folder:
        job = replace(job, target=target.by_reference(job.target), results_dir=folder)
        if job.log_dir:
            _link_logs(job.log_dir, Path(folder))
            job = replace(job, log_dir=None)
        code = _watch(folder, chosen.command(job), environment(chosen, job), job.timeout_s)
        records = _records(Path(folder))
    failures = _failures(records, began_s)
    if failures:
        first = failures[0]
        raise LaunchError(f"{first.summary()}\n\n{first.traceback}", failures, first.exit_code)
    if code:
        raise LaunchError(f"{chosen.NAME} ended with exit code {code}", exit_code=code)
    if job.target.kind == "function" and len(records) < job.nprocs:
        raise LaunchError(f"only {len(records)} of {job.nprocs} ranks left a result")
    return [record["result"] for record in records] or [None] * job.nprocs


def _link_logs(log_dir: str, folder: Path) -> None:
    """Where each rank's attendant finds log_dir, so that engines need not know of it."""
    logs = Path(log_dir).absolute()
    Output(str(logs)).close()
    try:
        with tempfile.TemporaryFile(dir=logs):  # refused here, and not by a rank later
            (folder / LOGS).symlink_to(logs)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the folder {log_dir!r} for logs cannot be written ({error.strerror}), so what the "
            "ranks print would be lost and none was started. Name another with --log-dir.",
        ) from error


def environment(chosen: Any, job: Job) -> dict[str, str]:
    """Ours, without the LaunchInfo of a launch around this one, with what the engine needs.

    Where one command starts every rank, it carries the launch secret. Where each node has its own,
    whoever starts them may set the same secret for all.
    """
    outer = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    if job.nnodes == 1:
        outer.update(launch_secret.variables())
    elif launch_secret.SECRET in os.environ:
        outer[launch_secret.SECRET] = os.environ[launch_secret.SECRET]
    if job.trace:
        outer[recorder.VARIABLE] = job.trace
    return {**outer, **(chosen.environment(job) if hasattr(chosen, "environment") else {})}


def _watch(
    folder: str, command: list[str], environ: dict[str, str], timeout_s: float | None
) -> int:
    leash = [sys.executable, "-m", "launcher.external.reaper", str(os.getpid()), folder]
    process = subprocess.Popen([*leash, *command], env=environ, start_new_session=True)
    try:
        with _passing_signals(process) as seen:
            code = process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        raise LaunchTimeout(f"the launch took longer than {timeout_s} s", exit_code=124) from error
    finally:
        _end(process)
    if seen:
        raise LaunchInterrupted(
            f"the launch was stopped by {signal_name(seen[0])}", exit_code=128 + seen[0]
        )
    return code if code >= 0 else 128 - code


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _passing_signals(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass on to the leash what stops programs; it kills at the second. Gives those seen."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def handle(number: int, _frame: object) -> None:
        seen.append(number)
        process.send_signal(number)

    old = {number: signal.signal(number, handle) for number in STOPPING_SIGNALS}
    try:
        yield seen
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _records(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("[0-9]*.json"), key=lambda file: int(file.stem))
    return [json_values.loads(file.read_bytes()) for file in files]


def _failures(records: list[dict[str, Any]], began_s: float) -> tuple[Failure, ...]:
    said = [record["failure"] for record in records if "failure" in record]
    found = [Failure(**{**one, "time_s": one["time_s"] - began_s}) for one in said]
    return tuple(sorted(found, key=outcome.blame))
