"""Ranks that are killed in the middle of collectives: processes forked from one that has torch.

python killed.py BACKEND ROUNDS     # prints one line of JSON per round
"""

import json
import os
import random
import signal
import socket
import sys
import time
import uuid

import torch

from communicator import Communicator, PeerLost
from coordinator import Coordinator
from launcher import LaunchInfo

WORLD = 3
LIMIT_S = 15


def calls(comm, number):
    """The number-th call: every rank draws the same."""
    chance = random.Random(number)
    count = chance.choice([1, 1000, 300_000])
    if number % 3 == 0:
        comm.allreduce(torch.ones(count))
    elif number % 3 == 1:
        comm.allgather(torch.ones(count))
    else:
        comm.broadcast(torch.ones(count), chance.randrange(WORLD))


def live(info, backend, ready):
    """Call until a peer is lost; the rest of the pipe says what this rank was told."""
    coor = Coordinator(info, timeout_s=LIMIT_S)
    comm = Communicator(coor, backend)
    comm.barrier()
    os.write(ready, b"!")
    number = 0
    try:
        while True:
            number += 1
            calls(comm, number)
    except PeerLost as error:
        os.write(ready, str(error).encode())


def start(info, backend):
    """A forked rank: its pid and what it writes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        torch.set_num_threads(1)
        live(info, backend, writing)
    except BaseException as error:
        os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os._exit(0)


def fate(ranks, victim, after_s):
    """Kill one rank some time after all are ready; what became of each."""
    for _, reading in ranks:
        os.read(reading, 1)
    time.sleep(after_s)
    killed = time.monotonic()
    os.kill(ranks[victim][0], signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in ranks]
    took_s = time.monotonic() - killed
    told = [os.read(reading, 4000).decode() for _, reading in ranks]
    for _, reading in ranks:
        os.close(reading)
    return {"victim": victim, "codes": codes, "told": told, "took_s": took_s}


def main(backend, rounds):
    chance = random.Random(1)
    for _ in range(rounds):
        launch_id = uuid.uuid4().hex
        with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
            port, fd = listener.getsockname()[1], str(listener.fileno())
            infos = [
                LaunchInfo(launch_id, WORLD, WORLD, rank, rank, "127.0.0.1", port, extras)
                for rank in range(WORLD)
                for extras in [{} if rank else {"master_fd": fd}]
            ]
            ranks = [start(info, backend) for info in infos]
        found = fate(ranks, chance.randrange(WORLD), chance.uniform(0, 0.03))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
