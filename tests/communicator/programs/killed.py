"""Ranks that are killed in the middle of collectives: processes forked from one that has torch.

    PYTHONPATH=. python tests/communicator/programs/killed.py shm 200

prints one line of JSON per round, and ends with code 1 if in any of them a survivor was not told
who died, or was told late, or ended badly. The tests run fewer rounds.
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
SOON_S = 15  # generous: the machine may be busy


def calls(comm, number):
    """The number-th call: every rank draws the same."""
    chance = random.Random(number)
    count = chance.choice([1, 1000, 300_000])
    mine, rows = torch.ones(count), torch.ones(WORLD, count)
    choice = (
        lambda: comm.allreduce(mine),
        lambda: comm.allgather(mine),
        lambda: comm.broadcast(mine, chance.randrange(WORLD)),
        lambda: comm.reduce_scatter(rows),
        lambda: comm.alltoall(rows),
        lambda: comm.reduce(mine, chance.randrange(WORLD)),
        comm.barrier,
    )
    choice[number % len(choice)]()


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


def is_right(fate):
    """Did the survivors end well and soon, each told who died?"""
    victim = fate["victim"]
    codes = [-signal.SIGKILL if rank == victim else 0 for rank in range(WORLD)]
    told = [text for rank, text in enumerate(fate["told"]) if rank != victim]
    named = all(f"rank {victim}" in text for text in told)
    return named and fate["codes"] == codes and fate["took_s"] < SOON_S


def main(backend, rounds):
    chance, right = random.Random(1), True
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
        right &= is_right(found)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
