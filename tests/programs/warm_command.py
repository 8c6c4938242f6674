#!/usr/bin/env -S python3 -IS
"""`python`, `drumline` or `torchrun`, by its own name, in a process that the warm parent forks.

It stands first on the PATH of commands that a test types (WarmParent.commands()): it is seen
and ended here like any command, and takes no seconds to import torch.
"""

import json
import os
import signal
import socket
import sys

STARTS = {"python": [], "drumline": ["-m", "drumline"], "torchrun": ["-m", "torch.distributed.run"]}
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def main() -> int:
    words = STARTS[os.path.basename(sys.argv[0])] + sys.argv[1:]
    if "PMI_FD" in os.environ:  # inherited from mpiexec, which the warm parent was not started by
        os.execv(python := os.environ["COLD_PYTHON"], [python, *words])
    host = os.readlink("/proc/self/ns/net")
    request = {"argv": words, "env": dict(os.environ), "cwd": os.getcwd(), "host": host}
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.connect(os.environ["WARM_PARENT"])
        fds = [1, 2, writing, os.pidfd_open(os.getpid())]
        socket.send_fds(door, [json.dumps(request).encode()], fds)
        os.close(writing)
        pid = int(door.recv(16))
    for number in SIGNALS:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int(os.read(reading, 16))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main())
