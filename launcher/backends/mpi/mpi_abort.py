"""`python -m launcher.backends.mpi.mpi_abort COMMAND...`: a rank under Hydra.

Its failure ends the launch.

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
from launcher.system import linux


def main(command: Sequence[str]) -> int:
    """Run command, with our descriptors, and end the launch if it fails. Returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the rank gets them too, and decides
    take_seat = functools.partial(_take_seat, os.getpid())
    rank = subprocess.Popen(command, close_fds=False, preexec_fn=take_seat)
    linux.wipe_variable(launch_secret.SECRET)  # the rank has it, and takes it out of its own
    status = rank.wait()
    code = status if status >= 0 else 128 - status
    if code:
        _abort(code)
    return code


def _take_seat(guard: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    linux.die_with(guard)


def _abort(code: int) -> None:
    """What MPI_Abort sends (PMI 1 wire protocol): mpiexec ends every rank, and exits with code."""
    with contextlib.suppress(OSError):  # after MPI_Finalize nobody listens, nor need anybody
        os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
