"""The fork server while it imports, and when somebody has stopped it."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher import timings
from launcher.local import fork_server
from launcher.system import descendants, linux

SOON_S = 30.0  # what is ended would go on for a minute


def wait_for(condition):
    deadline = time.monotonic() + SOON_S
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert value, "nothing happened"
    return value


def server_of(process):
    """The pid of the launcher's fork server."""
    names = {pid: linux.process_name(pid) for pid in linux.descendants(process.pid)}
    return next((pid for pid, name in names.items() if name == descendants.SUPERVISOR_NAME), 0)


@pytest.fixture
def importing(command):
    """Start a launch that imports for a minute before the fork; the process, once it does."""

    def start(*options):
        marker = Path(command.folder, "importing")
        Path(command.folder, "slow.py").write_text(
            f"import time\nopen({str(marker)!r}, 'w').close()\nuntil = time.monotonic() + 60\n"
            "while time.monotonic() < until:\n    try: time.sleep(60)\n    except: pass"
        )
        script = command.script("print('a rank')")
        process = command.start("run", "-n", "2", "--preload", "slow", *options, script)
        wait_for(marker.exists)
        return process

    return start


def ended(process):
    """(exit code, standard error) of a process that must end soon."""
    out, err = process.communicate(timeout=SOON_S)
    return process.returncode, out + err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_signal_ends_an_import_before_the_fork_at_once(importing, number):
    process = importing()
    process.send_signal(number)
    code, text = ended(process)
    assert code == 128 + number and number.name in text and "a rank" not in text


def test_timeout_ends_an_import_before_the_fork(importing):
    code, text = ended(importing("--timeout", "3"))
    assert code == 124 and "while modules were imported" in text


def test_import_before_the_fork_dies_with_its_launcher(importing, command):
    process = importing()
    process.kill()
    process.communicate()
    assert not command.left(patience_s=SOON_S)


RUNNING = """
import os, signal, subprocess, sys, time
subprocess.Popen(["sleep", "60"], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"running-{os.getpid()}", "w").close()
time.sleep(60)
"""


@pytest.fixture
def signalled(command):
    """Start two ranks with children in sessions of their own, and send a signal to their server."""

    def start(number, *options):
        process = command.start("run", "-n", "2", *options, command.script(RUNNING))
        wait_for(lambda: len(list(Path(command.folder).glob("running-*"))) == 2)
        os.kill(server_of(process), number)
        return process

    return start


@pytest.fixture
def stopped(signalled):
    return functools.partial(signalled, signal.SIGSTOP)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGKILL])
def test_whatever_kills_the_fork_server_its_name_is_told_and_nothing_is_left(signalled, number):
    """Only the signal SIGKILL was recognised; after another, children of ranks stayed for good."""
    code, text = ended(signalled(number))
    assert code == 128 + number and "the fork server of the ranks was killed" in text
    assert number == signal.SIGKILL or f"was killed by {number.name}" in text


def test_stopped_fork_server_is_named_and_the_launch_ends(stopped, command):
    code, text = ended(stopped())
    assert code == 128 + signal.SIGSTOP and "suspended from outside" in text
    assert "kill -CONT" in text and not command.left()


def test_fork_server_that_is_resumed_goes_on(stopped):
    process = stopped()
    server = server_of(process)
    lines = iter(process.stderr.readline, "")
    assert any("kill -CONT" in line for line in lines)
    os.kill(server, signal.SIGCONT)
    time.sleep(timings.TIMINGS.stopped_server_s)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, _ = ended(process)
    assert code == 130


def test_fork_server_that_is_stopped_for_less_than_the_patience_goes_on(stopped):
    process = stopped("--patience", "60")
    time.sleep(2 * timings.TIMINGS.stopped_server_s)
    os.kill(server_of(process), signal.SIGCONT)
    time.sleep(timings.TIMINGS.backend_poll_s)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] == 130


def test_timeout_and_ctrl_c_end_a_launch_whose_fork_server_is_stopped(stopped, command):
    code, text = ended(stopped("--timeout", "3"))
    assert code == 124 and not command.left(), text


def test_ctrl_c_ends_a_launch_whose_fork_server_is_stopped(stopped, command):
    process = stopped()
    process.send_signal(signal.SIGINT)
    code, text = ended(process)
    assert code == 130 and not command.left(), text


def test_stopped_fork_server_ends_its_ranks_when_the_launcher_dies(stopped, command):
    process = stopped()
    process.kill()
    process.communicate()
    assert not command.left(patience_s=SOON_S)


@pytest.mark.parametrize(("num_before", "chosen"), [(8, [2]), (2, []), (1, [])])
def test_torch_that_was_loaded_before_uses_the_share_of_a_rank(monkeypatch, num_before, chosen):
    """It had read OMP_NUM_THREADS before: each of two ranks had a thread for each core, so these
    waited for each other, and two ranks of `drumline serve` were slower than one."""
    numbers = []
    torch = SimpleNamespace(get_num_threads=lambda: num_before, set_num_threads=numbers.append)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    plan = SimpleNamespace(
        environment={"OMP_NUM_THREADS": "2"}, preload=SimpleNamespace(imports=[])
    )
    fork_server._preload(plan)()
    gc.unfreeze()
    assert numbers == chosen
