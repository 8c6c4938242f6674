"""Scripts written for other tools run unchanged, as ranks of one world."""

import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from launcher import LaunchInfo, ports
from launcher.authentication.launch_token import LaunchToken
from launcher.backends import torchrun
from launcher.runtime import rank_environment
from launcher.system import linux, nesting
from tests.cases import soak

PROGRAMS = Path(__file__).parents[1] / "programs" / "of_other_tools"


@pytest.fixture
def run(warm, commands):
    def run(launcher: str, script: str, *arguments: str, preload: str = ""):
        start = ["-m", "launcher", "run", "--launcher", launcher, "-n", "2", "--timeout", "100"]
        options = ["--preload", preload] if preload else []
        words = [*start, *options, PROGRAMS / script, *arguments]
        return warm.run(*words, env=commands, timeout=110)

    return run


def _check(ended, words: str) -> None:
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        assert f"{words} as {rank} of 2" in ended.stdout


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.soak), "drumline"])
def test_a_torchrun_script_trains_one_model(run, backend):
    """On gloo, accelerate's script does the same."""
    _check(run("multiprocessing", "torchrun_ddp.py", backend, preload="torch"), "trained")


def test_an_accelerate_script_is_one_training(run):
    """It was as many trainings as ranks, and the exit code was 0."""
    pytest.importorskip("accelerate")
    _check(run("multiprocessing", "accelerate_loop.py", preload="accelerate"), "trained")


@pytest.mark.soak  # under torchrun an example does it
def test_a_trainer_of_transformers_is_one_training(run, tmp_path):
    pytest.importorskip("accelerate")
    script = "transformers_trainer.py"
    _check(run("multiprocessing", script, str(tmp_path), preload="transformers"), "trained")


@pytest.mark.parametrize("launcher", ["torchrun", "mpi"])
def test_libraries_detect_the_world_under_each_launcher(run, launcher):
    if launcher == "mpi" and not shutil.which("mpiexec"):
        pytest.skip("no MPI: `pip install mpich` installs one")
    _check(run(launcher, "detected_environment.py"), "detected")


def test_an_mpi4py_script_is_one_world_under_mpi(run):
    pytest.importorskip("mpi4py")
    if not shutil.which("mpiexec"):
        pytest.skip("no MPI: `pip install mpich` installs one")
    ended = run("mpi", "mpi_allreduce.py")
    _check(ended, "sum 3")
    assert "mpi4py sees" not in ended.stderr


@pytest.mark.parametrize(("launcher", "num_processes"), [("multiprocessing", 2), ("threads", 1)])
def test_a_process_says_that_mpi4py_does_not_see_the_ranks(run, launcher, num_processes):
    pytest.importorskip("mpi4py")
    ended = run(launcher, "mpi_allreduce.py")
    if "cannot load MPI library" in ended.stderr:
        pytest.skip("no MPI library: `pip install mpich` installs one")
    lines = [line for line in ended.stderr.splitlines() if "mpi4py sees a world of 1" in line]
    assert len(lines) == num_processes, ended.stderr
    assert all("--launcher mpi" in line for line in lines), ended.stderr


@pytest.mark.parametrize("launcher", ["multiprocessing", "threads", soak("torchrun")])
def test_no_rank_and_no_child_of_one_has_a_token_or_secret_in_its_environment(command, launcher):
    """Those that were set for other launches stayed, and threads had one that nobody used."""
    script = command.script(
        "import subprocess, launcher\n"
        "launcher.current()\n"
        "print('child', subprocess.run(['env'], capture_output=True).stdout)\n"
        "print('proc', open('/proc/self/environ', 'rb').read())\n"
    )
    secrets = {"DRUMLINE_TOKEN": str(LaunchToken.draw()), "DRUMLINE_SECRET": "5e" * 32}
    ended = command.run("run", "--launcher", launcher, "-n", "2", script, env=secrets, timeout=100)
    assert ended.code == 0 and ended.out.count("child b'") == ended.out.count("proc b'") == 2
    assert not re.search(r"(TOKEN|SECRET)=[^-]", ended.out), ended.out


def test_the_user_decides_whether_accelerate_uses_the_cpu(monkeypatch):
    name = rank_environment.ACCELERATE_USE_CPU
    for has_accelerator, preset, expected in [
        (False, None, "true"),
        (False, "false", "false"),
        (True, None, None),
    ]:
        monkeypatch.setattr(linux, "has_accelerator", lambda value=has_accelerator: value)
        monkeypatch.delenv(name, raising=False)
        if preset:
            monkeypatch.setenv(name, preset)
        rank_environment.set_default_device()
        assert os.environ.get(name) == expected


def test_a_torchrun_or_an_mpiexec_inside_a_rank_is_told_from_it():
    info = LaunchInfo("ours", 2, 2, 1, 1, "127.0.0.1", 4000, nesting.extras({"PMI_RANK": "3"}))
    rank = {
        "PMI_RANK": "3",
        **info.to_env(),
        **rank_environment.torchrun_variables(info, 4001, restart_count=0),
    }
    assert torchrun.detect(rank) is None
    assert not nesting.is_inside_another(info.extras, rank)
    inner = {**rank, "TORCHELASTIC_RUN_ID": "theirs", "MASTER_PORT": "5000"}
    assert nesting.is_inside_another(info.extras, inner)
    assert torchrun.detect(inner).master_port == 5000
    assert nesting.is_inside_another(info.extras, {**rank, "PMI_RANK": "0"})
    assert torchrun.detect({**rank, "PMI_RANK": "0"}) is None


def test_a_reserved_port_is_torchs_alone():
    """Nobody else gets it: no launch, not even with the same id, and no plain bind()."""
    with ports.reserve_for_torch("kept", 0) as holder:
        port = holder.getsockname()[1]
        with ports.reserve_for_torch("kept", 0) as second:
            assert second.getsockname()[1] != port
        with pytest.raises(OSError, match=f"port {port} is in use"):
            ports.reserve([port])
        with socket.socket() as plain, pytest.raises(OSError, match="in use"):
            plain.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):  # sets SO_REUSEADDR, as torch does
            pass


def test_a_launch_does_not_take_the_port_that_another_keeps(monkeypatch):
    with ports.reserve(ports.candidates("first")) as holder:
        port = holder.getsockname()[1]
        monkeypatch.setattr(ports, "candidates", lambda launch_id: [port, port + 1])
        with ports.listen("second") as listener:
            assert listener.getsockname()[1] == port + 1
