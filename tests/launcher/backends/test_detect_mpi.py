"""What the variables of Open MPI 5, MPICH 5 and Intel MPI 2021 say, as seen under each."""

import os
import socket
import sys
from types import SimpleNamespace

import pytest

from launcher import LaunchInfoError
from launcher.backends import mpi
from launcher.system import linux

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "prterun-vm-5339@1",
    "PMIX_RANK": "1",
    "PMIX_HOSTNAME": "vm",
}
INTEL_MPI = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "11",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "I_MPI_HYDRA_UUID": "a8160000-f6aa-8259-c460-060038379a5e",
    "I_MPI_INFO_NP": "1",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_HOSTNAME": "vm",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "LAUNCH_ID": "tuesday",
}
SEVERAL_NODES = {
    "open": {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "5", "MASTER_ADDR": "10.0.0.1"},
    "intel": {**INTEL_MPI, "PMI_SIZE": "5", "MASTER_ADDR": "10.0.0.1"},
    "mpich": {**MPICH, "PMI_SIZE": "5", "MASTER_ADDR": "10.0.0.1"},
}
ONE_NODE = {"open": OPEN_MPI, "intel": INTEL_MPI, "mpich": MPICH}
SIZE = {"open": "OMPI_COMM_WORLD_SIZE", "intel": "PMI_SIZE", "mpich": "PMI_SIZE"}
RANK = {"open": "OMPI_COMM_WORLD_RANK", "intel": "PMI_RANK", "mpich": "PMI_RANK"}
every_mpi = pytest.mark.parametrize("backend", ["open", "intel", "mpich"])


@every_mpi
def test_rank_on_one_node_meets_on_loopback(backend):
    info = mpi.detect(ONE_NODE[backend])
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (1, 2, 1, 2)
    assert info.master_addr == "127.0.0.1"
    assert info.master_port > 0


@every_mpi
def test_rank_on_several_nodes_meets_at_the_master_given(backend):
    info = mpi.detect({**SEVERAL_NODES[backend], "MASTER_PORT": "4567"})
    assert (info.world_size, info.local_world_size) == (5, 2)
    assert (info.master_addr, info.master_port) == ("10.0.0.1", 4567)


@every_mpi
def test_all_ranks_agree_on_where_to_meet(backend):
    first = mpi.detect({**SEVERAL_NODES[backend], RANK[backend]: "0"})
    second = mpi.detect(SEVERAL_NODES[backend])
    assert (first.launch_id, first.master_port) == (second.launch_id, second.master_port)


def test_two_launches_hash_to_two_ports():
    second = mpi.detect({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-vm-5340@1"})
    assert mpi.detect(OPEN_MPI).master_port != second.master_port


def test_spawned_job_is_another_launch_than_the_job_that_spawned_it():
    spawned = mpi.detect({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-vm-5339@2"})
    assert mpi.detect(OPEN_MPI).launch_id != spawned.launch_id


def test_node_rank_of_open_mpi_is_no_node_s_index():
    """Beside another job on its node, the only rank of a node has a node rank that is not 0."""
    alone = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    info = mpi.detect({**alone, "OMPI_COMM_WORLD_NODE_RANK": "7", "MASTER_ADDR": "10.0.0.1"})
    assert (info.local_rank, info.local_world_size) == (0, 1)


def test_mpich_on_one_node_is_named_by_the_process_at_the_other_end():
    rank_end, starter_end = socket.socketpair()
    with rank_end, starter_end:
        environ = {**MPICH, "PMI_FD": str(rank_end.fileno()), "LAUNCH_ID": ""}
        info = mpi.detect(environ)
        assert str(os.getpid()) in info.launch_id
        assert mpi.detect({**environ, "PMI_RANK": "0"}).launch_id == info.launch_id


def test_several_nodes_without_a_master_need_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(LaunchInfoError, match="Set MASTER_ADDR"):
        mpi.detect({**SEVERAL_NODES["open"], "MASTER_ADDR": ""})


def test_mpi4py_of_another_mpi_than_mpiexec_s_is_an_error(monkeypatch):
    """It sees a world of one, and each rank would agree with itself."""
    world = SimpleNamespace(Get_size=lambda: 1)
    version = "Acme MPI\n1.0"
    other = SimpleNamespace(
        COMM_WORLD=world, Get_library_version=lambda: version, Is_initialized=lambda: True
    )
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", other)
    with pytest.raises(LaunchInfoError, match=r"5 ranks, but mpi4py sees 1.*Acme MPI"):
        mpi.detect({**SEVERAL_NODES["open"], "MASTER_ADDR": ""})


class World:
    """MPI's world of two ranks, which come one after the other."""

    answer = b""

    def __init__(self, rank):
        self.Get_rank, self.Get_size = lambda: rank, lambda: 2

    def Allgather(self, own, everyone):
        everyone[0][:] = own[0] * 2

    def Bcast(self, data, root):
        if self.Get_rank() == root:
            World.answer = bytes(data[0])
        data[0][:] = World.answer


@pytest.mark.parametrize("launch_id", ["", "tuesday"])
def test_ranks_on_hosts_whose_kernels_keep_other_ports_are_told_that_of_rank_0(
    monkeypatch, launch_id
):
    """Each computed it for itself, and they did not find each other."""
    monkeypatch.setattr(mpi.mpi_rendezvous, "_address", lambda *_: "10.0.0.2")
    infos = []
    for rank, ephemeral in enumerate([range(0), range(10_000, 32_000)]):
        fake = SimpleNamespace(COMM_WORLD=World(rank), Is_initialized=lambda: True, BYTE=None)
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake)
        monkeypatch.setattr(linux, "ephemeral_ports", lambda ports=ephemeral: ports)
        mpi.mpi_rendezvous.exchange.cache_clear()
        one_each = {"PMI_RANK": f"{rank}", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
        infos.append(mpi.detect({**MPICH, **one_each, "LAUNCH_ID": launch_id}))
    mpi.mpi_rendezvous.exchange.cache_clear()
    assert len({(info.launch_id, info.master_addr, info.master_port) for info in infos}) == 1


@every_mpi
def test_incomplete_variables_name_the_missing_one(backend):
    for name in (SIZE[backend], RANK[backend]):
        incomplete = {key: value for key, value in ONE_NODE[backend].items() if key != name}
        with pytest.raises(LaunchInfoError, match=f"{name} not set"):
            mpi.detect(incomplete)


@pytest.mark.parametrize(
    "environ", [{"PMI_RANK": "0"}, {"PMI_SIZE": "2"}, {"MPI_LOCALNRANKS": "2"}]
)
def test_one_variable_alone_is_an_error(environ):
    with pytest.raises(LaunchInfoError, match="only some of"):
        mpi.detect(environ)


@every_mpi
def test_contradiction_is_an_error_with_the_values(backend):
    with pytest.raises(LaunchInfoError, match=f"'{RANK[backend]}': '9'"):
        mpi.detect({**ONE_NODE[backend], RANK[backend]: "9"})


def test_process_that_mpiexec_did_not_start_is_not_a_rank():
    assert mpi.detect({"PATH": "/bin", "OMPI_ALLOW_RUN_AS_ROOT": "1", "MPI_HOME": "/opt"}) is None
