"""The launcher's handle of its fork server: start it, supervise the launch, reap it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from typing import Any

from launcher.launch_info import LaunchInfo
from launcher.local import fork_server, fork_server_exec
from launcher.local.fork_server import ForkPlan
from launcher.local.supervisor import LauncherPipes, Supervisor
from launcher.runtime.output import Output
from launcher.system import linux


class ForkServerHandle:
    """The fork server's process: forked where that is safe, else in a new interpreter."""

    def __init__(self, plan: ForkPlan, pipes: LauncherPipes, output: Output) -> None:
        self.job = plan.job
        self.pipes = pipes
        self.output = output
        self.earlier_descendants = linux.descendants(os.getpid())
        self.popen: subprocess.Popen[bytes] | None = None
        self.is_reaped = False
        self.pid = _fork(plan, pipes, output)
        if self.pid == 0:
            self.popen = fork_server_exec.spawn(plan)
            self.pid = self.popen.pid

    def supervise(self, infos: list[LaunchInfo]) -> list[Any]:
        """Each rank's result, or LaunchError; no process of the launch is left then."""
        was_subreaper = linux.set_subreaper(True)
        try:
            return Supervisor(self.job, infos, self.pipes, self.output).run(self.reap)
        finally:
            self.reap()
            self.pipes.close()
            self.output.close()
            linux.set_subreaper(was_subreaper)

    def reap(self) -> None:
        """Kill and reap the fork server and everything below it, whatever has happened."""
        if self.is_reaped:
            return
        self.is_reaped = True
        linux.send_signal(self.pid, signal.SIGKILL)
        if self.popen is not None:
            status = self.popen.wait()
        else:
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        # A fork server that was killed, by us or from outside, has ended none of its descendants.
        # As the subreaper above it, this process has adopted them.
        if status == -signal.SIGKILL:
            fork_server.kill_all(self._orphans)

    def _orphans(self) -> set[int]:
        """Our descendants in other sessions, except those of the fork servers of other launches."""
        own_session = os.getsid(0)
        orphans = linux.descendants(os.getpid(), zombies=True) - self.earlier_descendants
        for pid in filter(_is_fork_server, list(orphans)):
            orphans -= {pid, *linux.descendants(pid, zombies=True)}
        stats = {pid: linux.process_stat(pid) for pid in orphans}
        return {pid for pid, stat in stats.items() if stat and stat.session not in (0, own_session)}


def _is_fork_server(pid: int) -> bool:
    """True if it has that name; a rank just forked still has it, but leads no session yet."""
    stat = linux.process_stat(pid)
    is_leader = stat is not None and stat.session == pid
    return is_leader and linux.process_name(pid) == fork_server.PROCESS_NAME


def _fork(plan: ForkPlan, pipes: LauncherPipes, output: Output) -> int:
    """The pid of a forked fork server; 0 if threads or an accelerator make forking unsafe.

    Libraries may end their threads in fork handlers and start them again later, so the count is
    taken after the fork, while the child waits to be released; if it must not run, the pipe is
    closed without a byte in it.
    """
    if threading.active_count() > 1 or linux.holds_accelerator():
        return 0
    waiting, release = os.pipe()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()  # or the child would print what waits in them once more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.close(release)
        _run_server(waiting, plan, pipes, output)
    os.close(waiting)
    is_safe = linux.count_threads() == 1
    if is_safe:
        os.write(release, b".")
    os.close(release)
    if not is_safe:
        os.waitpid(pid, 0)
    return pid if is_safe else 0


def _run_server(waiting: int, plan: ForkPlan, pipes: LauncherPipes, output: Output) -> None:
    """In the forked child: serve once released. A rank may leave this process by SystemExit."""
    if not os.read(waiting, 1):
        os._exit(0)
    os.close(waiting)
    pipes.close()
    output.close()
    try:
        code = fork_server.serve(plan)
    except Exception:
        traceback.print_exc()
        code = 1
    os._exit(code)
