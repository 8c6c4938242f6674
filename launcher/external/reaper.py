"""Child reaper: run COMMAND, and leave no process of it behind.

    python -m launcher.external.reaper PARENT COMMAND...

A backend launcher must learn of our launcher's death, even by SIGKILL, to end its ranks; and a rank
may ignore SIGTERM, or leave children in sessions of their own, of which no backend launcher knows.
The reaper stands between the two. It is the subreaper of everything that descends from the backend
launcher on this node, and ends it with the backend launcher. Processes on other nodes are the
backend launcher's own.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from types import FrameType

from launcher import timings
from launcher.system import descendants, linux, stop_signals
from launcher.system.held_forks import explained_limit
from launcher.system.stop_signals import STOP_SIGNALS


def main(parent: str, *command: str) -> int:
    """The backend launcher's exit code. A signal is passed on to it; a second kills everything.

    Not a second SIGTERM: systemd and Slurm send two.
    """
    linux.set_process_name(descendants.SUPERVISOR_NAME)
    linux.set_subreaper(True)
    # Blocked until the handlers are in place and there is a process to pass signals on to.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    linux.die_with(int(parent), signal.SIGTERM)
    try:
        is_ours = command[1:2] == ("-m",) and command[2].startswith("launcher.")
        pre_exec = functools.partial(_pre_exec, os.getpid(), is_ours)
        with explained_limit():
            backend = subprocess.Popen(command, preexec_fn=pre_exec)
    except OSError as error:
        sys.exit(f"cannot start {command[0]!r}: {error.strerror}, so there are no ranks.")
    for number in STOP_SIGNALS:
        signal.signal(number, functools.partial(_on_stop_signal, backend.pid))
    signal.signal(signal.SIGALRM, functools.partial(_on_second_signal, backend.pid))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    code = _wait(backend)
    signal.setitimer(signal.ITIMER_REAL, 0)
    descendants.end_all(timings.TIMINGS.orphan_grace_s)
    return linux.shell_exit_code(code)


def _pre_exec(reaper: int, stays_blocked: bool) -> None:
    """stays_blocked: a program of ours unblocks stop signals itself, once it can take them.

    In Python's start, they would be a traceback of Python.
    """
    stop_signals.reset_in_child()
    if stays_blocked:
        stop_signals.block()
    linux.die_with(reaper, signal.SIGTERM)


def _on_stop_signal(backend: int, number: int, _frame: FrameType | None) -> None:
    """Pass the first signal on; after a grace period, or at the next signal, kill."""
    signal.setitimer(signal.ITIMER_REAL, timings.TIMINGS.backend_grace_s)
    kill = functools.partial(_on_second_signal, backend)
    for again in STOP_SIGNALS:
        signal.signal(again, signal.SIG_IGN if again == signal.SIGTERM else kill)
    linux.send_signal(backend, number)
    linux.send_signal(backend, signal.SIGCONT)  # it could not react while it is suspended


def _on_second_signal(backend: int, _number: int, _frame: FrameType | None) -> None:
    """Kill, a moment after SIGTERM or at the next signal: srun then kills its tasks, which do not
    descend from here."""
    for number in {signal.SIGALRM, *STOP_SIGNALS} - {signal.SIGTERM}:
        signal.signal(number, lambda *_: descendants.signal_all(signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, timings.TIMINGS.failure_grace_s)
    linux.send_signal(backend, signal.SIGTERM)


def _wait(backend: subprocess.Popen[bytes]) -> int:
    """The backend launcher's exit status; meanwhile, reap adopted processes."""
    while True:
        pid, status = os.wait()
        if pid == backend.pid:
            backend.returncode = os.waitstatus_to_exitcode(status)
            return backend.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
