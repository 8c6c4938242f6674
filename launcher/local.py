"""A launch on this machine, from its first pipe to the last of its processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from typing import Any

from launcher import binding, fresh, keeper, linux, ports, secret
from launcher.info import LaunchInfo
from launcher.job import Job
from launcher.keeper import Plan
from launcher.output import Output
from launcher.seat import Seat
from launcher.supervisor import Ears, Supervisor


def run(job: Job, owns_process: bool = False) -> list[Any]:
    """Each rank's result, by rank. Raises LaunchError if one fails.

    owns_process: this process exists only for this launch (the command line), so its ranks may
    leave it as any Python program ends, by unwinding.
    """
    output = Output(job.log_dir, job.nprocs)
    plan, ears = prepare(job, owns_process)
    try:
        child = _Keeper(plan, ears, output)
    except (
        Exception
    ):  # a rank leaves through here by SystemExit, and must not close what is not its own
        _close(plan.descriptors(), ears, output)
        raise
    _close(plan.descriptors())
    return child.supervise([seat.info for seat in plan.seats])


def _close(descriptors: list[int], *others: Ears | Output) -> None:
    for fd in descriptors:
        os.close(fd)
    for other in others:
        other.close()


def prepare(job: Job, owns_process: bool = False) -> tuple[Plan, Ears]:
    """Everything that must exist before the first rank does."""
    if job.nnodes != 1:
        raise ValueError(
            f"this launcher starts ranks on one node, not {job.nnodes}: several nodes are "
            "the work of torchrun, mpi, slurm or ray. Name one with --launcher."
        )
    listener = ports.listen(job.launch_id, job.master_addr, job.master_port)
    port, master_fd, secret_fd = listener.getsockname()[1], listener.detach(), secret.create()
    places = binding.places(job.nprocs) if job.bind else [binding.Place()] * job.nprocs
    extras = [
        {"secret_fd": str(secret_fd), **({} if rank else {"master_fd": str(master_fd)})}
        for rank in range(job.nprocs)
    ]
    commands, reports = os.pipe(), os.pipe()
    pipes = [(os.pipe(), os.pipe(), os.pipe()) for _ in range(job.nprocs)]
    seats = [
        Seat(info, out[1], err[1], report[1], cores=place.cpus)
        for info, (out, err, report), place in zip(
            infos(job, port, extras), pipes, places, strict=True
        )
    ]
    plan = Plan(job, seats, commands[0], reports[1], owns_process, (master_fd, secret_fd))
    heard = [(out[0], err[0], report[0]) for out, err, report in pipes]
    return plan, Ears(commands[1], reports[0], heard)


def infos(job: Job, port: int, extras: list[dict[str, str]]) -> list[LaunchInfo]:
    """The LaunchInfo of every rank of one node."""
    return [
        LaunchInfo(
            launch_id=job.launch_id,
            world_size=job.nprocs,
            local_world_size=job.nprocs,
            rank=rank,
            local_rank=rank,
            master_addr=job.master_addr,
            master_port=port,
            extras=extras[rank],
        )
        for rank in range(job.nprocs)
    ]


class _Keeper:
    """The keeper's process, seen from the launcher: forked where that is safe, else fresh."""

    def __init__(self, plan: Plan, ears: Ears, output: Output) -> None:
        self.job = plan.job
        self.ears = ears
        self.output = output
        self.strangers = linux.descendants(os.getpid())
        self.popen: subprocess.Popen[bytes] | None = None
        self.is_buried = False
        self.pid = _fork(plan, ears, output)
        if self.pid == 0:
            self.popen = fresh.spawn(plan)
            self.pid = self.popen.pid

    def supervise(self, infos: list[LaunchInfo]) -> list[Any]:
        was_subreaper = linux.adopt_orphans(True)
        try:
            return Supervisor(self.job, infos, self.ears, self.output).watch(self.bury)
        finally:
            self.bury()
            _close([], self.ears, self.output)
            linux.adopt_orphans(was_subreaper)

    def bury(self) -> None:
        """Whatever happened, leave nothing of the launch behind."""
        if self.is_buried:
            return
        self.is_buried = True
        linux.send_signal(self.pid, signal.SIGKILL)
        if self._wait() == -signal.SIGKILL:
            self._end_orphans()

    def _wait(self) -> int:
        if self.popen is not None:
            return self.popen.wait()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _end_orphans(self) -> None:
        """Somebody has killed the keeper, so what it kept is ours now."""
        while left := self._orphans():
            for pid in left:
                linux.send_signal(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.002)

    def _orphans(self) -> set[int]:
        """Our descendants in other sessions than ours, but for those of other keepers."""
        mine = os.getsid(0)
        below = linux.descendants(os.getpid(), zombies=True) - self.strangers
        for pid in [pid for pid in below if linux.name_of(pid) == keeper.PROCESS_NAME]:
            below -= {pid, *linux.descendants(pid, zombies=True)}
        return {pid for pid in below if linux.session(pid) not in (0, mine)}


def _fork(plan: Plan, ears: Ears, output: Output) -> int:
    """The pid of a forked keeper; 0 if threads or an accelerator make this process unfit to fork.

    Libraries may end their threads in fork handlers and start them again later, so the count is
    taken when the fork has happened, while the child waits at a gate.
    """
    if threading.active_count() > 1 or linux.holds_accelerator():
        return 0
    waiting, opening = os.pipe()
    _flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(opening)
        _behind_gate(waiting, plan, ears, output)
    os.close(waiting)
    is_safe = linux.threads_alive() == 1
    if is_safe:
        os.write(opening, b"go")
    os.close(opening)
    if not is_safe:
        os.waitpid(pid, 0)
    return pid if is_safe else 0


def _behind_gate(gate: int, plan: Plan, ears: Ears, output: Output) -> None:
    """The forked child: become the keeper once let through. A rank may leave by SystemExit."""
    if not os.read(gate, 2):
        os._exit(0)
    _close([gate], ears, output)
    try:
        code = keeper.keep(plan)
    except Exception:
        traceback.print_exc()
        code = 1
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
