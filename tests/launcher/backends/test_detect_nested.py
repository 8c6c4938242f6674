"""Nested launchers: the innermost one started the rank."""

import pytest

from launcher import LaunchInfo, registry
from launcher.backends import mpi, multiprocessing, slurm, torchrun
from launcher.system import nesting

SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_STEP_NODELIST": "gpu08",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-5339@1",
}
INTEL_MPI = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "I_MPI_HYDRA_UUID": "a8160000-f6aa-8259-c460-060038379a5e",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "c2d9",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29400",
}


def _innermost(environ):
    detected = (launcher.detect(environ) for launcher in registry.all_launchers())
    return next((info.extras["launcher"] for info in detected if info is not None), None)


@pytest.mark.parametrize("variables", [OPEN_MPI, INTEL_MPI], ids=["open", "intel"])
def test_mpirun_inside_srun_wins(variables):
    assert _innermost({**SRUN, **variables}) == mpi.NAME


def test_torchrun_inside_srun_wins():
    assert _innermost({**SRUN, **TORCHRUN}) == torchrun.NAME


def test_torchrun_inside_mpirun_wins():
    assert _innermost({**OPEN_MPI, **TORCHRUN}) == torchrun.NAME


def test_srun_that_speaks_pmi2_is_still_srun():
    """srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE, but no MPI_LOCALRANKID."""
    pmi2 = {"PMI_RANK": "4", "PMI_SIZE": "7", "PMI_FD": "13", "PMI_JOBID": "17.3"}
    assert mpi.detect({**SRUN, **pmi2}) is None
    assert _innermost({**SRUN, **pmi2}) == slurm.NAME


def test_srun_that_speaks_pmix_is_still_srun():
    pmix = {"PMIX_RANK": "4", "PMIX_NAMESPACE": "slurm.pmix.17.3"}
    assert _innermost({**SRUN, **pmix}) == slurm.NAME


def test_no_variables_is_no_launcher():
    assert _innermost({"PATH": "/bin"}) is None


def test_a_backend_launcher_inside_one_of_our_ranks_started_the_rank():
    ours = LaunchInfo("outer", 2, 2, 1, 1, "127.0.0.1", 4000).to_env()
    assert multiprocessing.detect(ours).launch_id == "outer"
    assert multiprocessing.detect({**ours, **OPEN_MPI}) is None


def test_our_rank_inside_a_backend_launcher_is_ours():
    extras = nesting.extras(SRUN)
    ours = LaunchInfo("inner", 2, 2, 1, 1, "127.0.0.1", 4000, extras).to_env()
    assert multiprocessing.detect({**SRUN, **ours}).launch_id == "inner"
    assert multiprocessing.detect({**SRUN, **ours, **OPEN_MPI}) is None
