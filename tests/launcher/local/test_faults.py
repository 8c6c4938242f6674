"""Faults of a rank: exit code, message and duration of the launch, and no leaked process."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import launcher
from launcher import errors, timings
from launcher.errors import Failure

FAULTY = str(Path(__file__).parents[1] / "programs" / "faulty.py")

# fault: (exit code, text of the report)
TABLE = {
    "raises": (1, "raised ZeroDivisionError: division by zero"),
    "exits-3": (3, "exited with code 3"),
    "exits-with-a-message": (1, "exited with code 1"),
    "os-exit-9": (9, "exited with code 9"),
    "os-exit-200": (200, "exited with code 200"),
    "exits-minus-1": (255, "exited with code 255"),
    "sigkill": (137, "was killed by SIGKILL"),
    "sigsegv": (139, "was killed by SIGSEGV"),
    "sigabrt": (134, "was killed by SIGABRT"),
    "out-of-memory": (1, "raised MemoryError"),
    "import-error": (1, "raised ModuleNotFoundError"),
    "flood": (1, "raised RuntimeError: after the flood"),
    "no-end": (137, "was killed by SIGKILL"),
    "closes-its-files": (5, "exited with code 5"),
    "daemonises": (4, "exited with code 4"),
    "leaves-children": (4, "exited with code 4"),
    "deaf-others": (7, "exited with code 7"),
}


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("fault", TABLE)
def test_the_launch_ends_with_the_code_and_name_of_the_failed_rank(command, fault, culprit):
    code, message = TABLE[fault]
    ended = command.run("run", "-n", "3", FAULTY, fault, str(culprit))
    first, *others = [line for line in ended.err.splitlines() if "rank" in line and "pid" in line]
    assert f"rank {culprit} (local rank {culprit}, pid" in first and message in first
    assert ended.code == code
    assert len(others) == 2 and all("was ended by the launcher" in other for other in others)


@pytest.mark.parametrize("fault", ["raises", "sigsegv"])
def test_the_report_shows_the_failed_line(command, fault):
    ended = command.run("run", "-n", "2", FAULTY, fault, "1")
    assert "faulty.py" in ended.err and "launcher/runtime/rank_process.py" not in ended.err


def test_the_report_of_a_bus_error_says_where_it_comes_from(command):
    script = command.script(
        "import mmap, os\n"
        "with open('file', 'w+b') as file:\n"
        "    file.truncate(1 << 20)\n"
        "    data = mmap.mmap(file.fileno(), 0)\n"
        "    file.truncate(0)\n"
        "data[1 << 16]"
    )
    ended = command.run("run", "-n", "1", script)
    assert ended.code == 128 + signal.SIGBUS and "it had mapped" in ended.err


def test_an_unfinished_line_is_not_lost_at_a_crash(command):
    assert "no end of line" in command.run("run", "-n", "2", FAULTY, "no-end", "1").lines(1)


def test_an_early_exit_with_code_0_is_reported_with_the_failure(command):
    script = command.script(
        "import os, time, launcher\n"
        "if launcher.current().rank == 1:\n"
        "    os.symlink(str(os.getpid()), 'rank-1')\n"
        "    os._exit(0)\n"
        "while not os.path.lexists('rank-1'): time.sleep(0.01)\n"
        "while os.path.exists('/proc/' + os.readlink('rank-1')): time.sleep(0.01)\n"
        "raise RuntimeError('peer lost')"
    )
    ended = command.run("run", "-n", "2", script)
    assert ended.code == 1 and "peer lost" in ended.err and "Rank 1 had exited early" in ended.err


def test_the_cause_is_reported_before_the_peer_lost_error(command):
    """The peer's connection ends before anybody can reap the process at its other end."""
    script = command.script(
        "import os, signal, socket, launcher\n"
        "info = launcher.current()\n"
        "if info.rank == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    listener = socket.socket(fileno=int(info.extras['master_fd']))\n"
        "    peer, _ = listener.accept()\n"
        "    peer.send(b'x')\n"
        "    if not peer.recv(1): raise ConnectionError('lost my peer')\n"
        "peer = socket.create_connection((info.master_addr, info.master_port))\n"
        "peer.recv(1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = command.run("run", "-n", "2", script)
    assert ended.code == 137
    assert ended.err.index("killed by SIGKILL") < ended.err.index("lost my peer")


@pytest.fixture(params=["multiprocessing", "mpi"])
def launcher_name(request):
    if request.param == "mpi" and shutil.which("mpiexec") is None:
        pytest.skip("no mpiexec: runs after `pip install mpich`")
    return request.param


def test_a_suspended_rank_is_named_and_the_timeout_ends_it(command, launcher_name):
    """Under mpiexec, one without a Coordinator was waited for without a word."""
    limit = {"multiprocessing": "3", "mpi": "6"}[launcher_name]
    script = command.script(
        "import os, signal, time, launcher\n"
        "if launcher.current().rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "time.sleep(60)"
    )
    ended = command.run("run", "--launcher", launcher_name, "-n", "2", "--timeout", limit, script)
    assert ended.code == 124
    notice, report = ended.err.split("╭")
    assert "rank 1 (pid " in notice and "was suspended" in notice and "kill -CONT" in notice
    assert "rank 1 (pid " in report and "suspended" in report.lower()


def test_a_timeout_shows_the_stacks_of_every_rank(command):
    script = command.script(
        "import time\ndef wait_for_ever():\n    time.sleep(60)\nwait_for_ever()"
    )
    ended = command.run("run", "-n", "2", "--timeout", "3", script)
    assert ended.code == 124
    assert "rank 0 was here" in ended.err and "rank 1 was here" in ended.err
    assert ended.err.count("in wait_for_ever") == 2


def fail_while_the_other_is_deaf():
    if launcher.current().rank == 0:
        time.sleep(0.5)
        raise ValueError("planned")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(4)


def test_a_failure_is_the_cause_though_the_others_end_only_after_the_timeout(monkeypatch):
    longer = dataclasses.replace(timings.TIMINGS, failure_grace_s=60)
    monkeypatch.setattr(timings, "TIMINGS", longer)
    with pytest.raises(launcher.LaunchError, match="planned") as raised:
        launcher.launch(fail_while_the_other_is_deaf, 2, timeout_s=3)
    assert raised.value.exit_code == 1


def test_a_failure_ends_the_launch_while_a_thread_keeps_the_process(command):
    script = command.script(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "raise ValueError('with a thread')"
    )
    ended = command.run("run", "-n", "2", script)
    assert ended.code == 1 and "with a thread" in ended.err


def test_sys_excepthook_of_the_script_is_called(command, launcher_name):
    """It was under our own launcher, and nowhere else."""
    script = command.script(
        "import sys\nsys.excepthook = lambda *error: print('hook saw', error[1])\nraise "
        "ValueError(7)"
    )
    ended = command.run("run", "--launcher", launcher_name, "-n", "1", script)
    assert ended.code == 1 and ended.lines(0) == ["hook saw 7"]


WRAPPED = """
import sys
before = sys.excepthook
sys.excepthook = lambda *error: print("wrapped", before(*error))
raise ValueError("once")
"""


def test_an_excepthook_that_calls_the_one_before_prints_no_second_traceback(command, launcher_name):
    """As that of torch.distributed does, so that each failure of its scripts was told twice."""
    script = command.script(WRAPPED)
    ended = command.run("run", "--launcher", launcher_name, "-n", "1", script)
    assert ended.lines(0) == ["wrapped None"] and ended.err.count("Traceback") == 1


def test_a_forked_child_that_raises_prints_its_own_frames_alone(command, launcher_name):
    """Its traceback had those of the launcher, or was lost; the rank is not the one that failed."""
    script = command.script(
        "import os\npid = os.fork()\nif not pid: raise ValueError('in the child')\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    ended = command.run("run", "--launcher", launcher_name, "-n", "1", script)
    assert ended.code == 0 and ended.lines(0) == ["1"]
    assert "in the child" in ended.err and "launcher/" not in ended.err


def failure(rank, time_s, **how):
    return Failure(rank=rank, time_s=time_s, **how)


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([failure(0, 1.0, type="ValueError"), failure(1, 2.0, type="ValueError")], 0),
        ([failure(0, 1.0, type="ConnectionError"), failure(1, 1.05, signal=9)], 1),
        ([failure(0, 1.0, type="ValueError"), failure(1, 1.05, signal=6)], 0),
        ([failure(0, 1.0, type="ValueError"), failure(1, 1.5, signal=9)], 0),
        ([failure(0, 1.0, signal=9, ended_by_launcher=True), failure(1, 2.0)], 1),
        ([failure(0, 1.0, type="PeerLost", blames=[1]), failure(1, 2.0, type="ValueError")], 1),
        ([failure(0, 1.0, type="PeerLost", blames=[-1]), failure(1, 2.0, type="Timeout")], 1),
        ([failure(0, 1.0, type="PeerLost", blames=[2]), failure(1, 2.0, type="ValueError")], 0),
        ([failure(0, 1.0, blames=[1]), failure(1, 2.0, ended_by_launcher=True)], 0),
    ],
)
def test_by_cause_sorts_by_time_with_a_correction_for_silent_deaths(failures, first):
    assert errors.by_cause(failures)[0].rank == first


@pytest.mark.parametrize(
    ("name", "most"),
    [("multiprocessing", 1), ("multiprocessing", 3), ("threads", 2), ("threads", 3)],
)
def test_a_limit_of_processes_is_an_error_that_says_so(command, name, most):
    """It was `Errno 11`, and of a thread a traceback of the launcher."""
    script = command.script("import time\ntime.sleep(60)")
    user = ["setpriv", "--reuid", str(10**6 + os.getpid()), "--clear-groups"]
    user += ["--inh-caps", "+dac_override", "--ambient-caps", "+dac_override"]
    around = [*user, "prlimit", f"--nproc={most}"]
    if os.geteuid() or subprocess.run([*around, "true"], capture_output=True).returncode:
        pytest.skip("becomes a user who has no processes: runs as root with util-linux")
    ended = command.run("run", "--launcher", name, "-n", "4", script, around=around)
    assert ended.code in (1, 2) and "`ulimit -u`" in ended.err and "Traceback" not in ended.err
