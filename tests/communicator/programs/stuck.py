"""Ranks that wait for each other in vain: `stuck.py BACKEND CASE [FIRST RANK]`."""

import os
import signal
import socket
import sys
import threading
import time

import torch

from communicator import Communicator
from coordinator import Coordinator


def ring(comm):
    if comm.rank:  # rank 0 looks at the others while they wait
        comm.set_timeout(30)
    comm.recv(torch.ones(4), (comm.rank + 1) % comm.world_size)  # of ring


def collective(comm):
    time.sleep(0.5 * (comm.rank != int(sys.argv[3])))
    if comm.rank == 0:
        comm.allreduce(torch.ones(4))  # of collective
    else:
        comm.recv(torch.ones(4), 0)  # of message


def late(comm):
    if comm.rank == 1:
        time.sleep(8)  # of late
    comm.allreduce(torch.ones(4))


def other_recv(comm):
    if comm.rank == 0:
        comm.recv(torch.ones(4), 1)
    ends = socket.socketpair()
    ends[0].recv(1)  # of other


def fewer(comm):
    if comm.rank == 0:
        comm.recv(torch.ones(4), 1)


def interrupted(comm):
    signal.signal(signal.SIGUSR1, signal.default_int_handler)
    with Communicator(comm.coor, sys.argv[1], timeout_s=20) as patient:
        try:
            if comm.rank == 0:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
                patient.recv(torch.ones(4), 1)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr, flush=True)
        comm.coor.barrier()


with Coordinator(timeout_s=30) as coor, Communicator(coor, sys.argv[1], timeout_s=3) as comm:
    coor.barrier()  # the deadline is for the case alone
    globals()[sys.argv[2]](comm)
