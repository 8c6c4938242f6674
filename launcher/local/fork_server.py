"""Fork server: a process between the launcher and the ranks that preloads, forks and reaps them.

It has one thread and does nothing else, so it can always fork and always answer. As the subreaper
it adopts what the ranks leave behind. If the launcher dies, the fork server kills everything below
it, and exits.

    launcher --commands--> fork server --reports--> launcher
    rank --stdout, stderr, report--> launcher
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from launcher import timings
from launcher.job import Job
from launcher.local.auto_preload import Preload
from launcher.records import pipe_records
from launcher.runtime import rank_process
from launcher.runtime.rank_process import RankSetup
from launcher.system import descendants, linux, stop_signals
from launcher.system.held_forks import HeldForks

OMP_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class ForkPlan:
    """The ranks that a fork server starts, and its descriptors.

    launcher: the pid of the process that waits for the ranks. commands, reports: the pipe that the
    fork server reads from, and the one that it writes to. owns_process: its process exists only for
    this launch. shared: descriptors that the ranks' LaunchInfo name. environment: for all ranks,
    set before anything is preloaded.
    """

    job: Job
    ranks: Sequence[RankSetup]
    launcher: int
    commands: int
    reports: int
    owns_process: bool
    preload: Preload
    shared: Sequence[int] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def for_ranks(self) -> list[int]:
        """The descriptors that only ranks need."""
        return [*(fd for setup in self.ranks for fd in setup.pipes), *self.shared]

    def descriptors(self) -> list[int]:
        """Every descriptor that the launcher passes on."""
        return [*self.for_ranks(), self.commands, self.reports]


class PreloadError(Exception):
    """A preloaded module raised, or left what no forked rank could use."""


def serve(plan: ForkPlan, restart: Callable[[ForkPlan], NoReturn]) -> int:
    """Start the ranks; return the fork server's exit code when no process is left below it.

    In a rank it never returns. restart: called with a plan that preloads nothing, where what was
    preloaded without being asked for cannot be forked.
    """
    linux.set_process_name(descendants.SUPERVISOR_NAME)
    if os.getsid(0) != os.getpid():
        os.setsid()
    linux.set_subreaper(True)
    wakeup_fd = _wake_on_children()
    linux.die_with(plan.launcher)  # an import reacts to nothing else, and there is no rank to end
    try:
        prepare_rank = _preload(plan)
        # From here on, it has ranks to end if the launcher dies, even if somebody has stopped it.
        linux.die_with(plan.launcher, signal.SIGCONT)
        pids = _fork_ranks(plan, prepare_rank)
    except Exception as error:
        if isinstance(error, PreloadError) and plan.preload.is_automatic and plan.preload.imports:
            restart(replace(plan, preload=plan.preload._replace(imports=[])))
        with contextlib.suppress(BrokenPipeError):  # the launcher may be the one that has died
            pipe_records.send(plan.reports, {"error": f"{type(error).__name__}: {error}"})
        descendants.end_all(grace_s=0)
        return 1
    return ForkServer(plan, pids, wakeup_fd).loop()


def _wake_on_children() -> int:
    """A descriptor that is readable when a child ends. Stop signals are ignored from here on."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Ctrl-C reaches the whole process group: the launcher decides what becomes of the ranks.
    for number in stop_signals.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return reading


def _preload(plan: ForkPlan) -> Callable[[], object]:
    """Import, and return a function for each rank to call first: it gives the rank random numbers
    of its own, and limits torch to the rank's share of the cores."""
    os.environ.update(plan.environment)
    collects_garbage = gc.isenabled()
    gc.disable()  # it frees nothing during these imports and costs 10 % of their time
    had_numpy = "numpy.random" in sys.modules
    for names in plan.preload.imports:
        try:
            names.load()
        except BaseException as error:
            problem = f"preloading {names.module!r}: {type(error).__name__}: {error}"
            raise PreloadError(problem) from error
    gc.freeze()  # objects that are never collected are never written to: their pages stay shared
    if collects_garbage:
        gc.enable()
    numpy_random = None if had_numpy else sys.modules.get("numpy.random")
    torch, share = sys.modules.get("torch"), plan.environment.get(OMP_THREADS)

    def prepare_rank() -> None:
        # nanobind, in triton, prints a page about leaks where Python's end frees no cycle. To free
        # all takes as long as a rank that does little, so that is not done where nobody looks.
        if "triton" in sys.modules:
            atexit.register(gc.unfreeze)
        if numpy_random is not None:
            numpy_random.seed()
        # A program that has torch had the variable read before. It may have chosen fewer threads;
        # and to set a number starts them, after which a rank cannot fork safely.
        if torch is not None and share is not None and int(share) < torch.get_num_threads():
            torch.set_num_threads(int(share))

    return prepare_rank


def _fork_ranks(plan: ForkPlan, prepare_rank: Callable[[], object]) -> dict[int, int]:
    """Fork every rank; return pid -> rank. In a rank, never returns."""
    server = os.getpid()
    forks = HeldForks()  # no rank runs before all were forked safely
    # A signal before a rank has its own handlers would be lost, as this process ignores it, or
    # kill the rank unheard. The mask is inherited; rank_process.run unblocks it in the rank. Here
    # it stays blocked: this process ignores those signals anyway.
    signal.pthread_sigmask(signal.SIG_BLOCK, rank_process.BLOCKED_IN_FORK)
    pids: dict[int, int] = {}
    for setup in plan.ranks:
        pid = forks.fork()
        if pid == 0:
            prepare_rank()
            _run_child(setup, plan, server)
        _check_fork_was_safe(plan)
        pids[pid] = setup.info.rank
        pipe_records.send(plan.reports, {"rank": setup.info.rank, "pid": pid})
    forks.end(let_go=True)
    for fd in plan.for_ranks():
        os.close(fd)
    return pids


def _check_fork_was_safe(plan: ForkPlan) -> None:
    """Raise if a forked rank would inherit threads that do not run, or an accelerator's memory.

    To be called after the fork, for libraries may end their threads in fork handlers.
    """
    problem = "an accelerator open" if linux.holds_accelerator() else ""
    if (count := linux.count_threads()) > 1:
        problem = f"{count - 1} threads running"
    if problem:
        modules = ", ".join(module for module, _ in plan.preload.imports)
        raise PreloadError(
            f"after preloading {modules} there is {problem}, which no forked rank could use. Do "
            "not preload the module that does so."
        )


def _run_child(setup: RankSetup, plan: ForkPlan, server: int) -> None:
    """Run a rank just forked; never return but by SystemExit of a process that is ours alone."""
    code = 1
    try:
        # Keep the rank's own pipes, and of the shared descriptors those that its LaunchInfo names.
        named = {int(fd) for name, fd in setup.info.extras.items() if name.endswith("_fd")}
        for fd in {*plan.descriptors()} - {*setup.pipes} - named:
            os.close(fd)
        rank_process.run(setup, plan.job, server, plan.owns_process)
    except SystemExit as leaving:
        if plan.owns_process:
            raise
        code = rank_process.exit_code(leaving)
    except KeyboardInterrupt:  # before the target had begun, or after its end
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    os._exit(code)


class ForkServer:
    """The loop after all ranks were forked: reap children, report on ranks, send signals."""

    def __init__(self, plan: ForkPlan, pids: dict[int, int], wakeup_fd: int) -> None:
        self.plan = plan
        self.pids = pids
        self.wakeup_fd = wakeup_fd
        self.commands = pipe_records.LineBuffer()
        self.launcher = os.pidfd_open(plan.launcher)
        self.launcher_lives = True

    def loop(self) -> int:
        """Serve until no rank is left, or the launcher has died; then end all other descendants."""
        with selectors.DefaultSelector() as selector:
            drain_wakeups = functools.partial(os.read, self.wakeup_fd, 4096)
            selector.register(self.wakeup_fd, selectors.EVENT_READ, drain_wakeups)
            selector.register(self.plan.commands, selectors.EVENT_READ, self._on_command)
            # The end of the command pipe does not tell of the launcher's death: a child that the
            # program has forked during the launch may hold its other end.
            selector.register(self.launcher, selectors.EVENT_READ, self._on_launcher_death)
            while self._reap() and self.launcher_lives:
                for key, _ in selector.select():
                    key.data()
        descendants.end_all(timings.TIMINGS.orphan_grace_s if self.launcher_lives else 0)
        return 0

    def _reap(self) -> bool:
        """Reap every child that has ended, and report ranks; return whether a rank is left."""
        while self.pids:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self.pids:
                self._report(pid, status)
        return bool(self.pids)

    def _report(self, pid: int, status: int) -> None:
        rank, now = self.pids[pid], time.monotonic()
        if os.WIFSTOPPED(status):
            record: dict[str, Any] = {"suspended": os.WSTOPSIG(status)}
        elif os.WIFCONTINUED(status):
            record = {"continued": True}
        else:
            del self.pids[pid]
            code = os.waitstatus_to_exitcode(status)
            record = {"exit_code": linux.shell_exit_code(code), "signal": max(0, -code)}
        try:
            pipe_records.send(self.plan.reports, {"rank": rank, "time_s": now, **record})
        except BrokenPipeError:
            self.launcher_lives = False

    def _on_launcher_death(self) -> None:
        self.launcher_lives = False

    def _on_command(self) -> None:
        data = os.read(self.plan.commands, 65536)
        self.launcher_lives = self.launcher_lives and bool(data)
        for line in self.commands.feed(data):
            command = pipe_records.parse(line) or {}
            self._signal(command["signal"], command["ranks"], command["whole_group"])

    def _signal(self, number: int, ranks: list[int], whole_group: bool) -> None:
        for pid, rank in self.pids.items():
            if rank in ranks:
                if not (whole_group and linux.send_signal(-pid, number)):
                    linux.send_signal(pid, number)  # it may not lead a process group yet
                if number != rank_process.DUMP_SIGNAL:  # it could not react while it is suspended
                    linux.send_signal(pid, signal.SIGCONT)
