"""torch.distributed on drumline over two hosts: by connections that prove a secret."""

import json
import shutil

import pytest

from tests.cases import soak

pytestmark = pytest.mark.skipif(not shutil.which("ip"), reason="runs on Linux with iproute2")
# One process per host, which forks its ranks.
HOST = """
import json, os, sys, traceback
from datetime import timedelta
import torch
import torch.distributed as dist
import communicator.torch_interop.lazy_communicators as lazy_communicators
from communicator import PeerLost

def messages(rank, world):
    came, parts = torch.zeros(300_000), torch.full((300_000,), float(rank))
    received = dist.irecv(came, (rank - 1) % world)
    dist.all_reduce(torch.ones(3))
    sent = dist.isend(parts, (rank + 1) % world)
    received.wait()
    sent.wait()
    small = torch.zeros(2)
    if rank == 0:
        sources = sorted(dist.recv(small, tag=1) for _ in range(world - 1))
        assert sources == list(range(1, world))
    else:
        dist.send(small, 0, tag=1)
    return came[0].item()

def body(rank, world):
    backends = []
    choose = lazy_communicators.choose_for_devices
    def noting(*arguments):
        kinds = choose(*arguments)
        backends.append(kinds["cpu"].name)
        return kinds
    lazy_communicators.choose_for_devices = noting
    limit = timedelta(seconds=40)
    store = dist.TCPStore("10.77.0.1", 29617, world, rank == 0, limit)
    dist.init_process_group("drumline", store=store, rank=rank, world_size=world, timeout=limit)
    total = torch.full((100_003,), float(rank))
    dist.all_reduce(total)
    assert (total == sum(range(world))).all()
    before = messages(rank, world)
    dist.barrier()
    if rank == world - 1:
        sys.stdout.write(json.dumps([backends[0], before]) + "\\n")
        sys.stdout.flush()
        os._exit(0)
    try:
        dist.irecv(total, world - 1).wait()
    except PeerLost as error:
        assert f"rank {world - 1}" in str(error)
        sys.stdout.write(json.dumps([backends[0], before]) + "\\n")
        sys.stdout.flush()

def rank_of(rank, world):
    code = 1
    try:
        body(rank, world)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)

first, size, world = map(int, sys.argv[1:])
torch.set_num_threads(1)
pids = [os.fork() or rank_of(rank, world) for rank in range(first, first + size)]
sys.exit(any(os.waitpid(pid, 0)[1] for pid in pids))
"""


@pytest.mark.parametrize(("size", "backend"), [(2, "hierarchical"), soak(1, "tcp")])
def test_ranks_of_two_hosts_sum_and_exchange_messages(hosts, commands, size, backend):
    world = 2 * size
    started = [
        hosts.start(
            index, ["python", "-c", HOST, *map(str, (index * size, size, world))], **commands
        )
        for index in range(2)
    ]
    outs = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    found = [json.loads(line) for out in outs for line in out.splitlines()]
    assert sorted(found) == [[backend, float(rank)] for rank in range(world)]
