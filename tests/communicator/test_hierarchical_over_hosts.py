"""Ranks of two hosts, 3 and 2: processes in two network namespaces, each with a name of its own."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from launcher import LaunchInfo

ROOT = Path(__file__).parents[2]
SIZES = (3, 2)
# One process per host, which imports torch and forks its ranks.
HOST = """
import os, sys
import torch
from communicator import Communicator, PeerLost, conformance
from coordinator import Coordinator
from launcher import LaunchInfo

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


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, timeout=10, capture_output=True)


@pytest.fixture(scope="module")
def hosts():
    """The names of two network namespaces, 10.78.0.1 and 10.78.0.2."""
    names = [f"dc{os.getpid()}{letter}" for letter in "ab"]
    made = []
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network namespaces ({error}): runs as root on Linux with iproute2")
            made.append(name)
        a, b = names
        ip("link", "add", f"{a}0", "netns", a, "type", "veth", "peer", "name", f"{b}0", "netns", b)
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", f"{name}0")
            for device in ("lo", f"{name}0"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


def run(hosts, what):
    """The exit codes of the ranks of both hosts."""
    launch_id = uuid.uuid4().hex
    started = []
    for host, size in enumerate(SIZES):
        first = sum(SIZES[:host])
        infos = [
            LaunchInfo(launch_id, sum(SIZES), size, first + local, local, "10.78.0.1", 29611)
            for local in range(size)
        ]
        inside = ["ip", "netns", "exec", hosts[host], "unshare", "--uts", "sh", "-c"]
        command = [sys.executable, "-c", HOST, what, *(i.to_bytes().decode() for i in infos)]
        started.append(
            subprocess.Popen(
                [*inside, f'hostname {hosts[host]}; exec "$@"', "sh", *command],
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


@pytest.mark.skipif(not shutil.which("ip"), reason="runs on Linux with iproute2")
def test_five_ranks_of_two_hosts_conform(hosts):
    assert run(hosts, "conforms") == [0] * 5


@pytest.mark.skipif(not shutil.which("ip"), reason="runs on Linux with iproute2")
def test_a_killed_rank_ends_the_calls_of_both_hosts(hosts):
    assert run(hosts, "outlives") == [0, 0, 0, 0, -9]
