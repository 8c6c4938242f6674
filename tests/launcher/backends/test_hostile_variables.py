"""Whatever a variable of a launcher holds, it makes a rank or one error that names it."""

import pytest

from launcher import LaunchInfo, LaunchInfoError
from launcher.backends import mpi, multiprocessing, ray, slurm, torchrun

PLACE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
PLACE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
OPEN_MPI = {name: PLACE[field.upper()] for field, name in mpi.OPEN_MPI.items()}
HYDRA = {name: PLACE[field.upper()] for field, name in mpi.HYDRA.items()}
STEP = dict.fromkeys(("SLURM_STEP_ID", *slurm.NUMBERS.values(), "SLURM_NODEID", "SLURM_GTIDS"), "0")
STEP |= {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
VARIABLES = [
    (multiprocessing, LaunchInfo("x").to_env()),
    (torchrun, {**PLACE, **dict.fromkeys(torchrun.MARKS, "0")}),
    (torchrun, PLACE),
    (slurm, {**STEP, "SLURM_STEP_NODELIST": "n1", "SLURM_JOB_ID": "1", "LAUNCH_ID": "x"}),
    (mpi, {**OPEN_MPI, "PMIX_NAMESPACE": "x"}),
    (mpi, {**HYDRA, "LAUNCH_ID": "x"}),
    (mpi, {**HYDRA, "PMI_FD": "7", "MASTER_ADDR": "n1"}),
    (ray.ray_variables, {**PLACE, "RAY_JOB_ID": "1", "NODE_RANK": "0"}),
]
VALUES = (
    "",
    "x",
    "-1",
    "9" * 30,
    "9" * 5000,
    "nan",
    "1.5",
    "²",
    "\udcff",
    "[" * 60_000,
    "n" * 10**6,
    "n[" + "1" * 10**6 + "]",
    "0," * 10**6,
    "n[1-9999999]",
)


@pytest.mark.parametrize(
    "value", VALUES, ids=[value[:9].encode("ascii", "replace") for value in VALUES]
)
def test_a_value_that_no_launcher_sets_is_an_error_of_the_launcher(value, monkeypatch):
    """Numbers of 5000 digits, names in Latin-1 and nested extras raised other errors."""
    monkeypatch.setattr(mpi.mpi_rendezvous, "exchange", lambda *_: ("x", "n1", 1))
    for backend, variables in VARIABLES:
        for name in variables:
            try:
                info = backend.detect({**variables, name: value})
            except LaunchInfoError as error:
                assert name in str(error) or name.removeprefix("DRUMLINE_").lower() in str(error)
                assert len(str(error)) < 5000
            else:
                assert info is None or LaunchInfo.from_bytes(info.to_bytes()) == info
