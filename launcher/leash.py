"""`python -m launcher.leash PARENT COMMAND...`: become COMMAND, asked to end when PARENT is gone.

An engine must hear of the launcher's death, even by SIGKILL, to end its ranks. The order to tell it
survives exec: prctl(2), PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import os
import signal
import sys

from launcher import linux


def main(parent: str, *command: str) -> None:
    linux.die_with(int(parent), signal.SIGTERM)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot start {command[0]!r}: {error.strerror}, so there are no ranks.")


if __name__ == "__main__":
    main(*sys.argv[1:])
