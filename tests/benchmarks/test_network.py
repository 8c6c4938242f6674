"""The table of collectives between hosts: an MPI that does not end, and what its cells say then."""

import pytest

from benchmarks import network
from benchmarks.table import Table
from tests.network_hosts import NetworkHosts, NoNetworkNamespaces


def test_an_mpi_that_takes_too_long_is_ended_with_its_daemons(monkeypatch):
    monkeypatch.setattr(network, "MPI_S", 0.5)
    try:
        hosts = NetworkHosts(1, network="10.76.0")
    except NoNetworkNamespaces as error:
        pytest.skip(str(error))
    with hosts:
        daemon = ["sh", "-c", "setsid sleep 1000 & sleep 1000"]  # which keeps our pipe open
        assert network.of_mpi(hosts, daemon, []) == ({}, "not measured in 0.5 s")


def test_a_row_says_what_was_not_measured():
    table = Table("network", network.COLUMNS)
    ms = {"drumline": [20.0], "gloo": [40.0], "MPICH": "not measured in 40 s"}
    row = {"cell": "broadcast:250000:1", "right": {}, "sent": {"drumline": 250_000}, "ms": ms}
    network.add(table, row, 2, 1, "200mbit")
    cells = dict(zip(network.COLUMNS, table.rows[0], strict=True))
    assert cells["MPICH (ms)"] == "not measured in 40 s" and cells["MPICH / limit"] == ""
    assert cells["drumline / limit"] == 2 and cells["ratio"] == 0.5
