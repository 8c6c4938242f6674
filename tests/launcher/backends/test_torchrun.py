"""Real ranks of a real torchrun; none of them imports torch, torchrun itself takes seconds to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.backends import torchrun
from launcher.job import Job, Target

ROOT = Path(__file__).parents[3]
SHOW = """
import sys, launcher
info = launcher.current()
sys.stdout.write(f"info {info.to_bytes().decode()}\\n")  # at once: the ranks share a pipe
sys.stdout.flush()
"""
FAIL_ONCE = (
    SHOW
    + """
if info.launch_id.endswith("-0") and info.rank == 1:
    raise SystemExit(3)
"""
)


def _run(command):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=environ)


def _infos(out):
    lines = [line for line in out.splitlines() if "info {" in line]
    return [json.loads(line[line.index("{") :]) for line in lines]


def test_group_that_a_bare_torchrun_restarts_is_another_launch(warm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FAIL_ONCE)
    start = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    done = warm.run(*start, "--monitor-interval", "0.1", "--nproc-per-node", "2", script)
    assert done.returncode == 0, done.stderr
    infos = _infos(done.stdout)
    gangs = {info["launch_id"]: [] for info in infos}
    for info in infos:
        gangs[info["launch_id"]].append((info["rank"], info["local_rank"], info["world_size"]))
    assert len(gangs) == 2
    assert sorted(list(gangs.values())[-1]) == [(0, 0, 2), (1, 1, 2)]
    assert {info["extras"]["store"] for info in infos} == {"agent"}


FAIL_SECOND = (
    SHOW
    + """
import os, time
if info.rank == 0:
    open(__file__ + ".shown", "w").close()
else:
    while not os.path.exists(__file__ + ".shown"):
        time.sleep(0.01)
    raise KeyError("layer 3")
"""
)


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A launch of ours through torchrun, of which rank 1 fails once both have shown themselves."""
    script = tmp_path_factory.mktemp("torchrun") / "a script.py"
    script.write_text(FAIL_SECOND)
    run = [sys.executable, "-m", "launcher", "run", "--launcher", "torchrun", "-n", "2"]
    return _run([*run, "--launch-id", "tuesday", str(script)])


def test_ranks_started_by_us_have_the_launch_id_that_was_asked_for(failed):
    infos = _infos(failed.stdout)
    assert {info["rank"] for info in infos} == {0, 1}
    assert all(info["launch_id"].startswith("tuesday-") for info in infos)
    assert len({(info["master_addr"], info["master_port"]) for info in infos}) == 1


def test_dry_run_shows_what_the_ranks_will_have_and_what_torchrun_chooses(failed, tmp_path):
    script = tmp_path / "script.py"
    script.touch()
    run = [sys.executable, "-m", "launcher", "run", "--launcher", "torchrun", "-n", "2"]
    first, *shown = _run([*run, "--dry-run", str(script)]).stdout.splitlines()
    assert f"-m launcher.external.rank_main FOLDER script {script}" in first
    real = min(_infos(failed.stdout), key=lambda info: info["rank"])
    expected = json.loads(shown[0])
    placeholders = {name for name, value in expected.items() if value == "chosen by torchrun"}
    assert placeholders == {"launch_id", "master_addr", "master_port"}
    del real["extras"]["secret_fd"]
    assert {**expected, **{name: real[name] for name in placeholders}} == real


def test_failure_of_a_rank_is_told_once_and_is_our_exit_code(failed):
    assert failed.returncode == 1
    assert failed.stderr.startswith("╭───")  # and nothing of torchrun's
    assert failed.stderr.count("KeyError: 'layer 3'") == 2  # in the summary, and its traceback
    assert failed.stderr.count("Traceback") == 1


def test_each_of_several_nodes_gets_a_command_of_its_own():
    job = Job(Target("module", "train"), nprocs=3, nnodes=2, node_rank=1, master_addr="10.0.0.1")
    command = " ".join(torchrun.command(job))
    assert "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port " in command
    assert command.endswith("-m train")


def test_a_host_whose_name_nobody_resolves_is_named_by_its_address():
    """torchrun gave its ranks the host's name as MASTER_ADDR, and they waited for it in vain."""
    command = " ".join(torchrun.command(Job(Target("module", "train"), nprocs=2)))
    assert "--rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 " in command


DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "77"], start_new_session=True)
print("ready", flush=True)
time.sleep(60)
"""


def test_no_process_is_leaked_of_ranks_that_ignore_signals(command, tmp_path):
    script, folder = command.script(DEAF), tmp_path / "own"
    folder.mkdir()
    run = ("run", "--launcher", "torchrun", "-n", "2", script)
    with command.start(*run, env={"TMPDIR": str(folder)}) as launcher:
        assert sorted(launcher.stdout.readline() for _ in range(2)) == [
            "[0] ready\n",
            "[1] ready\n",
        ]
        launcher.kill()
        assert not command.left(patience_s=15)
        assert not list(folder.iterdir())  # torchrun would leave a folder of logs


def test_rank_killed_by_a_signal_is_named(command):
    script = command.script(
        "import os, time, launcher\n"
        "if launcher.current().rank == 1: os.kill(os.getpid(), 11)\ntime.sleep(60)"
    )
    ended = command.run("run", "--launcher", "torchrun", "-n", "2", script)
    assert ended.code == 139
    assert "│ rank 1 (local rank 1, pid " in ended.err
    assert "was killed by SIGSEGV" in ended.err
    assert "most recent call first" in ended.err  # Python's stack of a crash
