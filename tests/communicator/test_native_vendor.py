"""The examples for vendors: both doors lead to a backend that conforms."""

import importlib.util
import subprocess
from pathlib import Path

import pytest
import torch

from communicator import Communicator, PeerLost, conformance
from coordinator import Coordinator

EXAMPLE = Path(__file__).parents[2] / "examples" / "vendor_plugin"


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The library as the README builds it, elsewhere."""
    folder = tmp_path_factory.mktemp("vendor")
    (folder / "toy.c").write_text((EXAMPLE / "toy.c").read_text())
    header = EXAMPLE.parents[1] / "csrc"
    make = ["make", "-s", "-C", folder, "-f", EXAMPLE / "Makefile", f"HEADER={header}"]
    subprocess.run([*make, "CC=cc -Werror"], check=True)
    return str(folder / "libtoy.so")


@pytest.fixture
def acme():
    path = EXAMPLE / "python_backend" / "acme_communicator.py"
    spec = importlib.util.spec_from_file_location("acme_communicator", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Acme


def conforms(backend):
    def body(info):
        with Coordinator(info, timeout_s=30) as coor, Communicator(coor, backend=backend) as comm:
            report = conformance.check(comm, large=30_011)
            return report.having(conformance.FAILED), len(report.having(conformance.PASSED))

    return body


def test_the_library_in_c_conforms(ranks, toy):
    for failed, passed in ranks(conforms(toy), 3):
        assert failed == [] and passed > 30


def test_the_backend_in_python_conforms(ranks, acme):
    for failed, passed in ranks(conforms(acme), 3):
        assert failed == [] and passed > 60


def test_the_library_in_c_notices_a_peer_that_leaves(ranks_or_errors, toy):
    def body(info):
        with Coordinator(info, timeout_s=30) as coor, Communicator(coor, backend=toy) as comm:
            if comm.rank != 1:
                comm.recv(torch.ones(4), 1)

    found = ranks_or_errors(body, 3)
    assert isinstance(found[0], PeerLost) and "rank 1 failed: it is gone" in str(found[0])
