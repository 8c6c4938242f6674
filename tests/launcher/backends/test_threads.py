"""Ranks as threads of one process: failures, and their report on the command line."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time

import pytest

import launcher
from launcher import timings
from launcher.backends import threads_main
from launcher.job import Job, Target
from launcher.local import auto_preload
from tests.cases import soak
from tests.launcher.conftest import ROOT


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no message today")


def raise_unprintable():
    raise Unprintable


def test_an_exception_whose_str_raises_ends_the_launch():
    """Describing it raised in the rank's thread, and the launch waited for ever."""
    with pytest.raises(launcher.LaunchError, match="no message: its __str__ raised") as raised:
        launcher.launch(raise_unprintable, 2, launcher="threads", timeout_s=10)
    assert raised.value.failures[0].type == "Unprintable"


class GaveUpError(Exception):
    failures = 3


def give_up():
    raise GaveUpError


def say_why_to_nobody():
    sys.stderr = io.TextIOWrapper(io.FileIO("/dev/full", "w"), line_buffering=True)
    sys.exit("nothing to train on")


@pytest.mark.parametrize("name", ["threads", "multiprocessing"])
@pytest.mark.parametrize(
    ("work", "error"), [(give_up, "GaveUpError"), (say_why_to_nobody, "SystemExit")]
)
def test_a_failure_is_told_whatever_its_attributes_and_whoever_reads(
    monkeypatch, name, work, error
):
    """Ranks that are threads were waited for without an end, and the others failed unnamed."""
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    with pytest.raises(launcher.LaunchError) as raised:
        launcher.launch(work, 1, launcher=name, timeout_s=20)
    assert [failure.type for failure in raised.value.failures] == [error]


@pytest.mark.parametrize(
    ("code", "expected"), [soak("256", 0), ("-1", 255), soak("3", 3), ("None", 0)]
)
@pytest.mark.parametrize("name", ["threads", "multiprocessing"])
def test_exit_codes_are_those_of_a_process(command, name, code, expected):
    script = command.script(f"import sys\nsys.exit({code})")
    assert command.run("run", "-n", "1", "--launcher", name, script).code == expected


@pytest.mark.parametrize("name", ["threads", "multiprocessing"])
def test_text_given_to_sys_exit_is_printed_once(command, name):
    script = command.script("import sys\nsys.exit('nothing to train on')")
    ended = command.run("run", "-n", "1", "--launcher", name, script)
    assert ended.code == 1 and ended.err.count("[0 err] nothing to train on") == 1


def test_the_report_shows_the_failed_line_of_a_thread(command):
    script = command.script("def divide():\n    1 / 0\ndivide()")
    ended = command.run("run", "-n", "2", "--launcher", "threads", script)
    assert (
        ended.code == 1
        and "in divide" in ended.err
        and "launcher/local/rank_threads.py" not in ended.err
    )


def test_threads_find_the_libraries_of_their_script_imported(command):
    """Two threads that import from a package like transformers at once can miss names of it."""
    script = command.script("import sys\nprint('numpy' in sys.modules)\nimport numpy")
    ended = command.run("run", "-n", "2", "--launcher", "threads", script)
    assert sorted(ended.out.splitlines()) == ["[0] True", "[1] True"], ended.err


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("import torch.distributed as dist", 1),
        ("from torch.distributed import ReduceOp", 0),
        ("from accelerate import Accelerator", 1),
        ("from transformers import AutoTokenizer", 0),
    ],
)
def test_a_library_that_would_see_one_process_is_warned_of(
    tmp_path, monkeypatch, caplog, line, count
):
    (tmp_path / "script.py").write_text(line)
    monkeypatch.setattr(auto_preload.ImportedNames, "load", lambda names: None)
    threads_main._import_before_threads(
        Job(Target("script", str(tmp_path / "script.py")), nprocs=2)
    )
    assert caplog.text.count("sees one process, not the 2 ranks") == count


def test_ctrl_c_ends_threads_without_a_traceback(command):
    script = command.script("import time\nprint('ready', flush=True)\ntime.sleep(60)")
    process = command.start("run", "-n", "2", "--launcher", "threads", script)
    process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped by SIGINT" in err and "Traceback" not in err


class RankLostError(Exception):
    peer, failures = None, ()


def test_the_cause_among_threads_is_told_before_its_consequence():
    """A rank that waits in close() is through only after those which it has failed."""

    def work():
        if launcher.current().rank == 1:
            raise RankLostError
        time.sleep(0.2)
        raise ValueError("planned")

    with pytest.raises(launcher.LaunchError, match=r"rank 0 .* raised ValueError") as raised:
        launcher.launch(work, 2, launcher="threads")
    assert [failure.rank for failure in raised.value.failures] == [0, 1]
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_thread_that_does_not_end_is_named(monkeypatch):
    monkeypatch.setattr(timings, "TIMINGS", timings.TIMINGS.scaled(0.1))
    finished = threading.Event()

    def work():
        if launcher.current().rank == 0:
            raise ValueError("planned")
        finished.wait()

    with pytest.raises(launcher.LaunchError, match="rank 1 still runs") as raised:
        launcher.launch(work, 2, launcher="threads")
    assert isinstance(raised.value.__cause__, ValueError)
    finished.set()


LEAVES_A_CHILD = """
import os, subprocess, time, launcher
if launcher.current().rank == 0:
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    print("ready", flush=True)
time.sleep(SECONDS)
"""


def test_processes_that_threads_have_started_end_with_the_launch(command):
    script = command.script(LEAVES_A_CHILD.replace("SECONDS", "0.2"))
    assert command.run("run", "-n", "2", "--launcher", "threads", script).code == 0
    assert not command.left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, soak(signal.SIGHUP)])
def test_stop_signals_end_threads_and_the_processes_that_they_have_started(command, number):
    script = command.script(LEAVES_A_CHILD.replace("SECONDS", "60"))
    process = command.start("run", "-n", "2", "--launcher", "threads", script)
    process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number and number.name in err, err
    assert not command.left()


@pytest.mark.parametrize(("second", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, -2)])
def test_a_second_sigterm_does_not_end_the_process_of_threads(second, status):
    """systemd sends two, and what threads had started was not ended."""
    pid = os.fork()
    if pid == 0:
        try:
            threads_main._raise_stopped(signal.SIGTERM, None)
        except launcher.stop_signals.Stopped:
            os.kill(os.getpid(), second)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        *((victim, signal.SIGKILL) for victim in ("launcher", "reaper", "threads")),
        ("reaper", signal.SIGSEGV),  # they were left when it crashed
        *(soak(victim, signal.SIGSEGV) for victim in ("launcher", "threads")),
    ],
)
def test_processes_that_threads_have_started_end_if_one_of_ours_is_killed(command, victim, number):
    """Those in sessions of their own were left if the launcher was killed, or a reaper crashed."""
    text = LEAVES_A_CHILD.replace("SECONDS", "60").replace('"ready"', "os.getpid(), os.getppid()")
    process = command.start("run", "-n", "2", "--launcher", "threads", command.script(text))
    threads, reaper = map(int, process.stdout.readline().split()[1:])
    os.kill({"launcher": process.pid, "reaper": reaper, "threads": threads}[victim], number)
    _, err = process.communicate(timeout=60)
    assert not command.left(patience_s=30)
    assert victim == "launcher" or process.returncode == 128 + number, err
    assert victim == "launcher" or f"was killed by {number.name}" in err, err


@pytest.mark.parametrize("how", ["timeout", "SIGINT"])
def test_a_suspended_process_of_threads_is_told_and_ended(command, how):
    """It was waited for without a word."""
    script = command.script("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    limit = ["--timeout", "5"] if how == "timeout" else []
    process = command.start("run", "-n", "1", "--launcher", "threads", *limit, script)
    pid = int(process.stdout.readline().split()[1])
    os.kill(pid, signal.SIGSTOP)
    assert f"`kill -CONT {pid}` resumes it" in process.stderr.readline()
    if how == "SIGINT":
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if how == "SIGINT" else 124), err
    assert how == "SIGINT" or f"ranks (threads) (pid {pid})" in err, err


@pytest.mark.parametrize(
    ("name", "part", "moment"),
    [
        ("threads", "launcher.external.reaper", "sitecustomize"),
        ("threads", "launcher.backends.threads_main", "sitecustomize"),
        ("threads", "launcher.backends.threads_main", "numpy"),
        ("torchrun", "launcher.external.torchrun_main", "sitecustomize"),
        ("torchrun", "launcher.external.torchrun_main", "torch"),
    ],
)
def test_ctrl_c_in_the_start_or_an_import_of_a_part_prints_no_traceback(
    command, name, part, moment
):
    """Python printed its own, and of threads the signal was lost with an import's errors."""
    (command.folder / f"{moment}.py").write_text(
        "import os, signal, sys, time\n"
        f"if {part!r} in sys.orig_argv: os.kill(os.getpid(), signal.SIGINT)\n"
    )
    environ = {"PYTHONPATH": f"{command.folder}{os.pathsep}{ROOT}"}
    script = command.script("import time, numpy\ntime.sleep(60)")
    ended = command.run("run", "-n", "1", "--launcher", name, script, env=environ, timeout=60)
    assert ended.code == 130 and "SIGINT" in ended.err
    assert "Traceback" not in ended.err and "Fatal" not in ended.err


def test_ctrl_c_is_not_lost_in_a_library_that_catches_the_errors_of_its_imports(command):
    """The ranks ran as if nobody had asked them to end."""
    library = command.folder / "numpy" / "__init__.py"
    library.parent.mkdir()
    library.write_text(
        "import os, signal, sys, time\n"
        "if 'launcher.backends.threads_main' in sys.orig_argv:\n"
        "    try:\n        os.kill(os.getpid(), signal.SIGINT)\n        time.sleep(9)\n"
        "    except Exception: pass\n"
    )
    environ = {"PYTHONPATH": f"{command.folder}{os.pathsep}{ROOT}"}
    script = command.script("import numpy\nprint('ran')")
    ended = command.run("run", "-n", "2", "--launcher", "threads", script, env=environ, timeout=60)
    assert ended.code == 130 and "SIGINT" in ended.err and "ran" not in ended.out


@pytest.mark.parametrize("options", [[], ["--log-dir", "logs"]])
def test_a_failure_of_a_thread_is_told_once_after_each_restart(command, options):
    script = command.script(
        "import launcher\nprint('hello')\n"
        "if launcher.current().rank == 1: raise ValueError('planned')"
    )
    launch = ["run", "-n", "2", "--launcher", "threads", "--max-restarts", "1", *options]
    ended = command.run(*launch, script)
    assert ended.code == 1 and ended.err.count("│ ValueError: planned\n") == 2
    assert "restart 1 of 1" in ended.err and ended.out.count("[0] hello") == 2
    assert not options or (command.folder / "logs/rank-1.out").read_text() == "hello\n" * 2


def test_interpreter_is_not_finalized_while_threads_run_in_libraries(command):
    """A daemon thread that came back into Python then ended the process by `terminate called`."""
    script = command.script(
        "import atexit, sys, time, launcher\n"
        "class Late:\n    def __del__(self): print('finalized', file=sys.stderr)\n"
        "if launcher.current().rank == 0: sys.modules['late'] = Late()\n"
        "atexit.register(print, 'exit handler')\n"
        "if launcher.current().rank == 0: raise ValueError('planned')\n"
        "while True: time.sleep(0.001)"
    )
    ended = command.run("run", "-n", "2", "--launcher", "threads", script)
    assert ended.code == 1 and "planned" in ended.err and "finalized" not in ended.err
    assert "exit handler" in ended.out
