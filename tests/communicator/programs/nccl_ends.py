"""What rank 0 learns at close() when rank 1, a process, has left in good order, or has died.

    python nccl_ends.py LIBRARY

LIBRARY stands in for libnccl. Prints one line of JSON for each end: its name, and what close()
raised, or "".
"""

import json
import os
import signal
import socket
import sys
import time
import uuid

import torch

from communicator import Communicator, PeerLost, timings
from communicator.backends.nccl import Nccl
from coordinator import Coordinator
from launcher import LaunchInfo

LOOKS = 4  # of the watch, after the other is gone
SOON_S = 10.0


def leave(coor, comm):
    comm.close()
    coor.close()


def die(coor, comm):
    os.kill(os.getpid(), signal.SIGKILL)


def exit_without_a_word(coor, comm):
    os._exit(0)


def see(coor, comm):
    """What close() says some time after the other is gone."""
    deadline = time.monotonic() + SOON_S
    while not coor.peers[1].is_known_dead() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(timings.TIMINGS.watchdog_grace_s + LOOKS * timings.TIMINGS.watchdog_poll_s)
    try:
        comm.close()
    except PeerLost as error:
        return str(error)
    return ""


def live(info, library, end):
    coor = Coordinator(info, timeout_s=20)
    comm = Communicator._of(Nccl, coor, library=library)
    coor.barrier()
    if info.rank == 1:
        end(coor, comm)
    else:
        line = f"{json.dumps([end.__name__, see(coor, comm)])}\n"
        os.write(1, line.encode())  # at once: where PYTHONUNBUFFERED is set, print() writes twice


def start(info, library, end):
    pid = os.fork()
    if pid == 0:
        live(info, library, end)
        os._exit(0)
    return pid


def run(library, end):
    launch_id = uuid.uuid4().hex
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, fd = listener.getsockname()[1], str(listener.fileno())
        for rank, extras in enumerate([{"master_fd": fd}, {}]):
            info = LaunchInfo(launch_id, 2, 2, rank, rank, "127.0.0.1", port, extras)
            start(info, library, end)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for end in (leave, die, exit_without_a_word):
        run(sys.argv[1], end)
    for _ in range(6):
        os.wait()
