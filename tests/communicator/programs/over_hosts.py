"""Ranks forked into hosts of their own, so many on each: over_hosts.py WHAT 3+2. Prints exit codes.

"conforms", "stays the same", "outlives a rank", "outlives a host", "outlives a link",
"outlives a pause"
"""

import os
import signal
import sys
import threading
import time
import traceback
import uuid

import torch

from communicator import Communicator, CommunicatorTimeout, PeerLost, conformance
from coordinator import Coordinator
from launcher import LaunchInfo
from tests.network_hosts import NetworkHosts, NoNetworkNamespaces

NO_HOSTS = 77
LARGE = 300_007  # elements, of which segments are under way at the same time


def conforms(info, _):
    with Coordinator(info, timeout_s=60) as coor, Communicator(coor) as comm:
        report = conformance.check(comm, large=100_003)
        coor.barrier()
        print(report, file=sys.stderr)
        return report.ok and not report.having("unsupported")


def stays_the_same(info, _):
    """Sums of numbers that depend on the order of adding, and what is only moved."""
    seed = torch.Generator().manual_seed(info.rank)
    with Coordinator(info, timeout_s=60) as coor, Communicator(coor) as comm:
        rows = torch.randn(comm.world_size, LARGE, generator=seed)
        totals = [comm.allreduce(rows[0].clone()) for _ in range(2)]
        pieces = [comm.reduce_scatter(rows) for _ in range(2)]
        swapped = comm.alltoall(comm.alltoall(rows))
        of_all = comm.allgather(totals[0])
        gathered = comm.allgather(rows[0])
        given = comm.broadcast(rows[0].clone(), comm.world_size - 1)
        coor.barrier()
        close = torch.stack([row.double() for row in gathered]).sum(0)
        return (
            all(torch.equal(row, totals[1]) for row in of_all)
            and torch.equal(*pieces)
            and torch.equal(swapped, rows)
            and torch.equal(given, gathered[-1])
            and torch.allclose(totals[0].double(), close, atol=1e-4)
        )


def outlives(info, hosts, victims, limit_s, end):
    """True if an error names the last host, where `end` runs in the middle of a large call."""
    coor = Coordinator(info, timeout_s=limit_s)
    comm = Communicator(coor)
    tensor = torch.ones(1 << 20)
    comm.allreduce(tensor)
    if info.rank in victims:
        threading.Timer(0.1, end).start()
    try:
        while True:
            comm.allreduce(tensor.fill_(1))
    except (PeerLost, CommunicatorTimeout) as error:
        is_named = hosts.names[-1] in str(error) or info.rank in victims
        os.write(2, b"" if is_named else str(error).encode())
        return is_named


def kill():
    os.kill(os.getpid(), 9)


def outlives_a_rank(info, hosts):
    return outlives(info, hosts, [info.world_size - 1], 60, kill)


def outlives_a_host(info, hosts):
    return outlives(info, hosts, last_host(info), 60, kill)


def outlives_a_link(info, hosts):
    """The kernel gives a silent link up after seconds, before the deadline."""
    cut = lambda: hosts.set_link(len(hosts.names) - 1, "down")  # noqa: E731
    return outlives(info, hosts, last_host(info), 60, cut)


def outlives_a_pause(info, hosts):
    """Longer than the deadline, of all ranks of the last host: those of the others all name it."""

    def stop():
        if os.fork() == 0:
            time.sleep(9)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)

    return outlives(info, hosts, last_host(info), 4, stop)


def last_host(info):
    return range(info.world_size - SIZES[-1], info.world_size)


def be_rank(info, host, hosts):
    code = 1
    try:
        hosts.enter(host)
        torch.set_num_threads(1)
        code = 0 if globals()[sys.argv[1].replace(" ", "_")](info, hosts) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main():
    places = [(host, local) for host, size in enumerate(SIZES) for local in range(size)]
    launch_id = uuid.uuid4().hex
    with NetworkHosts(len(SIZES)) as hosts:
        pids = []
        for rank, (host, local) in enumerate(places):
            place = (len(places), SIZES[host], rank, local)
            info = LaunchInfo(launch_id, *place, hosts.addresses[0], 29_611)
            pids.append(os.fork() or be_rank(info, host, hosts))
        print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])


SIZES = [int(size) for size in sys.argv[2].split("+")]
try:
    main()
except NoNetworkNamespaces as error:
    print(error)
    sys.exit(NO_HOSTS)
