"""A launch on this machine, from its first pipe to the last of its processes."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import replace
from typing import Any

from launcher import launch_secret, ports
from launcher.job import Job
from launcher.local import auto_preload, cpu_affinity
from launcher.local.cpu_affinity import CpuSet
from launcher.local.fork_server import OMP_THREADS, ForkPlan
from launcher.local.fork_server_handle import ForkServerHandle
from launcher.local.launch_infos import infos_for_node
from launcher.local.launch_watch import LaunchWatch
from launcher.local.supervisor import LauncherPipes
from launcher.runtime.output import Output, check_log_folder
from launcher.runtime.rank_process import RankPipes, RankSetup
from launcher.system import linux, stop_signals


def launch_local(
    job: Job, owns_process: bool = False, watch: LaunchWatch | None = None
) -> list[Any]:
    """Each rank's result, by rank. Raises LaunchError if one fails.

    Of several nodes, those of this one; they meet before, unless the job has their secret already.

    owns_process: this process exists only for this launch (the command line), so its ranks may
    leave it as any Python program ends, by unwinding. watch: for other threads of the program.
    """
    _check_open_files(job)
    cpu_sets = cpu_affinity.assign_cpus(job.nprocs) if job.bind else []
    if job.nnodes > 1 and job.secret is None:
        from launcher.external import node_rendezvous  # not needed by a launch of one node

        if job.log_dir:
            check_log_folder(job.log_dir)
        job = node_rendezvous.meet(job)
    linux.open_missing_streams()
    output = Output(job)
    for rank, cpu_set in enumerate(cpu_sets):
        output.notice(f"rank {rank}: {cpu_set}")
    opened = contextlib.ExitStack()
    try:
        opened.callback(output.close)
        plan, pipes = _prepare(job, cpu_sets, owns_process, opened)
        _note_missing_devices(plan, output)
        # From here on until the supervisor's loop runs, a Ctrl-C would leave processes behind. The
        # ranks inherit the mask; rank_process unblocks it there.
        stop_signals.block()
        opened.callback(stop_signals.unblock)
        server = ForkServerHandle(plan, pipes, output)
    except (Exception, KeyboardInterrupt):  # not SystemExit, by which a rank leaves
        opened.close()
        raise
    _close(plan)
    infos = [setup.info for setup in plan.ranks]
    if job.nnodes == 1:
        return server.supervise(infos, watch)
    from launcher.external.failed_rank import telling_other_nodes  # nor this

    with telling_other_nodes(job) as tell:
        return server.supervise(infos, watch, tell)


def _check_open_files(job: Job) -> None:
    """Raise ValueError if two ends of three pipes per rank, two logs, and 64 more, are too many."""
    needed = job.nprocs * (6 + 2 * bool(job.log_dir)) + 64
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        raise ValueError(
            f"{job.nprocs} ranks need {needed} open files in their launcher, and {allowed} are "
            f"allowed: `ulimit -n {needed}` allows more."
        )


def _prepare(
    job: Job, cpu_sets: list[CpuSet], owns_process: bool, opened: contextlib.ExitStack
) -> tuple[ForkPlan, LauncherPipes]:
    """The ports of the launch, its secret and all pipes: made before the first rank.

    opened: closes them, if the launch does not begin.
    """
    port, shared = _meeting_point(job, opened)
    job = replace(job, token=None, command=(), secret=None)  # not for the processes below
    holder = ports.reserve_for_torch(job.launch_id, port)
    opened.callback(holder.close)
    torch_port = holder.getsockname()[1]
    if job.nnodes > 1:  # all of them must name the same one
        torch_port = job.torch_port
    first_extras = {name: str(fd) for name, fd in shared.items()}
    extras = {name: text for name, text in first_extras.items() if name != "master_fd"}
    infos = infos_for_node(job, port, extras, first_extras)
    pipes = [[_pipe(opened) for _ in RankPipes._fields] for _ in infos]
    cores = [cpu_set.cpus for cpu_set in cpu_sets] or [()] * job.nprocs
    setups = [
        RankSetup(info, RankPipes(*(end for _, end in own)), torch_port, cpus)
        for info, own, cpus in zip(infos, pipes, cores, strict=True)
    ]
    commands, reports = _pipe(opened), _pipe(opened)
    plan = ForkPlan(
        job,
        setups,
        os.getpid(),
        commands[0],
        reports[1],
        owns_process,
        auto_preload.choose(job),
        shared=tuple(shared.values()),
        environment=omp_environment(job, cpu_sets),
    )
    reading = [RankPipes(*(end for end, _ in own)) for own in pipes]
    return plan, LauncherPipes(commands[1], reports[0], reading, holder)


def _pipe(opened: contextlib.ExitStack) -> tuple[int, int]:
    reading, writing = os.pipe()
    return _held(opened, reading), _held(opened, writing)


def _held(opened: contextlib.ExitStack, fd: int) -> int:
    opened.callback(os.close, fd)
    return fd


def _meeting_point(job: Job, opened: contextlib.ExitStack) -> tuple[int, dict[str, int]]:
    """The Coordinator's port, and the descriptors of the launch by their names in extras.

    Of several nodes each has this function, with the secret and the launch id that the first one
    has chosen, and the port of both; rank 0 listens there itself.
    """
    if job.nnodes > 1:
        assert job.secret is not None
        return job.master_port, {"secret_fd": _held(opened, launch_secret.store(job.secret))}
    listener = ports.listen(job.launch_id, job.master_addr, job.master_port)
    port = listener.getsockname()[1]
    master_fd = _held(opened, listener.detach())
    return port, {"master_fd": master_fd, "secret_fd": _held(opened, launch_secret.create())}


def omp_environment(job: Job, cpu_sets: list[CpuSet]) -> dict[str, str]:
    """OMP_NUM_THREADS for each rank: its share of the cores, unless the variable is set already.

    With more, the ranks' threads would wait for each other, spinning.
    """
    if OMP_THREADS in os.environ:
        return {}
    share = len(os.sched_getaffinity(0)) // job.nprocs
    count = min((cpu_set.num_cores for cpu_set in cpu_sets), default=share)
    return {OMP_THREADS: str(max(1, count))}


def _note_missing_devices(plan: ForkPlan, output: Output) -> None:
    without = [setup.info.rank for setup in plan.ranks if "device" not in setup.info.extras]
    count = len(plan.ranks) - len(without)
    if count and without:
        output.notice(
            f"{count} GPUs for {len(plan.ranks)} ranks: ranks {without[0]} and up have none"
        )


def _close(plan: ForkPlan) -> None:
    for fd in plan.descriptors():
        os.close(fd)
