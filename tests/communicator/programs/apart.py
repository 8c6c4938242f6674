"""Two ranks of one host that share no memory; each prints its backend and a sum over both.

KIND is "namespaces" (of pids, one for each rank), "foreign /proc" (one for both, with the /proc of
another) or "users".
"""

import ctypes
import os
import socket
import sys
import uuid

import torch

import communicator.backends.shm
import communicator.backends.tcp  # noqa: F401  (the other user may not be able to read it)
from communicator import Communicator
from coordinator import Coordinator
from launcher import LaunchInfo

CLONE_NEWPID = 0x20000000  # of unshare(2): for the children from then on
NOBODY = 65534


def unshare_pids():
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "unshare")


def forked(body):
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(body() or 0)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        finally:
            os._exit(1)
    return pid


def ended(*pids):
    return max([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])


def run(kind, info):
    if kind == "users" and info.rank == 1:
        os.setuid(NOBODY)
    with Coordinator(info, timeout_s=60) as coor, Communicator(coor) as comm:
        x = torch.full((3,), float(coor.rank + 1))
        comm.allreduce(x)
        os.write(1, f"{comm.backend} {x.tolist()}\n".encode())  # whole, beside the other's


def rank_of(kind, info):
    if kind == "namespaces":
        unshare_pids()
        return ended(forked(lambda: run(kind, info)))
    return run(kind, info)


def main(kind):
    listener, secret = socket.create_server(("127.0.0.1", 0)), os.memfd_create("launch-secret")
    os.write(secret, os.urandom(32))
    launch_id, port = uuid.uuid4().hex, listener.getsockname()[1]
    ranks = []
    for rank in range(2):
        extras = {"secret_fd": str(secret)}
        if rank == 0:
            extras["master_fd"] = str(listener.fileno())
        info = LaunchInfo(launch_id, 2, 2, rank, rank, "127.0.0.1", port, extras)
        ranks.append(forked(lambda info=info: rank_of(kind, info)))
    listener.close()
    return ended(*ranks)


if sys.argv[1] == "foreign /proc":
    unshare_pids()
    sys.exit(ended(forked(lambda: main(sys.argv[1]))))
sys.exit(main(sys.argv[1]))
