"""A launch ended from outside: signals to the launcher, or the death of one of its processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import textwrap
import time

import pytest

from launcher.timings import TIMINGS

SOON_S = 30  # ranks wait for a minute
WAITING = (
    "import os, subprocess, sys, time, launcher\n"
    "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
    "daemon = subprocess.Popen(sleep, start_new_session=True)\n"
    "info = launcher.current()\n"
    "print('ready', os.getpid(), os.getppid(), info.master_port, flush=True)\n"
)


def ready(process, nprocs=2):
    """(pid, parent's pid, master port) of each rank, by rank, once all have printed them."""
    processes = {}
    while len(processes) < nprocs:
        line = process.stdout.readline()
        rank, word, *numbers = line.split()
        assert word == "ready", line
        processes[int(rank.strip("[]"))] = tuple(map(int, numbers))
    return [processes[rank] for rank in range(nprocs)]


def end(process, within_s=SOON_S):
    """(exit code as a shell gives it, standard error)."""
    _, err = process.communicate(timeout=within_s)
    code = process.returncode
    return (code if code >= 0 else 128 - code), err


@pytest.fixture
def waiting(command):
    """Two ranks, each with a child in a session of its own, all waiting for a minute."""
    process = command.start("run", "-n", "2", command.script(WAITING + "time.sleep(60)"))
    yield process, ready(process)
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_the_ranks(waiting, number):
    process, _ = waiting
    process.send_signal(number)
    code, err = end(process, within_s=TIMINGS.stop_grace_s)
    assert code == 128 + number
    assert f"stopped by {signal.Signals(number).name}" in err


@pytest.mark.parametrize("victim", ["launcher", "fork server", "rank 0", "rank 1"])
def test_killing_any_one_process_ends_all(command, waiting, victim):
    process, ranks = waiting
    pid = {"launcher": process.pid, "fork server": ranks[0][1], "rank 0": ranks[0][0]}
    os.kill(pid.get(victim, ranks[1][0]), signal.SIGKILL)
    code, _ = end(process)
    assert code == 137
    assert command.left(patience_s=SOON_S) == []


def test_the_port_is_free_after_the_launcher_was_killed(command, waiting):
    process, ranks = waiting
    process.kill()
    end(process)
    command.left(patience_s=SOON_S)
    with socket.socket() as intruder:
        intruder.bind(("127.0.0.1", ranks[0][2]))


def test_ctrl_c_gives_the_ranks_time_to_finish(command):
    script = command.script(
        "try:\n"
        + textwrap.indent(WAITING + "time.sleep(60)\n", "  ")
        + "except KeyboardInterrupt:\n"
        "    time.sleep(0.7)\n"
        "    print('saved', flush=True)"
    )
    process = command.start("run", "-n", "2", script)
    ready(process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=SOON_S)
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
    assert process.returncode == 130


def test_a_background_job_handles_sigint(command):
    """A shell without job control starts background jobs with SIGINT ignored."""

    def ignore_sigint():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    script = command.script(WAITING + "time.sleep(60)")
    process = command.start("run", "-n", "2", script, preexec_fn=ignore_sigint)
    ready(process)
    process.send_signal(signal.SIGINT)
    code, _ = end(process, within_s=TIMINGS.stop_grace_s)
    assert code == 130


def test_a_second_ctrl_c_kills_at_once(command):
    script = command.script(
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + WAITING + "time.sleep(60)"
    )
    process = command.start("run", "-n", "2", script)
    ready(process)
    process.send_signal(signal.SIGINT)
    assert "another kills them" in process.stderr.readline()
    time.sleep(2 * TIMINGS.reap_lag_s)  # a rank that ended at once would have ended by itself
    process.send_signal(signal.SIGINT)
    code, err = end(process, within_s=TIMINGS.stop_grace_s)
    assert code == 130
    assert "did not exit when asked" in err


def test_ranks_run_their_sigterm_handlers(command):
    script = command.script(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'goodbye\\n'), sys.exit(0)))\n"
        + WAITING
        + "time.sleep(60)"
    )
    process = command.start("run", "-n", "2", script)
    ready(process)
    process.terminate()
    out, _ = process.communicate(timeout=SOON_S)
    assert sorted(out.splitlines()) == ["[0] goodbye", "[1] goodbye"]
    assert process.returncode == 143


def test_a_second_sigterm_takes_no_time_from_the_ranks(command):
    """timeout(1) sends two at once: to its child, and to the group of processes."""
    script = command.script(
        "import os, signal, sys, time\n"
        "def end(*_):\n"
        "    os.write(1, b'asked\\n')\n"
        "    while not os.path.exists('go'): time.sleep(0.01)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n" + WAITING + "time.sleep(60)"
    )
    process = command.start("run", "-n", "2", script)
    ready(process)
    process.terminate()
    assert sorted(process.stdout.readline() for _ in "01") == ["[0] asked\n", "[1] asked\n"]
    process.terminate()
    time.sleep(2 * TIMINGS.reap_lag_s)
    (command.folder / "go").touch()
    code, err = end(process)
    assert code == 143 and "SIGKILL" not in err


def test_a_closed_reader_of_the_output_ends_the_launch(command):
    script = command.script(
        "import time\nfor i in range(1000):\n    print(i, flush=True)\n    time.sleep(0.01)"
    )
    process = command.start("run", "-n", "2", script)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=SOON_S) == 128 + signal.SIGPIPE
    assert "nobody reads" in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize("name", ["multiprocessing", "mpi"])
def test_sighup_is_ignored_under_nohup(command, name):
    if name == "mpi" and shutil.which("mpiexec") is None:
        pytest.skip("no mpiexec: runs after `pip install mpich`")

    def ignore_sighup():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    script = command.script(WAITING + "time.sleep(0.5)")
    process = command.start("run", "--launcher", name, "-n", "2", script, preexec_fn=ignore_sighup)
    ready(process)
    process.send_signal(signal.SIGHUP)
    code, _ = end(process)
    assert code == 0


def test_a_rank_just_forked_receives_sigterm(command):
    """Forked with the fork server's ignored signals, ranks lost SIGTERM and were waited for."""
    script = command.script("import time\nprint('x' * 100_000, flush=True)\ntime.sleep(60)")
    for _ in range(5):
        with open("/dev/full", "w") as full:
            ended = command.run("run", "-n", "8", script, stdout=full)
        assert "did not exit when asked" not in ended.err
