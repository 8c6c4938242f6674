"""Ranks of two hosts, 3 and 2: processes in two network namespaces, each with a name of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from launcher import LaunchInfo
from tests.network_hosts import NetworkHosts, NoNetworkNamespaces

ROOT = Path(__file__).parents[3]
SIZES = (3, 2)
# One process per host, which imports torch and forks its ranks.
HOST = """
import os, sys
import torch
from communicator import Communicator, PeerLost, conformance
from coordinator import Coordinator
from launcher import LaunchInfo
from tests.network_hosts import NetworkHosts, NoNetworkNamespaces

def conforms(info):
    with Coordinator(info, timeout_s=60) as coor, Communicator(coor) as comm:
        report = conformance.check(comm, large=100_003)
        coor.barrier()
        return comm.backend == "hierarchical" and report.ok and not report.having("unsupported")

def outlives(info):
    coor = Coordinator(info, timeout_s=60)
    comm = Communicator(coor)
    comm.barrier()
    if info.rank == 4:
        os.kill(os.getpid(), 9)
    try:
        while True:
            comm.allreduce(torch.ones(1000))
    except PeerLost as error:
        found = "rank 4 (" in str(error)
        os.write(2, b"" if found else str(error).encode())
        return found

def rank(info):
    code = 1
    try:
        code = 0 if globals()[sys.argv[1]](info) else 1
    finally:
        os._exit(code)

pids = [os.fork() or rank(LaunchInfo.from_bytes(data.encode())) for data in sys.argv[2:]]
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
print(codes)
"""


@pytest.fixture(scope="module")
def hosts():
    try:
        network = NetworkHosts(2)
    except NoNetworkNamespaces as error:
        pytest.skip(str(error))
    with network:
        yield network


def run(hosts, what):
    """The exit codes of the ranks of both hosts."""
    launch_id = uuid.uuid4().hex
    started = []
    for host, size in enumerate(SIZES):
        first = sum(SIZES[:host])
        infos = [
            LaunchInfo(launch_id, sum(SIZES), size, first + local, local, hosts.addresses[0], 29611)
            for local in range(size)
        ]
        command = [sys.executable, "-c", HOST, what, *(i.to_bytes().decode() for i in infos)]
        started.append(
            subprocess.Popen(
                hosts.command(host, command),
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                start_new_session=True,
            )
        )
    try:
        outs = [process.communicate(timeout=90)[0] for process in started]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [code for out in outs for code in json.loads(out)]


def test_five_ranks_of_two_hosts_conform(hosts):
    assert run(hosts, "conforms") == [0] * 5


def test_a_killed_rank_ends_the_calls_of_both_hosts(hosts):
    assert run(hosts, "outlives") == [0, 0, 0, 0, -9]
