"""Child reaper: run COMMAND, and leave no process of it behind.

    python -m launcher.external.reaper PARENT FOLDER COMMAND...

An engine must hear of the launcher's death, even by SIGKILL, to end its ranks; and a rank may be
deaf, or leave children in sessions of their own, of which no engine knows. The leash stays between
the two, adopts what descends from the engine on this node, and ends it with the engine; then it
removes FOLDER if the launcher, whose it is, has died. Other nodes are the engine's own care.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from types import FrameType

from launcher.system import linux

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 5.0  # for the engine and its ranks to end when asked; then they are killed
REST_GRACE_S = 0.5  # for what outlives the engine
UNKILLABLE_S = 2.0  # what the kernel itself holds up is not waited for longer
STEP_S = 0.02


def main(parent: str, folder: str, *command: str) -> int:
    """The engine's exit code; at a signal, the engine is asked to end, and killed at a second."""
    linux.adopt_orphans(True)
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    linux.die_with(int(parent), signal.SIGTERM)
    try:
        engine = subprocess.Popen(command, preexec_fn=functools.partial(_tie, os.getpid()))
    except OSError as error:
        sys.exit(f"cannot start {command[0]!r}: {error.strerror}, so there are no ranks.")
    for number in PASSED_ON:
        signal.signal(number, functools.partial(_ask, engine.pid))
    signal.signal(signal.SIGALRM, _kill)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    code = _wait(engine)
    signal.setitimer(signal.ITIMER_REAL, 0)
    end_rest()
    if os.getppid() != int(parent):
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _tie(leash: int) -> None:
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    linux.die_with(leash, signal.SIGTERM)


def _ask(engine: int, number: int, _frame: FrameType | None) -> None:
    signal.setitimer(signal.ITIMER_REAL, GRACE_S)
    for again in PASSED_ON:
        signal.signal(again, _kill)
    linux.send_signal(engine, number)


def _kill(_number: int, _frame: FrameType | None) -> None:
    _send_all(signal.SIGKILL)


def _send_all(number: int) -> None:
    for pid in linux.descendants(os.getpid()):
        linux.send_signal(pid, number)


def _wait(engine: subprocess.Popen[bytes]) -> int:
    """The engine's exit code; meanwhile, reap those adopted."""
    while True:
        pid, status = os.wait()
        if pid == engine.pid:
            engine.returncode = os.waitstatus_to_exitcode(status)
            return engine.returncode


def end_rest() -> None:
    """End what descends from this process: ask once, then kill."""
    _send_all(signal.SIGTERM)
    asked_s = time.monotonic()
    while linux.descendants(os.getpid()) and time.monotonic() < asked_s + UNKILLABLE_S:
        if time.monotonic() > asked_s + REST_GRACE_S:
            _send_all(signal.SIGKILL)
        time.sleep(STEP_S)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
