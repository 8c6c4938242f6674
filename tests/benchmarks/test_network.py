"""The table of collectives between hosts: an MPI that does not end, and what its cells say then."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import network
from benchmarks.table import Table
from tests.network_hosts import NetworkHosts, NoNetworkNamespaces

ROOT = Path(__file__).parents[2]


def test_an_mpi_that_takes_too_long_is_ended_with_its_daemons(monkeypatch):
    monkeypatch.setattr(network, "MPI_S", 0.5)
    try:
        hosts = NetworkHosts(1, network="10.76.0")
    except NoNetworkNamespaces as error:
        pytest.skip(str(error))
    with hosts:
        daemon = ["sh", "-c", "setsid sleep 1000 & sleep 1000"]  # which keeps our pipe open
        assert network.of_mpi(hosts, daemon, []) == ({}, "not measured in 0.5 s")


SLOW_HOSTS = """
import socket, sys, time
from pathlib import Path
from tests.network_hosts import NetworkHosts, enter

hosts = NetworkHosts(2, "1gbit", network="10.76.1", delay_ms=20)
groups = Path("/sys/fs/cgroup/memory")
group = (groups if groups.exists() else groups.parent) / hosts.names[0]
group.mkdir()
enter(hosts.names[1])
listening = socket.create_server((hosts.addresses[1], 5000))
enter(hosts.names[0])
began = time.monotonic()
socket.create_connection((hosts.addresses[1], 5000)).close()
print(time.monotonic() - began, hosts.names[0], group, flush=True)
(group / "cgroup.procs").write_text("0")
time.sleep(600)
"""


def test_slow_hosts_are_as_slow_as_asked_and_leave_nothing_behind_when_killed():
    """A benchmark killed for its time left namespaces and cgroups until the machine restarted."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-S", "-c", SLOW_HOSTS], cwd=ROOT, **pipes) as process:
        words = process.stdout.readline().split()
        process.kill()
        why = process.stderr.read()
    if not words:
        pytest.skip(f"needs root, namespaces, cgroups and /dev/net/tun: {why}")
    seconds, name, group = words
    places = [Path("/run/netns", name), Path(group)]
    assert 0.04 <= float(seconds) < 2 and any(place.exists() for place in places)
    deadline = time.monotonic() + 30
    while any(place.exists() for place in places):
        assert time.monotonic() < deadline, places
        time.sleep(0.05)


def test_a_row_says_what_was_not_measured():
    table = Table("network", network.COLUMNS)
    ms = {"drumline": [20.0], "gloo": [40.0], "MPICH": "not measured in 40 s"}
    row = {"cell": "broadcast:250000:1", "right": {}, "sent": {"drumline": 250_000}, "ms": ms}
    network.add(table, row, 2, 1, "200mbit")
    cells = dict(zip(network.COLUMNS, table.rows[0], strict=True))
    assert cells["MPICH (ms)"] == "not measured in 40 s" and cells["MPICH / limit"] == ""
    assert cells["drumline / limit"] == 2 and cells["ratio"] == 0.5
