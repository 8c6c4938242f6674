"""A launch on this machine, from its first pipe to the last of its processes."""

from __future__ import annotations

import os
import resource
from typing import Any

from launcher import launch_secret, ports
from launcher.job import Job
from launcher.local import cpu_affinity
from launcher.local.fork_server import Plan
from launcher.local.fork_server_handle import KeeperProcess
from launcher.local.launch_infos import of_node
from launcher.local.supervisor import Ears
from launcher.runtime.output import Output
from launcher.runtime.rank_process import Seat
from launcher.system import linux, stop_signals

OMP_THREADS = "OMP_NUM_THREADS"


def run(job: Job, owns_process: bool = False) -> list[Any]:
    """Each rank's result, by rank. Raises LaunchError if one fails.

    owns_process: this process exists only for this launch (the command line), so its ranks may
    leave it as any Python program ends, by unwinding.
    """
    _check(job)
    linux.open_missing_streams()
    places = cpu_affinity.places(job.nprocs) if job.bind else []
    output = Output(job.log_dir, job.nprocs)
    for rank, place in enumerate(places):
        output.notice(f"rank {rank}: {place}")
    plan, ears = _prepare(job, places, owns_process)
    _note_missing_devices(plan, output)
    stop_signals.hold_back()
    try:
        child = KeeperProcess(plan, ears, output)
    except Exception:  # not SystemExit, by which a rank leaves: it has closed what it must
        stop_signals.release()
        _close(plan)
        ears.close()
        output.close()
        raise
    _close(plan)
    return child.supervise([seat.info for seat in plan.seats])


def _check(job: Job) -> None:
    needed, allowed = _files_needed(job), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        raise ValueError(
            f"{job.nprocs} ranks need {needed} open files in their launcher, and {allowed} are "
            f"allowed: `ulimit -n {needed}` allows more."
        )


def _files_needed(job: Job) -> int:
    """Both ends of three pipes per rank, two logs, and some for everything else."""
    return job.nprocs * (6 + 2 * bool(job.log_dir)) + 64


def _prepare(job: Job, places: list[cpu_affinity.Place], owns_process: bool) -> tuple[Plan, Ears]:
    """Everything that must exist before the first rank does."""
    listener = ports.listen(job.launch_id, job.master_addr, job.master_port)
    port, master_fd, secret_fd = (
        listener.getsockname()[1],
        listener.detach(),
        launch_secret.create(),
    )
    shared = {"secret_fd": str(secret_fd)}
    ranks = of_node(job, port, shared, {**shared, "master_fd": str(master_fd)})
    pipes = [(os.pipe(), os.pipe(), os.pipe()) for _ in ranks]
    cores = [place.cpus for place in places] or [()] * job.nprocs
    seats = [
        Seat(info, out[1], err[1], report[1], cores=mine)
        for info, (out, err, report), mine in zip(ranks, pipes, cores, strict=True)
    ]
    commands, reports = os.pipe(), os.pipe()
    plan = Plan(
        job,
        seats,
        commands[0],
        reports[1],
        owns_process,
        shared=(master_fd, secret_fd),
        environment=threads(job, places),
    )
    return plan, Ears(commands[1], reports[0], [(o[0], e[0], r[0]) for o, e, r in pipes])


def threads(job: Job, places: list[cpu_affinity.Place]) -> dict[str, str]:
    """As many OpenMP threads for each rank as it has cores, unless somebody has chosen already.

    With more, the ranks' threads would wait for each other, spinning.
    """
    if OMP_THREADS in os.environ:
        return {}
    share = len(os.sched_getaffinity(0)) // job.nprocs
    count = min((place.num_cores for place in places), default=share)
    return {OMP_THREADS: str(max(1, count))}


def _note_missing_devices(plan: Plan, output: Output) -> None:
    without = [seat.info.rank for seat in plan.seats if "device" not in seat.info.extras]
    count = len(plan.seats) - len(without)
    if count and without:
        output.notice(f"{count} GPUs for {len(plan.seats)} ranks: rank {without[0]} on have none")


def _close(plan: Plan) -> None:
    for fd in plan.descriptors():
        os.close(fd)
