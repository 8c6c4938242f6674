"""Launches through a backend launcher (torchrun, mpiexec, srun): run and watch its command.

The backend launcher owns its processes: it is asked to end, and launcher/external/reaper.py kills
what is left of it then.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher import errors, launch_secret, ports, target, timings
from launcher.errors import Failure, LaunchError, LaunchTimeout
from launcher.external import node_rendezvous
from launcher.external.rank_main import LOGS
from launcher.external.suspended import SuspendedProcesses
from launcher.job import Job
from launcher.records import json_values
from launcher.records.temporary_folder import temporary_folder
from launcher.runtime import output, rank_environment
from launcher.system import descendants, linux, shadowing, stop_signals
from launcher.system.held_forks import explained_limit
from launcher.system.oom_kills import OomKills


def run(backend: Any, job: Job) -> list[Any]:
    """Run the backend's command for this node; the results of a function by rank.

    The results come through a folder of this machine: None each for a script or a module.
    """
    shadowing.check(["."])  # `python -m` of each rank looks there first
    began_s, oom_kills = time.monotonic(), OomKills()
    with temporary_folder("drumline-launch-") as (folder, holder_fd):
        job = replace(job, target=target.by_reference(job.target), results_dir=str(folder))
        if job.log_dir:
            output.check_log_folder(job.log_dir)
            (folder / LOGS).symlink_to(Path(job.log_dir).absolute())
            job = replace(job, log_dir=None)
        if job.nnodes > 1 and getattr(backend, "STARTS_ALL_NODES", False):
            job = replace(job, **ports.of_nodes(job.launch_id, job.master_port))
        elif job.nnodes > 1:
            job = node_rendezvous.meet(job)
        try:
            with _torch_port(job) as port_variables, linux.adopting():
                environ = {**environment(backend, job), **port_variables}
                code = _watch(
                    folder, backend.command(job), environ, job.timeout_s, began_s, holder_fd
                )
        except LaunchError as ended:
            ended.failures = _failures(_records(folder), began_s)
            if not _is_consequence(ended, job.timeout_s):
                raise
            code = ended.exit_code
        records = _records(folder)
    failures = _failures(records, began_s)
    if code and records:
        _check_for_silent_ranks(backend, job, set(records), failures)
    if code and all(failure.ended_by_launcher for failure in failures):
        raise _ended(backend.NAME, code, failures)
    if failures:
        first = failures[0]
        note = oom_kills.note(first.rank) if first.signal == signal.SIGKILL else ""
        raise errors.failed(failures, note)
    if job.target.kind == "function" and len(records) < job.nprocs:
        raise LaunchError(f"only {len(records)} of {job.nprocs} ranks wrote a result")
    return [record["result"] for record in records.values()] or [None] * job.nprocs


@contextlib.contextmanager
def _torch_port(job: Job) -> Iterator[dict[str, str]]:
    """The variable of the port that is kept for torch.distributed within this context.

    Of several nodes this may not be that of rank 0, which then keeps a port itself.
    """
    if job.nnodes > 1:
        yield {}
        return
    with ports.reserve_for_torch(job.launch_id, job.master_port) as holder:
        yield {rank_environment.TORCH_PORT: str(holder.getsockname()[1])}


def _records(folder: Path) -> dict[int, dict[str, Any]]:
    """The record of its end that each rank of this machine has written, by rank."""
    files = sorted(folder.glob("[0-9]*.json"), key=lambda file: int(file.stem))
    return {int(file.stem): json_values.loads(file.read_bytes()) for file in files}


def _failures(records: dict[int, dict[str, Any]], began_s: float) -> tuple[Failure, ...]:
    """The failures of ranks that have written a record, the cause first."""
    reports = [record["failure"] for record in records.values() if "failure" in record]
    return errors.by_cause(
        Failure(**{**report, "time_s": report["time_s"] - began_s}) for report in reports
    )


def _is_consequence(ended: LaunchError, timeout_s: float | None) -> bool:
    """True for a time-out after the failure of a rank that was written down only later."""
    if not isinstance(ended, LaunchTimeout) or timeout_s is None or not ended.failures:
        return False
    first = ended.failures[0]
    died_s = first.time_s - timings.TIMINGS.reap_lag_s
    return not first.ended_by_launcher and died_s < timeout_s


def _check_for_silent_ranks(
    backend: Any, job: Job, recorded: set[int], failures: tuple[Failure, ...]
) -> None:
    """Raise LaunchError if ranks of this node have left no record, and no other rank is a cause."""
    starts_all = getattr(backend, "STARTS_ALL_NODES", False)
    if starts_all and job.nnodes > 1:
        return  # the records of other nodes are not here
    first = job.first_rank
    silent = sorted({*range(first, first + job.nprocs)} - recorded)
    causes = [failure for failure in failures if not failure.ended_by_launcher]
    if silent and all({*failure.blames} & {*silent} for failure in causes):
        ranks = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
        raise LaunchError(
            f"{ranks} exited without reporting anything: the process, or its launcher, was "
            "killed from outside.",
            failures,
            128 + signal.SIGKILL,
        )


def _ended(name: str, code: int, failures: tuple[Failure, ...]) -> LaunchError:
    """The end of a backend launcher that no rank explains."""
    text = f"{name} exited with code {code}"
    if code > 128:  # mpiexec exits with the code of the process that was killed
        killed = f"was killed by {errors.signal_name(code - 128)}"
        text = f"{name}, or a process that it runs, {killed}"
    return LaunchError(text, failures, code)


def environment(backend: Any, job: Job) -> dict[str, str]:
    """Ours, without those of an enclosing launch, with the variables of the backend.

    They carry the launch secret: a new one, or that of several nodes which have a command each.
    """
    variables = rank_environment.without_launch(os.environ)
    secret = os.urandom(launch_secret.NBYTES) if job.secret is None else job.secret
    variables[launch_secret.SECRET] = secret.hex()
    variables.update(rank_environment.job_variables(job))
    return {**variables, **(backend.environment(job) if hasattr(backend, "environment") else {})}


def _watch(
    folder: Path,
    command: list[str],
    environ: dict[str, str],
    timeout_s: float | None,
    began_s: float,
    holder_fd: int,
) -> int:
    """The exit code of the command. began_s: of the launch, from when timeout_s counts."""
    deadline = math.inf if timeout_s is None else began_s + timeout_s
    command = [sys.executable, "-m", "launcher.external.reaper", str(os.getpid()), *command]
    orphans = descendants.Orphans()
    # The reaper inherits the mask: it takes a signal once it has handlers, not in Python's start.
    stop_signals.block()
    try:
        with explained_limit():
            process = subprocess.Popen(
                command, env=environ, start_new_session=True, pass_fds=[holder_fd]
            )
    except BaseException:
        stop_signals.unblock()
        raise
    suspended = SuspendedProcesses(process.pid)
    signals: list[int] = []

    def pass_on(number: int) -> None:  # the reaper kills at the second, unless it is SIGTERM
        signals.append(number)
        _signal(process, number)

    try:
        with stop_signals.handled_by(pass_on):
            stop_signals.unblock()
            code = _wait(process, folder, deadline, suspended)
    except subprocess.TimeoutExpired as error:
        raise errors.timed_out(timeout_s, note=suspended.note()) from error
    finally:
        _end(process)
        if process.returncode != 0:  # killed, in any way: then it has ended nothing below it
            orphans.kill()
    if signals:
        raise errors.interrupted(signals[0])
    if code < 0:
        raise LaunchError(
            f"the process that supervises the backend launcher was killed by "
            f"{errors.signal_name(-code)}, so all ranks of this node were ended.",
            exit_code=linux.shell_exit_code(code),
        )
    return linux.shell_exit_code(code)


def _wait(
    process: subprocess.Popen[bytes], folder: Path, deadline: float, suspended: SuspendedProcesses
) -> int:
    """The reaper's exit status. It is asked to end what still runs a while after a failure.

    After one before the deadline that is no longer one, so that the failure is told as the cause.
    """
    end_at, look_at = math.inf, time.monotonic() + timings.TIMINGS.suspended_poll_s
    while (now := time.monotonic()) < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(timings.TIMINGS.backend_poll_s, deadline - now))
        if end_at == math.inf and any("failure" in record for record in _records(folder).values()):
            end_at = min(now + timings.TIMINGS.backend_grace_s, deadline)
            deadline = max(deadline, end_at + timings.TIMINGS.reaper_exit_s)
        if now > end_at:
            _signal(process, signal.SIGTERM)
            end_at = deadline
        if now > look_at:
            suspended.tell()
            look_at = now + timings.TIMINGS.suspended_poll_s
    raise subprocess.TimeoutExpired(process.args, deadline)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal the reaper, also if somebody has suspended it."""
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timings.TIMINGS.reaper_exit_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
