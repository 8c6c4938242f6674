"""The launcher's handle of its fork server: start it, supervise the launch, reap it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from launcher.errors import Failure
from launcher.launch_info import LaunchInfo
from launcher.local import fork_server, fork_server_exec
from launcher.local.fork_server import ForkPlan
from launcher.local.launch_watch import LaunchWatch
from launcher.local.supervisor import LauncherPipes, Supervisor
from launcher.runtime.output import Output
from launcher.system import descendants, linux, stop_signals
from launcher.system.held_forks import HeldForks


class ForkServerHandle:
    """The fork server's process: forked where that is safe, otherwise in a new interpreter."""

    def __init__(self, plan: ForkPlan, pipes: LauncherPipes, output: Output) -> None:
        self.job = plan.job
        self.pipes = pipes
        self.output = output
        self.orphans = descendants.Orphans()
        self.popen: subprocess.Popen[bytes] | None = None
        self.exit_status: int | None = None
        self.pid = _fork(plan, pipes, output)
        if self.pid == 0:
            self.popen = fork_server_exec.spawn(plan)
            self.pid = self.popen.pid

    def supervise(
        self,
        infos: list[LaunchInfo],
        watch: LaunchWatch | None = None,
        on_failure: Callable[[Failure], object] = lambda _: None,
    ) -> list[Any]:
        """Each rank's result, or LaunchError; no process of the launch is left then."""
        with linux.adopting():
            try:
                supervisor = Supervisor(
                    self.job, infos, self.pipes, self.output, self.pid, watch, on_failure
                )
                return supervisor.run(self.reap)
            finally:
                self.reap()
                self.pipes.close()
                self.output.close()
                stop_signals.unblock()  # where the loop could not begin

    def reap(self) -> int:
        """Kill and reap the fork server and everything below it; the status that it ended with."""
        if self.exit_status is None:
            linux.send_signal(self.pid, signal.SIGKILL)
            if self.popen is not None:
                self.exit_status = self.popen.wait()
            else:
                self.exit_status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            # Only with 0 it has ended all of its descendants. Whatever else has ended it, this
            # process, as the subreaper above it, has adopted them.
            if self.exit_status != 0:
                self.orphans.kill()
        return self.exit_status


def _fork(plan: ForkPlan, pipes: LauncherPipes, output: Output) -> int:
    """The pid of a forked fork server; 0 if threads or an accelerator make forking unsafe."""
    if threading.active_count() > 1 or linux.holds_accelerator():
        return 0
    linux.wait_for_ending_threads()
    forks = HeldForks()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()  # or the child would print what waits in them once more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pid = forks.fork()
        except OSError:
            forks.end(let_go=False)
            raise
    if pid == 0:
        _run_server(plan, pipes, output)
    is_safe = linux.count_threads() == 1
    forks.end(let_go=is_safe)
    if not is_safe:
        os.waitpid(pid, 0)
    return pid if is_safe else 0


def _run_server(plan: ForkPlan, pipes: LauncherPipes, output: Output) -> None:
    """In the forked child: serve. A rank may leave this process by SystemExit."""
    pipes.close()
    output.close()
    try:
        code = fork_server.serve(plan, fork_server_exec.restart)
    except Exception:
        traceback.print_exc()
        code = 1
    os._exit(code)
