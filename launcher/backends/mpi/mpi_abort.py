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
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launcher import launch_secret
from launcher.system import linux, stop_signals

RANK_MAIN = "launcher.external.rank_main"  # followed by the folder for the ends of ranks


def main(command: Sequence[str]) -> int:
    """Run command, with our descriptors, and end the launch if it fails. Returns its exit code."""
    for number in stop_signals.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # they reach the rank as well, which decides
    linux.set_process_name("mpi_abort")
    pre_exec = functools.partial(_pre_exec, os.getpid())
    rank = subprocess.Popen(command, close_fds=False, preexec_fn=pre_exec)
    # The rank has its own copy, and erases it.
    linux.remove_variables(os.environ, (launch_secret.SECRET,))
    status = rank.wait()
    code = linux.shell_exit_code(status)
    if status < 0 and RANK_MAIN in command:
        _record_death(command, rank.pid, -status)
    if code:
        # What MPI_Abort sends (PMI 1 wire protocol): mpiexec ends every rank, and exits with code.
        # After MPI_Finalize nobody reads it, and an mpiexec that listens at a port has no PMI_FD.
        with contextlib.suppress(OSError, KeyError):
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
    return code


def _record_death(command: Sequence[str], pid: int, number: int) -> None:
    """Write the end of a wrapper that a signal has killed, and its rank with it, where it would.

    Nobody else can say which rank was the first: Hydra now kills all the others.
    """
    from launcher.external import rank_main  # not needed by a rank that ends well

    folder, rank = Path(command[command.index(RANK_MAIN) + 1]), int(os.environ["PMI_RANK"])
    failure = {
        "rank": rank,
        "local_rank": int(os.environ["MPI_LOCALRANKID"]),
        "pid": pid,
        "time_s": time.monotonic(),
        "host": socket.gethostname(),
        "exit_code": 128 + number,
        "signal": number,
        "traceback": "",
    }
    rank_main.complete_record(folder, rank, failure)


def _pre_exec(parent: int) -> None:
    stop_signals.reset_in_child()
    linux.die_with(parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
