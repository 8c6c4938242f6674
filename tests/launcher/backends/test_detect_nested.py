"""Nested launchers: the innermost one started the rank."""

import itertools
import os

import pytest

from launcher import LaunchInfo, LaunchInfoError, ports, registry
from launcher.backends import mpi, multiprocessing, slurm, torchrun
from launcher.external import backend_launcher
from launcher.job import Job, Target
from launcher.runtime import rank_environment
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


@pytest.fixture
def outer_rank(monkeypatch):
    """The variables of a rank of ours, which this process takes on, and of its user."""
    info = LaunchInfo("outer", 2, 2, 1, 1, "10.0.0.1", 4000)
    environ = {**info.to_env(), **rank_environment.torchrun_variables(info, 4001, 0)}
    of_user = {"DRUMLINE_ENCRYPT": "1", "DRUMLINE_VLLM": "1", "DRUMLINE_PATIENCE": "20"}
    of_launch = {"DRUMLINE_TRACE": "/tmp/outer", "DRUMLINE_SECRET_FD": "7", "DRUMLINE_TOKEN": "x"}
    for name, value in {**environ, **of_user, **of_launch}.items():
        monkeypatch.setenv(name, value)
    return environ, of_user


def test_a_launch_inside_a_rank_of_ours_has_the_settings_of_its_user_and_no_place(outer_rank):
    """Each inner rank was the outer one, and talked in plain text where it should encrypt."""
    _, of_user = outer_rank
    environ = backend_launcher.environment(slurm, Job(Target("script", "train.py")))
    assert rank_environment.settings(environ) == of_user
    assert not rank_environment.torchrun_variables(LaunchInfo("none"), 0, 0).keys() & environ.keys()
    assert _innermost({**environ, **INTEL_MPI}) == mpi.NAME


def test_a_bare_mpiexec_inside_a_rank_of_ours_does_not_meet_where_that_does(outer_rank):
    """At the port that was kept for the torch.distributed of the outer ranks."""
    info = mpi.detect({**outer_rank[0], **INTEL_MPI})
    assert info.master_port == ports.candidates(info.launch_id)[0]


def test_a_bare_mpiexec_inside_a_rank_of_drumline_run_is_a_launch_of_its_own(
    outer_rank, monkeypatch
):
    """It took its name, and the port of its Coordinator."""
    info = mpi.detect({**outer_rank[0], "LAUNCH_ID": "outer", **INTEL_MPI})
    assert info.launch_id == INTEL_MPI["I_MPI_HYDRA_UUID"]
    over_nodes = {**outer_rank[0], **INTEL_MPI, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
    over_nodes |= dict.fromkeys(("MASTER_ADDR", "DRUMLINE_MASTER_ADDR"), "10.0.0.1")
    monkeypatch.setattr(mpi.mpi_rendezvous, "exchange", lambda *_: ("name", "10.0.0.2", 1))
    assert mpi.detect(over_nodes).master_addr == "10.0.0.2"

    def exchange(*_):
        raise LaunchInfoError("set MASTER_ADDR")

    monkeypatch.setattr(mpi.mpi_rendezvous, "exchange", exchange)
    assert mpi.detect(over_nodes).master_addr == "10.0.0.1"  # as its documentation has it set


def test_a_rank_has_no_name_of_another_launch_for_what_it_starts(monkeypatch):
    """Those that several ranks started had one name, and one port."""
    environ = {**os.environ, "LAUNCH_ID": "of the job"}
    monkeypatch.setattr(os, "environ", environ)
    rank_environment.set_variables(LaunchInfo("here"), 29500)
    assert environ["LAUNCH_ID"] == "here"


def test_what_the_user_sets_for_a_launch_inside_a_rank_of_ours_is_taken(outer_rank, monkeypatch):
    """It was taken for that of the outer rank, and left out."""
    of_user = {"LAUNCH_ID": "run-17", "MASTER_PORT": "29501"}
    info = slurm.detect({**outer_rank[0], **SRUN, **of_user})
    assert (info.launch_id, info.master_addr, info.master_port) == ("run-17", "127.0.0.1", 29501)
    monkeypatch.setenv("MASTER_PORT", "29501")
    environ = backend_launcher.environment(slurm, Job(Target("script", "train.py")))
    assert environ["MASTER_PORT"] == "29501" and "MASTER_ADDR" not in environ


def test_a_launcher_that_has_only_a_command_is_traced_with_the_calls_of_its_ranks():
    job = Job(Target("script", "train.py"), trace="/tmp/inner")
    assert backend_launcher.environment(object(), job)["DRUMLINE_TRACE"] == "/tmp/inner"


def test_settings_of_the_user_reach_ranks_of_other_hosts_under_open_mpi(outer_rank, monkeypatch):
    """It exports no other variables, and so some ranks encrypted and others did not."""
    job = Job(Target("script", "train.py"), trace="/tmp/inner")
    words = mpi._open_mpi_options(job)
    exported = {name for option, name in itertools.pairwise(words) if option == "-x"}
    assert {"DRUMLINE_TRACE", *outer_rank[1]} <= exported
    assert "DRUMLINE_SECRET_FD" not in exported
