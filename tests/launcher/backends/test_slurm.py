"""Real steps of a real SLURM, started for these tests: three nodes that are all this machine."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.backends import slurm as backend
from launcher.backends.slurm import command
from launcher.external import backend_launcher
from launcher.job import Job, Target

ROOT = Path(__file__).parents[3]
RECIPES = len(list((ROOT / "examples" / "recipes").glob("*.py"))) - 1  # one is shared
SHOW = """
import sys, launcher
sys.stdout.write(launcher.current().to_bytes().decode() + "\\n")
"""
SHOW_SECRET = """
import json, os, sys, launcher
info = launcher.current()
secret = os.pread(int(info.extras["secret_fd"]), 32, 0).hex()
sys.stdout.write(json.dumps({**info.to_dict(), "secret": secret}) + "\\n")
"""
CONFIGURATION = """
ClusterName=three
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _free_ports(count):
    with contextlib.ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in sockets]


def _wait_until_idle(environ, log):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        shown = subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=environ, capture_output=True)
        if shown.stdout.strip() == b"idle 3":
            return
        time.sleep(0.1)
    raise TimeoutError(f"SLURM's nodes are not idle: {shown}\n{log.read_text()}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which srun finds the three nodes."""
    if os.geteuid() or not all(map(shutil.which, ("srun", "slurmctld", "slurmd"))):
        pytest.skip("no SLURM: runs as root on Debian after `apt-get install slurm-wlm`")
    folder = tmp_path_factory.mktemp("slurm")
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(host=socket.gethostname(), folder=folder, ports=_free_ports(4))
    )
    environ = {**os.environ, "SLURM_CONF": str(configuration), "PYTHONPATH": str(ROOT)}
    daemons = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in ("n1", "n2", "n3"))]
    for name in ("n1", "n2", "n3"):
        (folder / name).mkdir()
    with open(folder / "log", "wb") as log, contextlib.ExitStack() as running:
        for daemon in daemons:
            process = subprocess.Popen(daemon, env=environ, stdout=log, stderr=log)
            running.callback(process.wait)
            running.callback(process.terminate)
        _wait_until_idle(environ, folder / "log")
        yield environ


def _run(command, environ):
    lines = _output(command, environ).splitlines()
    texts = (line[line.index("{") :] for line in lines)  # after the rank, where we started it
    return sorted(map(json.loads, texts), key=lambda info: info["rank"])


def _batch(script, folder, environ, *around):
    """What a batch script prints; SLURM runs it on the first node."""
    (folder / "job.sh").write_text(f"#!/bin/sh\n{script}\n")
    out = folder / "out"
    submit = [*around, "sbatch", "--parsable", "--output", str(out), str(folder / "job.sh")]
    job = _output(submit, environ)
    deadline = time.monotonic() + 30
    while _output(["squeue", "-h", "-j", job, "-t", "PENDING,RUNNING"], environ):
        assert time.monotonic() < deadline, f"job {job} does not end"
        time.sleep(0.1)
    return out.read_text()


def _output(command, environ):
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_tasks_spread_unevenly_over_nodes_know_each_other(slurm):
    infos = _run(["srun", "-N", "3", "-n", "5", sys.executable, "-c", SHOW], slurm)
    assert [info["rank"] for info in infos] == [0, 1, 2, 3, 4]
    assert sorted(info["local_world_size"] for info in infos) == [1, 1, 3, 3, 3]
    assert sorted(info["local_rank"] for info in infos) == [0, 0, 0, 1, 2]
    common = {(i["launch_id"], i["world_size"], i["master_addr"], i["master_port"]) for i in infos}
    assert len(common) == 1
    assert infos[0]["master_addr"] == "n1"


@pytest.mark.parametrize(
    ("start", "ranks"),
    [
        ("srun --nodes 2", "--ntasks-per-node"),
        ("drumline run --launcher slurm --nnodes 2", "-n"),
    ],
)
def test_the_commands_of_the_documents_run_as_printed(slurm, documented, start, ranks):
    """But for the number of ranks, for the sake of time."""
    environ = {**slurm, "MASTER_ADDR": "127.0.0.1"}  # n1 is not a name that is known here
    output = documented("running.md", start)(words=[(f"{ranks} 4", f"{ranks} 2")], environ=environ)
    assert sorted(re.findall(r"rank (\d) of 4, local rank (\d), hosts 1", output)) == [
        (str(rank), str(rank % 2)) for rank in range(4)
    ]


GROUP_OF_ENVIRONMENT = """
import sys, torch, torch.distributed as dist, communicator.torch_backend
dist.init_process_group("drumline")
total = torch.ones(1)
dist.all_reduce(total)
sys.stdout.write(f"rank {dist.get_rank()} has {total.item():g}\\n")
dist.destroy_process_group()
"""


def test_torch_finds_its_variables_where_each_task_of_srun_sets_them(slurm, documented, tmp_path):
    (tmp_path / "train.py").write_text(GROUP_OF_ENVIRONMENT)
    (port,) = _free_ports(1)
    words = [("10.0.0.1", "127.0.0.1"), ("29500", str(port)), ("-n 4", "-N 2 -n 2")]
    output = documented("communicator.md", "MASTER_ADDR=10.0.0.1")(words=words, environ=slurm)
    assert sorted(output.splitlines()) == [f"rank {rank} has 2" for rank in range(2)]


def test_step_that_speaks_pmi2_is_srun_s(slurm):
    infos = _run(["srun", "--mpi", "pmi2", "-n", "2", sys.executable, "-c", SHOW], slurm)
    assert [info["rank"] for info in infos] == [0, 1]
    assert {info["extras"]["launcher"] for info in infos} == {"slurm"}
    assert {info["master_addr"] for info in infos} == {"127.0.0.1"}


def test_ranks_started_by_us_have_the_launch_id_and_the_secret_of_the_launch(slurm, tmp_path):
    script = tmp_path / "a script.py"
    script.write_text(SHOW_SECRET)
    job = Job(
        Target("script", str(script)),
        nprocs=2,
        nnodes=2,
        launch_id="slurm",
        results_dir=str(tmp_path),
        encrypt=True,
    )
    infos = _run(command(job), {**backend_launcher.environment(backend, job), **slurm})
    assert [info["rank"] for info in infos] == [0, 1, 2, 3]
    assert all(info["extras"]["encrypt"] for info in infos)
    assert {(i["launch_id"], i["local_world_size"]) for i in infos} == {("slurm", 2)}
    assert len({info["secret"] for info in infos}) == 1


def test_death_of_a_task_ends_the_launch(slurm, tmp_path):
    script = tmp_path / "script.py"
    die = "import os, time\nif os.environ['SLURM_PROCID'] == '1': os._exit(3)\ntime.sleep(60)\n"
    script.write_text(die)
    began = time.monotonic()
    job = Job(Target("script", str(script)), nprocs=3)
    done = subprocess.run(command(job), env=slurm, capture_output=True, timeout=50)
    assert done.returncode in (3, 128 + signal.SIGTERM)  # srun's is the highest of all tasks
    assert time.monotonic() - began < 20


def test_launch_ends_with_the_code_and_traceback_of_the_first_failure(slurm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SHOW + "if launcher.current().rank == 1:\n    raise SystemExit(3)\n")
    run = [sys.executable, "-m", "launcher", "run", "--launcher", "slurm", "-n", "3", str(script)]
    done = subprocess.run(run, env=slurm, capture_output=True, text=True, timeout=50)
    assert done.returncode == 3
    assert "raise SystemExit(3)" in done.stderr


DEAF = """
import os, signal, sys, time
if sys.argv[1] == "deaf":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
print("pid", os.getpid(), flush=True)
time.sleep(120)
"""


def test_srun_is_told_to_pass_on_the_first_ctrl_c():
    """It printed the state of its tasks, and they ran on after the launch."""
    assert "--disable-status" in command(Job(Target("script", "script.py")))


@pytest.mark.parametrize(
    ("how", "number"),
    [("plain", signal.SIGINT), ("deaf", signal.SIGINT), ("plain", signal.SIGTERM)],
)
def test_a_stopped_launch_leaves_no_task(slurm, tmp_path, how, number):
    """They descend from a daemon of Slurm, and only srun can have them ended."""
    script = tmp_path / "script.py"
    script.write_text(DEAF)
    run = ["run", "--launcher", "slurm", "-n", "2", str(script), how]
    launch = [sys.executable, "-m", "launcher", *run]
    with subprocess.Popen(launch, env=slurm, stdout=subprocess.PIPE, text=True) as process:
        pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        process.send_signal(number)
        process.communicate(timeout=60)
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "tasks are left"
        time.sleep(0.1)


def test_shell_inside_an_allocation_is_not_a_rank(slurm):
    (info,) = _run(["salloc", "-Q", "-n", "4", sys.executable, "-c", SHOW], slurm)
    assert info["world_size"] == 1
    assert info["launch_id"].startswith("alone-")


def test_batch_script_is_not_a_rank(slurm, tmp_path):
    shown = _batch(f"exec {sys.executable} -c '{SHOW}'", tmp_path, slurm)
    assert json.loads(shown)["launch_id"].startswith("alone-")


def test_batch_script_submitted_from_inside_a_step_is_told_whose_variables_it_has(slurm, tmp_path):
    step = ["srun", "-n", "3", "sh", "-c", '[ $SLURM_PROCID = 1 ] || exit 0; exec "$@"', "sh"]
    shown = _batch(f"exec {sys.executable} -c '{SHOW}'", tmp_path, slurm, *step)
    assert "--export=NONE" in shown


def test_mpiexec_inside_srun_wins(slurm):
    mpiexec = Path(sys.executable).with_name("mpiexec.hydra")
    if not mpiexec.exists():
        pytest.skip("no MPICH: runs on Linux (x86-64, arm64) after `pip install mpich`")
    inner = [str(mpiexec), "-rmk", "user", "-launcher", "fork", "-n", "3"]
    infos = _run(["srun", "-n", "1", *inner, sys.executable, "-c", SHOW], slurm)
    assert [info["rank"] for info in infos] == [0, 1, 2]
    assert {info["extras"]["launcher"] for info in infos} == {"mpi"}


@pytest.mark.soak
def test_every_recipe_runs_unchanged_under_srun(slurm):
    script = ROOT / "tests" / "programs" / "every_script.py"
    folder = ROOT / "examples" / "recipes"
    output = _output(["srun", "-n", "2", sys.executable, str(script), str(folder)], slurm)
    assert output.count("ended: ") == 2 * RECIPES
