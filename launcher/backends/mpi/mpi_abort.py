"""Run a rank under Hydra, and end the launch if it fails.

    python -m launcher.backends.mpi.mpi_abort COMMAND...

Hydra itself waits for the others when a rank exits with a code (MPICH), or even dies by a signal
(Intel MPI), unless the rank is between MPI_Init and MPI_Finalize.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from launcher import launch_secret
from launcher.system import linux, stop_signals


def main(command: Sequence[str]) -> int:
    """Run command, with our descriptors, and end the launch if it fails. Returns its exit code."""
    for number in stop_signals.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # they reach the rank as well, which decides
    pre_exec = functools.partial(_pre_exec, os.getpid())
    rank = subprocess.Popen(command, close_fds=False, preexec_fn=pre_exec)
    linux.erase_variable(launch_secret.SECRET)  # the rank has its own copy, and erases it
    status = rank.wait()
    code = linux.shell_exit_code(status)
    if code:
        # What MPI_Abort sends (PMI 1 wire protocol): mpiexec ends every rank, and exits with code.
        # After MPI_Finalize nobody reads it.
        with contextlib.suppress(OSError):
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
    return code


def _pre_exec(parent: int) -> None:
    stop_signals.reset_in_child()
    linux.die_with(parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
