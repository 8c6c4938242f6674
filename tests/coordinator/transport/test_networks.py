"""Hosts with networks of their own, made of network namespaces; runs as root on Linux."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cases import soak
from tests.network_hosts import Namespaces, NoNetworkNamespaces, ip

ROOT = Path(__file__).parents[3]
EVERY_CALL = Path(__file__).parents[1] / "failure" / "every_call.py"
# What a rank runs: its LaunchInfo and the program are arguments, its outcome is printed.
RANK = """
import json, socket, sys, time
from coordinator import Coordinator, CoordinatorTimings
from launcher import LaunchInfo
outcome = {"address": "", "error": "", "text": ""}
info = LaunchInfo.from_bytes(sys.argv[1].encode())
try:
    timings = CoordinatorTimings(waiting_notice_s=0.6)
    with Coordinator(info, timeout_s=float(sys.argv[3]), timings=timings) as coor:
        outcome["address"] = coor.address
        exec(sys.argv[2])
except Exception as error:
    outcome["error"], outcome["text"] = type(error).__name__, str(error)
outcome["at"] = time.time()
print(json.dumps(outcome))
"""
MEET = "outcome['value'] = coor.allgather_object(coor.rank)"
LOOP = """
print("met", flush=True)
while True:
    coor.barrier()
    time.sleep(0.05)
"""


class Hosts(Namespaces):
    """Namespaces a and b, joined by a cable (veth)."""

    def cable(self, network=1, six=False):
        """A veth pair between the hosts; host 0 is .1, host 1 is .2 of the network."""
        ends = [f"v{network}{letter}" for letter in "ab"]
        a, b = self.names
        ip("link", "add", ends[0], "netns", a, "type", "veth", "peer", "name", ends[1], "netns", b)
        for name, end, number in zip(self.names, ends, "12", strict=True):
            address = f"fd00:{network}::{number}/64" if six else f"10.8{network}.0.{number}/24"
            options = ["nodad"] if six else []
            ip("-n", name, "addr", "add", address, "dev", end, *options)
            ip("-n", name, "link", "set", end, "up")
        return ends

    def tables(self, *texts):
        """What each host has in /etc/hosts."""
        for index, text in enumerate(texts):
            self.write_table(index, text)

    def start(self, host, rank, world, addr, program, timeout_s=20, port=24680, stderr=None):
        """One rank per host, two if world is 4."""
        local = world // 2
        info = {
            "launch_id": f"networks-{os.getpid()}-{addr}", "world_size": world, "rank": rank,
            "local_world_size": local, "local_rank": rank % local,
            "master_addr": addr, "master_port": port, "extras": {},
        }  # fmt: skip
        arguments = [json.dumps(info), program, str(timeout_s)]
        process = subprocess.Popen(
            self.command(host, [sys.executable, "-c", RANK, *arguments]),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def start_all(self, addr, program, world=2, timeout_s=20):
        local = world // 2
        return [
            self.start(rank // local, rank, world, addr, program, timeout_s)
            for rank in range(world)
        ]


@pytest.fixture
def hosts():
    try:
        pair = Hosts(2)
    except NoNetworkNamespaces as error:
        pytest.skip(str(error))
    with pair:
        yield pair


def outcomes(processes, limit_s=30):
    return [json.loads(each.communicate(timeout=limit_s)[0].splitlines()[-1]) for each in processes]


def addresses(results):
    assert [each["error"] for each in results] == [""] * len(results), results
    assert all(each["value"] == list(range(len(results))) for each in results)
    return [each["address"] for each in results]


def test_two_hosts_meet_by_the_address_between_them(hosts):
    hosts.cable()
    results = outcomes(hosts.start_all("10.81.0.1", MEET, world=4))
    assert addresses(results) == ["10.81.0.1"] * 2 + ["10.81.0.2"] * 2


def test_a_name_that_is_loopback_to_its_own_host_is_no_trap(hosts):
    hosts.cable()
    a, b = hosts.names
    hosts.tables(f"127.0.1.1 {a}\n10.81.0.2 {b}", f"127.0.1.1 {b}\n10.81.0.1 {a}")
    results = outcomes(hosts.start_all(a, MEET, world=4))
    assert addresses(results) == ["10.81.0.1"] * 2 + ["10.81.0.2"] * 2


def test_hosts_that_know_nothing_but_ipv6_meet(hosts):
    hosts.cable(six=True)
    a, b = hosts.names
    hosts.tables(f"::1 {a}\nfd00:1::2 {b}", f"::1 {b}\nfd00:1::1 {a}")
    assert addresses(outcomes(hosts.start_all("fd00:1::1", MEET))) == ["fd00:1::1", "fd00:1::2"]
    assert addresses(outcomes(hosts.start_all(a, MEET))) == ["fd00:1::1", "fd00:1::2"]


def test_of_several_interfaces_the_one_towards_the_master_is_taken(hosts):
    hosts.cable(network=1)
    hosts.cable(network=2)
    for name in hosts.names:  # and one that leads nowhere, as docker makes
        ip("-n", name, "link", "add", "docker0", "type", "bridge")
        ip("-n", name, "addr", "add", "172.17.0.1/16", "dev", "docker0")
        ip("-n", name, "link", "set", "docker0", "up")
    results = outcomes(hosts.start_all("10.82.0.1", MEET))
    assert addresses(results) == ["10.82.0.1", "10.82.0.2"]


def test_a_bridge_beside_a_loopback_name_is_no_trap(hosts):
    for name in hosts.names:
        ip("-n", name, "link", "add", "docker0", "type", "bridge")
        ip("-n", name, "addr", "add", "172.17.0.1/16", "dev", "docker0")
        ip("-n", name, "link", "set", "docker0", "up")
    hosts.cable()
    a, b = hosts.names
    hosts.tables(f"127.0.1.1 {a}\n10.81.0.2 {b}", f"127.0.1.1 {b}\n10.81.0.1 {a}")
    assert addresses(outcomes(hosts.start_all(a, MEET))) == ["10.81.0.1", "10.81.0.2"]


def test_only_the_address_between_the_hosts_is_listened_on(hosts):
    hosts.cable()
    processes = hosts.start_all("10.81.0.1", "time.sleep(1.5)\n" + MEET)
    seen = set()
    while any(process.poll() is None for process in processes):
        for name in hosts.names:
            command = ["ip", "netns", "exec", name, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
            table = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
            rows = [line.split() for line in table.splitlines()]
            seen |= {row[1].partition(":")[0] for row in rows if row[3] == "0A"}
        time.sleep(0.05)
    addresses(outcomes(processes))
    assert seen <= {"0100510A", "0200510A"} and "0100510A" in seen  # 10.81.0.1, 10.81.0.2


def test_a_master_that_cannot_be_reached_is_named(hosts):
    hosts.cable()
    (result,) = outcomes([hosts.start(1, 1, 2, "10.81.0.77", MEET, timeout_s=1)])
    assert result["error"] == "CoordinatorTimeout"
    for word in ("rank 1", hosts.names[1], "10.81.0.77:24680"):
        assert word in result["text"], result


def test_a_name_that_nobody_knows_is_named(hosts):
    hosts.cable()
    hosts.tables("", "")
    (result,) = outcomes([hosts.start(1, 1, 2, "nowhere.invalid", MEET, timeout_s=1)])
    assert result["error"] == "CoordinatorError"
    assert "rank 1" in result["text"] and "nowhere.invalid" in result["text"], result


# Both hosts, the errno once the kernel gave one, and since when.
HOST, ERRNO = r".*10\.81\.0\.\d.*", "(E[A-Z]+, )?"
FAILURE = f"network failure between {HOST} and {HOST}: {ERRNO}it has not answered"


def met(processes):
    for process in processes:
        assert process.stdout.readline() == "met\n"


def test_a_cut_cable_is_an_error_in_every_call_on_both_sides_at_the_deadline(hosts):
    ends = hosts.cable()
    program = (
        f"import runpy; every = runpy.run_path({str(EVERY_CALL)!r}); coors = every['made'](info)\n"
        "print('met', flush=True); sys.stdin.readline()\n"
        "outcome['value'] = every['waited'](coors, 1 - info.rank, 4.0)\n"
    )
    processes = hosts.start_all("10.81.0.1", program, timeout_s=5)
    met(processes)
    ip("-n", hosts.names[1], "link", "set", ends[1], "down")
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for rank, outcome in enumerate(outcomes(processes)):
        calls = outcome["value"]
        assert {"barrier", "allgather large", "split", "wait"} <= calls.keys(), outcome
        for name, (error, text, took_s, _) in calls.items():
            assert error == "CoordinatorTimeout", (rank, name, text)
            assert f"host {hosts.names[1 - rank]}" in text, (rank, name, text)
            assert re.search(FAILURE, text), (rank, name, text)
            assert "printed last" not in text, (rank, name, text)
            assert took_s < 4 + 10, (rank, name, took_s, text)


TENSORS = """
import torch
from communicator import Communicator
comm = Communicator(coor, "tcp", timeout_s=float(sys.argv[3]))
print("met", flush=True)
while True:
    TRANSFER
    time.sleep(0.05)
"""
SEND_OR_RECV = "(comm.send if coor.rank else comm.recv)(torch.ones(4), 1 - coor.rank)"


@pytest.mark.parametrize(
    "transfer",
    ["comm.allreduce(torch.ones(4))", soak(SEND_OR_RECV)],
)
@pytest.mark.parametrize("timeout_s", [soak(4), 20], ids=["by the deadline", "by the kernel"])
def test_a_cut_cable_is_a_network_failure_in_calls_of_the_communicator(
    hosts, transfer, timeout_s, monkeypatch
):
    """With half of all waiting times: nothing here is slow that could be taken for a failure."""
    monkeypatch.setenv("DRUMLINE_TIME_SCALE", "0.5")
    ends = hosts.cable()
    program = TENSORS.replace("TRANSFER", transfer)
    processes = hosts.start_all("10.81.0.1", program, timeout_s=timeout_s)
    met(processes)
    ip("-n", hosts.names[1], "link", "set", ends[1], "down")
    for outcome in outcomes(processes):
        assert outcome["error"] in ("PeerLost", "CommunicatorTimeout")[: 1 + (timeout_s < 5)], (
            outcome
        )
        assert re.search(FAILURE, outcome["text"]), outcome
        assert "printed last" not in outcome["text"], outcome


def test_a_cut_cable_is_shown_on_both_sides_long_before_the_deadline(hosts):
    ends = hosts.cable()
    program = [LOOP, 90, 24680, subprocess.PIPE]
    processes = [hosts.start(rank, rank, 2, "10.81.0.1", *program) for rank in range(2)]
    met(processes)
    ip("-n", hosts.names[1], "link", "set", ends[1], "down")
    for process, me, other in zip(processes, "01", ["ranks [1]", "rank 0"], strict=True):
        line = next(line for line in process.stderr if "network failure" in line)
        start = rf"rank {me} \(host {hosts.names[int(me)]}\) has waited \d+ s for "
        assert re.match(f"{start}{re.escape(other)}: {FAILURE}", line), line


def _waiting(text):
    """The lines but for that which says once that such a launch has no secret."""
    return [line for line in text.splitlines() if "has no secret of its own" not in line]


def test_every_node_says_whom_it_waits_for_while_a_launch_begins(hosts):
    hosts.cable()
    a, b = hosts.names
    first = hosts.start(0, 0, 4, "10.81.0.1", MEET, timeout_s=2, stderr=subprocess.PIPE)
    assert first.wait(30) == 0
    second = hosts.start(1, 2, 4, "10.81.0.1", MEET, timeout_s=2, stderr=subprocess.PIPE)
    assert second.wait(30) == 0
    line, *rest = _waiting(first.stderr.read())
    where = "ranks [1, 2, 3] of 4 at 10.81.0.1:24680; ranks seen: [0]"
    assert re.fullmatch(rf"rank 0 \(host {a}\) has waited \d s for {re.escape(where)}", line)
    assert 0 < len(rest) < 4  # it ends after 2 s
    line, *rest = _waiting(second.stderr.read())
    where = "rank 0 at 10.81.0.1:24680: [Errno 111] Connection refused"
    assert re.fullmatch(rf"rank 2 \(host {b}\) has waited \d s for {re.escape(where)}", line)
    assert 0 < len(rest) < 4


def test_a_process_stopped_on_another_host_is_told_from_a_cut_cable(hosts):
    hosts.cable()
    processes = hosts.start_all("10.81.0.1", LOOP, timeout_s=4)
    met(processes)
    os.kill(processes[1].pid, signal.SIGSTOP)
    (result,) = outcomes(processes[:1])
    os.kill(processes[1].pid, signal.SIGKILL)
    assert result["error"] == "CoordinatorTimeout"
    assert "suspended, or stuck" in result["text"] and "has not answered" not in result["text"], (
        result
    )


def test_a_cable_that_is_plugged_in_again_in_time_is_no_error(hosts):
    ends = hosts.cable()
    program = (
        "print('met', flush=True)\nfor _ in range(30):\n    coor.barrier(); time.sleep(0.05)\n"
    )
    processes = hosts.start_all("10.81.0.1", program + MEET, timeout_s=20)
    met(processes)
    ip("-n", hosts.names[0], "link", "set", ends[0], "down")
    time.sleep(1.0)
    ip("-n", hosts.names[0], "link", "set", ends[0], "up")
    addresses(outcomes(processes))
