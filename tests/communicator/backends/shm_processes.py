"""Ranks that are processes, forked from one that has imported torch.

    python shm_processes.py BODY WORLD_SIZE [BACKEND]

Prints what each rank had to say, as JSON: what its body returned, or its exception.
"""

import json
import os
import resource
import signal
import socket
import sys
import time
import uuid

import torch

from communicator import Communicator, conformance
from communicator.backends.byte_streams import ARM, DISARM
from coordinator import Coordinator, DrumlineError
from launcher import LaunchInfo


def conforms(comm):
    return conformance.check(comm).having(conformance.FAILED)


def a_rank_dies(comm):
    """The last rank kills itself in its third call; the others say what they learn, and when."""
    comm.barrier()
    comm.allreduce(torch.ones(1000))
    if comm.rank == comm.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return learns(comm, lambda: comm.allreduce(torch.ones(1000)))


def a_sender_dies(comm):
    if comm.rank == comm.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return learns(comm, lambda: comm.recv(torch.ones(10), comm.world_size - 1))


def a_receiver_dies(comm):
    if comm.rank == comm.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return learns(comm, lambda: comm.send(torch.ones(10_000_000), comm.world_size - 1))


def learns(comm, call):
    start = time.monotonic()
    try:
        call()
    except DrumlineError as error:
        return [type(error).__name__, str(error), time.monotonic() - start]
    return "nothing"


def waits_without_descriptors(comm):
    """Rank 0 has none left while it waits for the last rank, which comes late."""
    comm.barrier()
    if comm.rank == comm.world_size - 1:
        time.sleep(0.5)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if comm.rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    tensor = torch.ones(3)
    try:
        comm.allreduce(tensor)
        peers = comm._backend.coor.peers
        return [tensor[0].item(), [peer.is_known_dead() for peer in peers]]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def a_rank_is_late(comm):
    comm.barrier()
    if comm.rank == comm.world_size - 1:
        time.sleep(3)
        return None
    return learns(comm, lambda: comm.broadcast(torch.ones(5), 1))


def waits_idly(comm):
    """CPU seconds that a rank spends while it waits a second for the last one."""
    comm.barrier()
    if comm.rank == comm.world_size - 1:
        time.sleep(1)
    start = time.process_time()
    comm.allreduce(torch.ones(10))
    return time.process_time() - start


def waits_for_letters(comm):
    """CPU seconds that rank 0 spends on letters which come every 20 ms, and what was in them."""
    comm.barrier()
    start, found = time.process_time(), []
    for number in range(25):
        if comm.rank == 1:
            time.sleep(0.02)
            comm.send(torch.tensor([number]), 0)
        else:
            found.append(comm.recv(torch.zeros(1, dtype=torch.int64), 1).item())
    return time.process_time() - start, found


def forks_a_child_that_takes_part(comm):
    """What the child is told, before it closes, and what the ranks then add up."""
    for _ in range(10):  # then calls of this kind leave Python out
        comm.allreduce(torch.ones(1))
    shared = comm.empty(1) if BACKEND == "shm" else torch.empty(1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        told = learns(comm, lambda: comm.allreduce(torch.full((1,), 100.0)))
        if comm.rank == 0:
            learns(comm, lambda: comm.send(torch.ones(1), 1))
        os.write(writer, told[1].encode())
        del shared
        comm.abort()
        comm.close()
        os._exit(0)
    os.waitpid(child, 0)
    shared.fill_(1.0)
    said = os.read(reader, 1000).decode()
    return said, comm.allreduce(torch.ones(1)).item(), comm.allreduce(shared).item()


def forks_while_a_call_runs(comm):
    """What a child of rank 0 is told, whose started call waits for rank 1; then the sum of it."""
    if comm.rank == 1:
        comm.coor.barrier()
        return comm.start("allreduce", torch.ones(1)).wait().item()
    handle = comm.start("allreduce", torch.ones(1))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        calls = (lambda: comm.allreduce(torch.ones(1)), lambda: comm.barrier(), handle.wait)
        os.write(writer, json.dumps([learns(comm, call)[1] for call in calls]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    comm.coor.barrier()
    return [*json.loads(os.read(reader, 5000)), handle.wait().item()]


def forks_a_child_that_disarms(comm):
    """Seconds that rank 0 sleeps until rank 1 writes, after a child of it asked for no bell."""
    streams = comm._backend.streams
    if comm.rank == 1:
        comm.coor.barrier()
        time.sleep(0.3)
        return streams.stream_write(0, b"letter", 0, 0)
    streams.stream_sleep(0)
    streams.stream_notify(ARM)
    child = os.fork()
    if child == 0:
        streams.stream_notify(DISARM)
        os._exit(0)
    os.waitpid(child, 0)
    comm.coor.barrier()
    start = time.monotonic()
    streams.stream_sleep(5000)
    return time.monotonic() - start


def has_little_memory(coor):
    """The largest file a process may write bounds the segment, too."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    return learns(None, lambda: Communicator(coor, backend="shm"))


BODIES = {
    body.__name__: body
    for body in (
        conforms,
        a_rank_dies,
        a_sender_dies,
        a_receiver_dies,
        a_rank_is_late,
        waits_without_descriptors,
        waits_idly,
        waits_for_letters,
        forks_a_child_that_takes_part,
        forks_while_a_call_runs,
        forks_a_child_that_disarms,
    )
}


def be_rank(info, name):
    with Coordinator(info, timeout_s=60) as coor:
        if name == "has_little_memory":
            return has_little_memory(coor)
        if name == "a_rank_is_late":
            coor.timeout_s = 1.0
        with Communicator(coor, backend=BACKEND) as comm:
            coor.timeout_s = 60.0
            return BODIES[name](comm)


def fork_rank(rank, world_size, launch_id, listener, name):
    """A process and the pipe it answers through."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    extras = {"master_fd": str(listener.fileno())} if rank == 0 else {}
    port = listener.getsockname()[1]
    try:
        said = be_rank(
            LaunchInfo(launch_id, world_size, world_size, rank, rank, "127.0.0.1", port, extras),
            name,
        )
    except BaseException as error:
        said = [type(error).__name__, str(error)]
    os.write(writer, json.dumps(said).encode())
    os._exit(0)


def run(name, world_size):
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        launch_id = uuid.uuid4().hex
        started = [
            fork_rank(rank, world_size, launch_id, listener, name) for rank in range(world_size)
        ]
    said = []
    for pid, reader in started:
        with open(reader, "rb") as pipe:
            said.append(json.loads(pipe.read() or b'"died"'))
        os.waitpid(pid, 0)
    return {"said": said, "pids": [pid for pid, _ in started]}


BACKEND = sys.argv[3] if len(sys.argv) > 3 else "shm"

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]))))
