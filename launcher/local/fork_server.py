"""The keeper: a process between launcher and ranks that forks them, and outlives none of them.

It has one thread and does nothing else, so it can always fork, and always obey. It adopts what the
ranks leave behind. If the launcher dies, the command pipe ends, and the keeper ends everything.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launcher.job import Job
from launcher.records import pipe_records
from launcher.runtime import rank_process
from launcher.runtime.rank_process import Seat
from launcher.system import linux, stop_signals

PROCESS_NAME = "launch-keeper"
LEFTOVER_GRACE_S = 0.25  # for processes that ranks have left behind, between SIGTERM and SIGKILL


@dataclass(frozen=True)
class Plan:
    """What a keeper is to keep.

    commands, reports: where it reads and where it writes, pipes to the launcher. is_fresh: its
    process exists only for this launch. shared: descriptors that the LaunchInfo of ranks speak of.
    environment: for all ranks, set before anything is preloaded.
    """

    job: Job
    seats: Sequence[Seat]
    commands: int
    reports: int
    is_fresh: bool
    shared: Sequence[int] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def for_ranks(self) -> list[int]:
        """The descriptors that only ranks need."""
        pipes = [fd for one in self.seats for fd in (one.stdout, one.stderr, one.report)]
        return [*pipes, *self.shared]

    def descriptors(self) -> list[int]:
        return [*self.for_ranks(), self.commands, self.reports]


def keep(plan: Plan) -> int:
    """Start the ranks; return the keeper's exit code when nothing is left below it.

    In a rank it never returns.
    """
    linux.name_process(PROCESS_NAME)
    os.setsid()
    linux.adopt_orphans(True)
    woken = _wake_on_children()
    try:
        _preload(plan)
        pids = _fork_ranks(plan)
    except Exception as error:
        with contextlib.suppress(BrokenPipeError):  # the launcher may be the one that has died
            pipe_records.send(plan.reports, {"trouble": f"{type(error).__name__}: {error}"})
        _end_everything()
        return 1
    return _Keeping(plan, pids, woken).loop()


def _wake_on_children() -> int:
    """A descriptor, readable when a child ends. What stops programs does not stop a keeper."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in stop_signals.STOPPING:
        signal.signal(number, signal.SIG_IGN)
    return reading


def _preload(plan: Plan) -> None:
    os.environ.update(plan.environment)
    for name in plan.job.preload:
        try:
            importlib.import_module(name)
        except BaseException as error:
            raise RuntimeError(f"preloading {name!r}: {type(error).__name__}: {error}") from error
    gc.collect()
    gc.freeze()  # what is never collected is never written to, so its pages stay shared


def _fork_ranks(plan: Plan) -> dict[int, int]:
    """Fork every rank; returns pid -> rank. In a rank, never returns.

    They wait at a gate: none begins before all were forked, and safely.
    """
    keeper = os.getpid()
    gate = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, rank_process.HELD_BACK)
    pids: dict[int, int] = {}
    for one in plan.seats:
        pid = os.fork()
        if pid == 0:
            _wait_at(gate)
            _sit_down(one, plan, keeper)
        pids[pid] = one.info.rank
        pipe_records.send(plan.reports, {"rank": one.info.rank, "pid": pid})
        _check_fork_was_safe(plan)
    os.write(gate[1], b"." * len(pids))
    for fd in (*gate, *plan.for_ranks()):
        os.close(fd)
    return pids


def _wait_at(gate: tuple[int, int]) -> None:
    """In a rank just forked: wait until let through; if the keeper is gone, there is no launch."""
    waiting, opening = gate
    os.close(opening)
    if not os.read(waiting, 1):
        os._exit(1)
    os.close(waiting)


def _check_fork_was_safe(plan: Plan) -> None:
    """Counted after the fork, for libraries may end their threads in fork handlers."""
    what = "an accelerator open" if linux.holds_accelerator() else ""
    if (count := linux.threads_alive()) > 1:
        what = f"{count - 1} threads running"
    if what:
        raise RuntimeError(
            f"after preloading {', '.join(plan.job.preload)} there is {what}, which no forked rank "
            "could use. Do not preload the module that does so."
        )


def _sit_down(one: Seat, plan: Plan, keeper: int) -> None:
    """In a rank just forked: run it, and never come back but by SystemExit of a fresh process."""
    code = 1
    try:
        _close_what_is_not_for(one, plan)
        rank_process.run(one, plan.job, keeper, plan.is_fresh)
    except SystemExit as leaving:
        if plan.is_fresh:
            raise
        code = rank_process.exit_code(leaving)
    except KeyboardInterrupt:  # before the target had begun, or after its end
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _close_what_is_not_for(one: Seat, plan: Plan) -> None:
    """Leave open the rank's own pipes, and of what is shared, what its LaunchInfo speaks of."""
    named = {int(fd) for name, fd in one.info.extras.items() if name.endswith("_fd")}
    for fd in {*plan.descriptors()} - {one.stdout, one.stderr, one.report} - named:
        os.close(fd)


class _Keeping:
    def __init__(self, plan: Plan, pids: dict[int, int], woken: int) -> None:
        self.plan = plan
        self.pids = pids
        self.woken = woken
        self.commands = pipe_records.Lines()
        self.launcher = os.pidfd_open(os.getppid())
        self.launcher_lives = True

    def loop(self) -> int:
        with selectors.DefaultSelector() as selector:
            selector.register(self.woken, selectors.EVENT_READ, self._drain)
            selector.register(self.plan.commands, selectors.EVENT_READ, self._obey)
            selector.register(self.launcher, selectors.EVENT_READ, self._lose_launcher)
            while self._reap() and self.launcher_lives:
                for key, _ in selector.select():
                    key.data()
        _end_leftovers(LEFTOVER_GRACE_S if self.launcher_lives else 0)
        return 0

    def _reap(self) -> bool:
        """Bury every child that has ended, and report ranks. Whether a rank is left."""
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
            record: dict[str, Any] = {"stopped": os.WSTOPSIG(status)}
        elif os.WIFCONTINUED(status):
            record = {"continued": True}
        else:
            del self.pids[pid]
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            record = {"exit_code": _exit_code(status), "signal": number}
        self._tell({"rank": rank, "time_s": now, **record})

    def _tell(self, record: dict[str, Any]) -> None:
        try:
            pipe_records.send(self.plan.reports, record)
        except BrokenPipeError:
            self.launcher_lives = False

    def _lose_launcher(self) -> None:
        """It has died, even if a child of its own still holds the other end of our command pipe."""
        self.launcher_lives = False

    def _drain(self) -> None:
        os.read(self.woken, 4096)

    def _obey(self) -> None:
        data = os.read(self.plan.commands, 65536)
        self.launcher_lives = self.launcher_lives and bool(data)
        for line in self.commands.feed(data):
            command = pipe_records.parse(line) or {}
            self._signal(command["signal"], command["ranks"], command["whole_group"])

    def _signal(self, number: int, ranks: list[int], whole_group: bool) -> None:
        for pid, rank in self.pids.items():
            if rank in ranks and not (whole_group and linux.send_signal(-pid, number)):
                linux.send_signal(pid, number)  # it may not lead a group yet


def _exit_code(status: int) -> int:
    """As a shell gives it: 128 and the number for a signal."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _end_leftovers(grace_s: float) -> None:
    """Ask what is left below us to end, wait, and end it."""
    if grace_s and (left := linux.descendants(os.getpid())):
        for pid in left:
            linux.send_signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while linux.descendants(os.getpid()) and time.monotonic() < deadline:
            time.sleep(0.01)
    _end_everything()


def _end_everything() -> None:
    """Kill what is left below us, and bury it: a launcher that has adopted us would inherit it."""
    while left := linux.descendants(os.getpid(), zombies=True):
        for pid in left:
            linux.send_signal(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)
