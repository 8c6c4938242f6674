"""Parts of a torchrun launch killed or stopped: the cause is told, and nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from launcher import errors
from launcher.external import backend_launcher, rank_wrapper
from launcher.external.suspended import SuspendedProcesses
from launcher.records import json_values
from launcher.system import linux
from tests.cases import soak

GONE_S = 15.0  # after the command has ended
SCRIPT = """
import os, signal, subprocess, sys, time, launcher
subprocess.Popen(["sleep", "77"], start_new_session=True)
print("ready", os.getpid(), flush=True)
while not os.path.exists("raise-in-rank-0"): time.sleep(0.05)
if launcher.current().rank == 0: raise ValueError("planned")
time.sleep(60)
"""


class Parts:
    """The processes of a launch of two ranks under torchrun, by their pids."""

    def __init__(self, command, launcher="torchrun"):
        self.command = command
        run = ("run", "--launcher", launcher, "-n", "2", command.script(SCRIPT))
        self.launcher = command.start(*run)
        lines = [self.launcher.stdout.readline().split() for _ in range(2)]
        self.rank = next(int(words[2]) for words in lines if words[0] == "[1]")
        self.wrapper = parent(self.rank)
        self.agent = parent(self.wrapper)
        self.reaper = parent(self.agent)
        assert launcher != "torchrun" or parent(self.reaper) == self.launcher.pid

    def ended(self, within_s):
        """(exit code, standard error) of the command, which leaves nothing."""
        began = time.monotonic()
        _, err = self.launcher.communicate(timeout=60)
        assert time.monotonic() - began < within_s, err
        assert not self.command.left(patience_s=GONE_S)
        return self.launcher.returncode, err


def parent(pid):
    return linux.process_stat(pid).parent


def test_a_rank_that_fails_shortly_before_the_deadline_is_the_cause_and_not_the_time(tmp_path):
    """The command waited a while for the others, and then told the time alone."""
    (tmp_path / "0.json").write_bytes(json_values.dumps({"failure": {}}).encode())
    with subprocess.Popen(["sleep", "77"]) as process:
        suspended = SuspendedProcesses(process.pid)
        deadline = time.monotonic() + 0.1
        status = backend_launcher._wait(process, tmp_path, deadline, suspended)
    assert status == -signal.SIGTERM


@pytest.mark.parametrize(("died_s", "is_told"), [(14.9, True), (15.1, True), (15.6, False)])
def test_a_death_before_the_deadline_that_is_written_down_after_it_is_the_cause(died_s, is_told):
    """On a loaded machine the launcher told the time alone, and listed the rank under it."""
    failure = errors.Failure(3, time_s=died_s, signal=signal.SIGKILL)
    ended = errors.timed_out(15.0, (failure,))
    assert backend_launcher._is_consequence(ended, 15.0) is is_told


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_dies_as_it_is_asked_to_end_has_died_by_itself(number):
    """Its wrapper took every death after a signal for an answer to it."""
    signals = {signal.SIGTERM: time.monotonic()}
    ended = rank_wrapper._rank_exit({"rank": 3}, 330, -number, signals, os.memfd_create("crash"))
    assert ended.failure["ended_by_launcher"] is (number == signal.SIGTERM)


ENDING = """
import os, signal, sys, time
def end(*_):
    os.write(1, b"asked\\n")  # print() may be what the signal interrupted
    while not os.path.exists(sys.argv[1]): time.sleep(0.01)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("second", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 137)])
def test_a_second_sigterm_takes_no_time_from_a_backend_launcher(tmp_path, second, code):
    """systemd and Slurm send two, and the second killed ranks that saved their work."""
    reaper = [sys.executable, "-m", "launcher.external.reaper", str(os.getpid())]
    backend = [sys.executable, "-c", ENDING, str(tmp_path / "go")]
    with subprocess.Popen([*reaper, *backend], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "asked\n"
        process.send_signal(second)
        if second == signal.SIGTERM:
            time.sleep(0.2)  # which would be killed meanwhile
            (tmp_path / "go").touch()
        assert process.wait(20) == code


DEAF = """
import os, signal, time
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"asked\\n"))
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked again\\n"))
print("ready", flush=True)
while True: time.sleep(60)
"""


@pytest.mark.parametrize("is_repeated", [True, False])
def test_a_backend_launcher_is_asked_by_sigterm_before_it_is_killed(is_repeated):
    """Killed by SIGKILL alone, srun left the tasks of its step running."""
    reaper = [sys.executable, "-m", "launcher.external.reaper", str(os.getpid())]
    backend = [sys.executable, "-c", DEAF]
    with subprocess.Popen([*reaper, *backend], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "asked\n"
        if is_repeated:
            process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "asked again\n"
        assert process.wait(20) == 137


@pytest.fixture
def parts(command):
    return Parts(command)


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        ("reaper", "the process that supervises the backend launcher was killed by SIGKILL"),
        soak("agent", "torchrun, or a process that it runs, was killed by SIGKILL"),
        ("wrapper", "rank 1 exited without reporting anything"),
        soak("rank", "rank 1 (local rank 1, pid "),
    ],
)
def test_killed_part_is_told_and_nothing_is_left(parts, part, cause):
    os.kill(getattr(parts, part), signal.SIGKILL)
    code, err = parts.ended(within_s=25)
    report = err[err.index("╭") :].splitlines()
    assert code == 137 and cause in report[1], err


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="runs after `pip install mpich`")
def test_rank_whose_wrapper_is_killed_is_named_under_mpiexec(command):
    """Hydra killed the other ranks before any of them could write who was lost."""
    parts = Parts(command, "mpi")
    os.kill(parts.wrapper, signal.SIGKILL)
    code, err = parts.ended(within_s=25)
    report = err[err.index("╭") :].splitlines()
    assert code == 137 and f"rank 1 (local rank 1, pid {parts.wrapper} " in report[1], err


@pytest.mark.parametrize("part", ["rank", soak("reaper"), soak("agent"), soak("wrapper")])
def test_stopped_part_does_not_prolong_the_end_after_a_failure(parts, part):
    """A suspended rank kept torchrun for 30 s."""
    os.kill(getattr(parts, part), signal.SIGSTOP)
    (parts.command.folder / "raise-in-rank-0").touch()
    code, err = parts.ended(within_s=25)
    assert code == 1 and "ValueError: planned" in err


@pytest.mark.soak
def test_ctrl_c_ends_a_launch_whose_supervisor_is_stopped(parts):
    os.kill(parts.reaper, signal.SIGSTOP)
    parts.launcher.send_signal(signal.SIGINT)
    code, err = parts.ended(within_s=25)
    assert code == 130 and "SIGINT" in err
