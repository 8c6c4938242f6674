"""The keeper's process as the launcher sees it: started, watched, and buried."""

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

from launcher.launch_info import LaunchInfo
from launcher.local import fork_server, fork_server_exec
from launcher.local.fork_server import Plan
from launcher.local.supervisor import Ears, Supervisor
from launcher.runtime.output import Output
from launcher.system import linux


class KeeperProcess:
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
            self.popen = fork_server_exec.spawn(plan)
            self.pid = self.popen.pid

    def supervise(self, infos: list[LaunchInfo]) -> list[Any]:
        was_subreaper = linux.adopt_orphans(True)
        try:
            return Supervisor(self.job, infos, self.ears, self.output).watch(self.bury)
        finally:
            self.bury()
            self.ears.close()
            self.output.close()
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
        for pid in filter(_is_keeper, list(below)):
            below -= {pid, *linux.descendants(pid, zombies=True)}
        return {pid for pid in below if linux.session(pid) not in (0, mine)}


def _is_keeper(pid: int) -> bool:
    """By its name; a rank only just forked still has that name, but leads no session yet."""
    return linux.name_of(pid) == fork_server.PROCESS_NAME and linux.session(pid) == pid


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
    os.close(gate)
    ears.close()
    output.close()
    try:
        code = fork_server.keep(plan)
    except Exception:
        traceback.print_exc()
        code = 1
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
