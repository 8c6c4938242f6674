"""A random signal to a random process of a launch at a random moment: it ends and says why.

SOAK_LAUNCHES=1000 make soak TESTS=tests/launcher/test_random_kills.py
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from launcher.system import linux

LAUNCHES = int(os.environ.get("SOAK_LAUNCHES", "200"))
SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, LAUNCHES))]
TIMEOUT_S = 8  # of the launch: what waits for a suspended process ends then
GONE_S = 15.0  # after the command has ended
SIGNALS = {"KILL": 9, "TERM": 3, "INT": 3, "STOP": 2, "STOP and CONT": 3}
LAUNCHERS = {"multiprocessing": 6, "torchrun": 2, "threads": 2}
SCRIPT = """
import subprocess, sys, time
from coordinator import Coordinator
with Coordinator() as coor:
    if sys.argv[1] == "child":
        subprocess.Popen(["sleep", "77"], start_new_session=True)
    coor.barrier()
    print("ready", flush=True)
    end = time.monotonic() + 3
    while not coor.all_true(time.monotonic() > end):
        time.sleep(0.01)
"""


def choice(pick, weights):
    return pick.choices([*weights], [*weights.values()])[0]


def send(pid, name):
    """Send a signal; a suspension is over after a second if it is to be."""
    first, _, then = name.partition(" and ")
    linux.send_signal(pid, signal.Signals[f"SIG{first}"])
    if then:
        time.sleep(1)
        linux.send_signal(pid, signal.SIGCONT)


@pytest.mark.parametrize("seed", SEEDS)
def test_launch_ends_with_its_cause_and_leaves_nothing(command, seed):
    pick = random.Random(seed)
    launcher = "multiprocessing" if seed < 3 else choice(pick, LAUNCHERS)
    name, size = choice(pick, SIGNALS), pick.choice([2, 3, 4])
    # Nothing is left above threads that are killed, to end a child in a session of its own.
    child = "none" if (launcher, name) == ("threads", "KILL") else "child"
    options = ["--launcher", launcher, "-n", str(size), "--timeout", str(TIMEOUT_S)]
    process = command.start("run", *options, command.script(SCRIPT), child)
    if pick.random() < 0.67:
        process.stdout.readline()
    time.sleep(pick.random() * 1.5)
    pids = [process.pid, *sorted(linux.descendants(process.pid))]
    victim = pick.choice(pids)
    what = f"{name} to {linux.process_name(victim)!r} ({pids.index(victim)} of {len(pids)})"
    if victim == process.pid and name == "STOP":
        name = "STOP and CONT"  # nobody else could end it
    send(victim, name)
    _, err = process.communicate(timeout=TIMEOUT_S + 30)
    left = command.left(patience_s=GONE_S)
    assert not left, f"{what} under {launcher}: left {left}\n{err}"
    was_launcher_killed = process.returncode == -signal.SIGKILL and victim == process.pid
    # A signal before the launcher had its handlers
    early = process.returncode < 0 or (name == "INT" and "KeyboardInterrupt" in err)
    is_explained = "╭" in err or process.returncode == 0 or was_launcher_killed or early
    assert is_explained, f"{what} under {launcher}: code {process.returncode} without a word\n{err}"
