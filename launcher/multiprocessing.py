"""Ranks as processes of this machine, forked by a keeper: the launcher that needs nothing but
Python.

python -m launcher run -n 4 train.py
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

from launcher import fresh, keeper, linux, ports, secret
from launcher.info import LaunchInfo
from launcher.job import Job
from launcher.keeper import Plan
from launcher.output import Output
from launcher.seat import Seat
from launcher.supervisor import Ears, Supervisor

NAME = "multiprocessing"


def detect(environ: Mapping[str, str]) -> LaunchInfo | None:
    return LaunchInfo.from_env(environ)


def run(job: Job, owns_process: bool = False) -> list[Any]:
    """Each rank's result, by rank. Raises LaunchError if one fails.

    owns_process: this process exists only for this launch (the command line), so its ranks may
    leave it as any Python program ends, by unwinding.
    """
    if job.nnodes != 1:
        raise ValueError(
            f"the launcher {NAME!r} starts ranks on one node, not {job.nnodes}: several nodes are "
            "the work of "
            "torchrun, mpi, slurm or ray. Name one with --launcher."
        )
    listener = ports.listen(job.launch_id, job.master_addr, job.master_port)
    secret_fd = secret.create()
    infos = _infos(job, listener, secret_fd)
    plan, ears = _wire(job, infos, owns_process)
    child = _Keeper(plan, ears, [listener.fileno(), secret_fd])
    for fd in (*plan.rank_fds(), plan.commands, plan.reports, secret_fd):
        os.close(fd)
    listener.close()
    return child.supervise(infos)


def _infos(job: Job, listener: socket.socket, secret_fd: int) -> list[LaunchInfo]:
    """Only rank 0 keeps the listening socket; every rank has the secret."""
    master_fd = {"master_fd": str(listener.fileno())}
    return [
        LaunchInfo(
            launch_id=job.launch_id,
            world_size=job.nprocs,
            local_world_size=job.nprocs,
            rank=rank,
            local_rank=rank,
            master_addr=job.master_addr,
            master_port=listener.getsockname()[1],
            extras={"secret_fd": str(secret_fd), **(master_fd if rank == 0 else {})},
        )
        for rank in range(job.nprocs)
    ]


def _wire(job: Job, infos: list[LaunchInfo], owns_process: bool) -> tuple[Plan, Ears]:
    """Three pipes from every rank, one each way between launcher and keeper."""
    pipes = [(os.pipe(), os.pipe(), os.pipe()) for _ in infos]
    commands, reports = os.pipe(), os.pipe()
    ears = Ears(
        commands[1], reports[0], [(out[0], err[0], report[0]) for out, err, report in pipes]
    )
    writing = [(out[1], err[1], report[1]) for out, err, report in pipes]
    master_fd = int(infos[0].extras["master_fd"])
    seats = [
        Seat(info, *mine, _others(info.rank, writing, master_fd))
        for info, mine in zip(infos, writing, strict=True)
    ]
    return Plan(job, seats, commands[0], reports[1], os.getpid(), owns_process), ears


def _others(rank: int, writing: list[tuple[int, int, int]], master_fd: int) -> tuple[int, ...]:
    """What a rank closes: the pipes of the others, and rank 0's socket if it is not rank 0."""
    foreign = [fd for other, three in enumerate(writing) if other != rank for fd in three]
    return (*foreign, *([master_fd] if rank else []))


class _Keeper:
    """The keeper's process, seen from the launcher: forked if that is safe, else a fresh
    interpreter.
    """

    def __init__(self, plan: Plan, ears: Ears, shared: list[int]) -> None:
        self.job = plan.job
        self.ears = ears
        self.strangers = linux.descendants(os.getpid())
        self.was_subreaper = linux.adopt_orphans(True)
        self.popen: subprocess.Popen[bytes] | None = None
        self.pid = _fork(plan, ears)
        if self.pid == 0:
            self.popen = fresh.spawn(plan, shared)
            self.pid = self.popen.pid

    def supervise(self, infos: list[LaunchInfo]) -> list[Any]:
        try:
            return Supervisor(self.job, infos, self.ears, Output()).watch(self.bury)
        finally:
            self.bury()
            self.ears.close()
            linux.adopt_orphans(self.was_subreaper)

    def bury(self) -> None:
        """Whatever happened, leave nothing of the launch behind."""
        linux.send_signal(self.pid, signal.SIGKILL)
        self._wait()
        while left := self._ours():
            for pid in left:
                linux.send_signal(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _wait(self) -> None:
        if self.popen is not None:
            self.popen.wait()
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _ours(self) -> set[int]:
        """Orphans of the launch that we have adopted: those of our descendants that sit in another
        session.
        """
        mine = os.getsid(0)
        below = linux.descendants(os.getpid()) - self.strangers
        return {pid for pid in below if linux.session(pid) not in (0, mine)}


def _fork(plan: Plan, ears: Ears) -> int:
    """The pid of a forked keeper; 0 if this process must not be forked: it has threads, or an
    accelerator open.

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
        _behind_gate(waiting, plan, ears)
    os.close(waiting)
    is_safe = linux.threads_alive() == 1
    if is_safe:
        os.write(opening, b"go")
    os.close(opening)
    if not is_safe:
        os.waitpid(pid, 0)
    return pid if is_safe else 0


def _behind_gate(gate: int, plan: Plan, ears: Ears) -> None:
    """The forked child: become the keeper once let through. Only a rank leaves it otherwise, by
    SystemExit.
    """
    if not os.read(gate, 2):
        os._exit(0)
    os.close(gate)
    ears.close()
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
