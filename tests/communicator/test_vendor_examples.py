"""The examples for vendors: both doors lead to a backend that conforms."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from communicator import (
    Communicator,
    CommunicatorError,
    CommunicatorTimeout,
    PeerLost,
    Unsupported,
    conformance,
)
from coordinator import Coordinator
from launcher import LaunchInfo

EXAMPLE = Path(__file__).parents[2] / "examples" / "vendor_plugin"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the README has a vendor make, elsewhere: a copy of the example, the header, `make`."""
    folder = tmp_path_factory.mktemp("vendor") / "acme"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("*.so", "build"))
    shutil.copy(EXAMPLE.parents[1] / "csrc" / "abi" / "communicator.h", folder)
    subprocess.run(["make", "-s", "-C", folder, "CC=cc -Werror"], check=True)
    return folder


def test_the_header_is_installed_and_the_example_builds_with_it(tmp_path):
    """As pip does it, but for the compiled parts; then the example with no copy of the header."""
    root, toy, installed = EXAMPLE.parents[1], tmp_path / "toy", tmp_path / "installed"
    steps = ["egg_info", "--egg-base", tmp_path, "build_py", "--build-lib", installed]
    subprocess.run([sys.executable, "setup.py", "-q", *steps], cwd=root, check=True)
    toy.mkdir()
    for name in ("Makefile", "allreduce.h", "toy.c"):
        shutil.copy(EXAMPLE / name, toy)
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "PYTHONPATH": str(installed)}
    subprocess.run(["make", "-s", "-C", toy], env=environ, check=True)
    assert not (installed / "communicator" / "communicator.h").is_symlink()
    assert (toy / "libtoy.so").exists()


def test_the_example_builds_where_it_lies_in_the_source():
    steps = subprocess.check_output(["make", "-n", "-B", "-C", EXAMPLE], text=True)
    assert "-I../../csrc/abi " in steps


@pytest.fixture
def toy(folder):
    return folder / "libtoy.so"


@pytest.fixture
def acme():
    path = EXAMPLE / "python_backend" / "acme_communicator.py"
    spec = importlib.util.spec_from_file_location("acme_communicator", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Acme


@pytest.fixture
def overfabric(folder):
    if not Path("/usr/include/rdma/fabric.h").exists():
        pytest.skip("no libfabric: runs after `apt-get install libfabric-dev`")
    subprocess.run(["make", "-s", "-C", folder, "CC=cc -Werror", "liboverfabric.so"], check=True)
    return folder / "liboverfabric.so"


def conforms(backend, **options):
    def body(info):
        with (
            Coordinator(info, timeout_s=30) as coor,
            Communicator(coor, backend=backend, **options) as comm,
        ):
            report = conformance.check(comm, large=30_011)
            return report.having(conformance.FAILED), len(report.having(conformance.PASSED))

    return body


@pytest.mark.parametrize("name", ["libtoy.so", "./libtoy.so"])
def test_a_library_is_found_in_this_folder(ranks, folder, monkeypatch, name):
    """As dlopen reads names, one without a slash was looked for in the system's folders alone."""
    monkeypatch.chdir(folder)

    def body(info):
        with Coordinator(info) as coor, Communicator(coor, backend=name) as comm:
            return comm.allreduce(torch.ones(1)).item()

    assert ranks(body, 2) == [2.0, 2.0]


def test_the_library_in_c_conforms(ranks, toy):
    for failed, passed in ranks(conforms(toy), 3):
        assert failed == [] and passed > 80


@pytest.mark.parametrize("provider", ["shm", pytest.param("tcp", marks=pytest.mark.soak)])
def test_the_library_over_libfabric_conforms(ranks, overfabric, provider):
    for failed, passed in ranks(conforms(overfabric, provider=provider), 3):
        assert failed == [] and passed > 80


def test_the_library_over_libfabric_has_deadlines_and_names_a_missing_provider(ranks, overfabric):
    def body(info):
        with Coordinator(info, timeout_s=30) as coor:
            with pytest.raises(Unsupported, match="opening the fabric on rank 0 failed"):
                Communicator(coor, backend=overfabric, provider="none")
            with Communicator(coor, backend=overfabric, checked_calls=0, timeout_s=1) as comm:
                if comm.rank == 0:
                    with pytest.raises(CommunicatorTimeout, match="rank 1 failed: the deadline"):
                        comm.recv(torch.ones(1), 1)
                coor.barrier()
            return True

    assert ranks(body, 2) == [True, True]


def test_the_backend_in_python_conforms(ranks, acme):
    for failed, passed in ranks(conforms(acme), 2):
        assert failed == [] and passed > 60


def test_a_library_that_keeps_its_deadline_says_so(toy):
    with (
        Coordinator(LaunchInfo("alone")) as coor,
        Communicator(coor, backend=toy, timeout_s=5) as comm,
    ):
        with pytest.raises(Unsupported, match="keeps the deadline"):
            comm.set_timeout(1)
        assert comm.timeout_s == 5


def test_the_library_in_c_notices_a_peer_that_leaves(ranks_or_errors, toy):
    def body(info):
        with Coordinator(info, timeout_s=30) as coor, Communicator(coor, backend=toy) as comm:
            if comm.rank != 1:
                comm.recv(torch.ones(4), 1)

    found = ranks_or_errors(body, 3)
    assert isinstance(found[0], PeerLost) and "rank 1 failed: it is gone" in str(found[0])


def test_mismatched_calls_raise_with_each_ranks_call_and_the_group_goes_on(ranks, toy):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, backend=toy) as comm:
            words = (
                r"disagree in call 1: rank 0 .* \(2,\) float32 sum; rank 1 .* \(3,\) float32 sum"
            )
            with pytest.raises(CommunicatorError, match=words):
                comm.allreduce(torch.ones(2 + comm.rank))
            words = "call 2: rank 0 asked for broadcast of .* from rank 1; rank 1 asked for barrier"
            with pytest.raises(CommunicatorError, match=words):
                comm.barrier() if comm.rank else comm.broadcast(torch.ones(1), src=1)
            return comm.allreduce(torch.ones(1), op="max").item()

    assert ranks(body, 2) == [1.0, 1.0]


def test_gathers_and_scatters_are_compared_and_declined_as_other_calls_are(ranks, toy):
    """They were not, and a rank that declined one was a call ahead of the others from then on."""

    def body(info):
        with (
            Coordinator(info, timeout_s=20) as coor,
            Communicator(coor, backend=toy, timeout_s=5) as comm,
        ):
            words = r"call 1: rank 0 asked for gather of .* to rank 0; rank 1 .* to rank 1"
            with pytest.raises(CommunicatorError, match=words):
                comm.gather(torch.ones(2), comm.rank)
            error = CommunicatorError if comm.rank else ValueError
            with pytest.raises(error, match="rank 0"):
                comm.scatter(torch.zeros(2), torch.ones(3, 2))
            out = comm.scatter(torch.zeros(2), torch.ones(2, 2))
            return out.tolist(), comm.allreduce(torch.ones(1)).item()

    assert ranks(body, 2) == [([1.0, 1.0], 2.0)] * 2


def test_only_the_first_calls_are_compared_then_nothing_stands_before_the_library(ranks, toy):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            with Communicator(coor, backend=toy, checked_calls=0) as comm:
                assert comm.allreduce == comm._backend._comm.allreduce
            with Communicator(coor, backend=toy, checked_calls=3) as comm:
                straight = []
                for _ in range(4):
                    straight.append(comm.allreduce == comm._backend._comm.allreduce)
                    comm.allreduce(torch.ones(1))
                return straight, "barrier" in comm.__dict__

    assert ranks(body, 2) == [([False, False, False, True], False)] * 2


def test_a_rank_that_makes_no_call_is_named_at_the_deadline_and_nothing_has_moved(ranks, toy):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor:
            with Communicator(coor, backend=toy, timeout_s=1) as comm:
                if comm.rank == 0:
                    words = r"after 1 s of comparing call 1, barrier, with rank 1 \(.*, who made no"
                    with pytest.raises(CommunicatorTimeout, match=words):
                        comm.barrier()
                coor.barrier()
            return True

    assert ranks(body, 2) == [True, True]


def test_a_mistake_of_one_rank_is_its_own_and_waits_for_nobody(ranks, toy):
    def body(info):
        with Coordinator(info, timeout_s=20) as coor, Communicator(coor, backend=toy) as comm:
            if comm.rank == 0:
                with pytest.raises(ValueError, match=r"rank 0, allreduce: .* not contiguous"):
                    comm.allreduce(torch.ones(4, 4).t()[:2])
                with pytest.raises(ValueError, match="rank 0, allgather: out is"):
                    comm.allgather(torch.ones(4), out=torch.ones(4))
            return comm.allreduce(torch.ones(1)).item()

    assert ranks(body, 2) == [2.0, 2.0]
