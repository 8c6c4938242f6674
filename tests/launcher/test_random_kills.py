"""A random signal to a random process of a launch at a random moment: it ends and says why.

SOAK_SEED=5000 SOAK_LAUNCHES=1000 make soak TESTS=tests/launcher/test_random_kills.py
"""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from launcher.system import linux
from tests.launcher.conftest import CommandLine

LAUNCHES = int(os.environ.get("SOAK_LAUNCHES", "1000"))
FIRST_SEED = int(os.environ.get("SOAK_SEED", "3"))
SIDE_BY_SIDE = 8  # a launch mostly waits
TIMEOUT_S = 8  # of the launch: what waits for a suspended process ends then
GONE_S = 15.0  # after the command has ended
SIGNALS = {"KILL": 9, "TERM": 3, "INT": 3, "STOP": 2, "STOP and CONT": 3}
LAUNCHERS = {"multiprocessing": 6, "torchrun": 2, "threads": 2}
SCRIPT = """
import subprocess, time
from coordinator import Coordinator
with Coordinator() as coor:
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


def complaint_about(command, seed):
    """What is wrong with the end of one launch; "" if nothing is."""
    pick = random.Random(seed)
    launcher = "multiprocessing" if seed < 3 else choice(pick, LAUNCHERS)
    name, size = choice(pick, SIGNALS), pick.choice([2, 3, 4])
    options = ["--launcher", launcher, "-n", str(size), "--timeout", str(TIMEOUT_S)]
    process = command.start("run", *options, command.script(SCRIPT))
    if pick.random() < 0.67:
        process.stdout.readline()
    time.sleep(pick.random() * 1.5)
    pids = [process.pid, *sorted(linux.descendants(process.pid))]
    victim = pick.choice(pids)
    is_launcher = victim == process.pid
    what = f"seed {seed}, {launcher}: {name} to {linux.process_name(victim)!r}"
    if is_launcher and name == "STOP":
        name = "STOP and CONT"  # nobody else could end it
    send(victim, name)
    _, err = process.communicate(timeout=TIMEOUT_S + 60)
    if left := command.left(patience_s=GONE_S):
        return f"{what}: left {left}\n{err}"
    was_killed = is_launcher and process.returncode == -signal.SIGKILL
    # A signal before the launcher had its handlers
    was_early = is_launcher and process.returncode == -getattr(signal, f"SIG{name}", 0)
    is_explained = "╭" in err or process.returncode == 0 or was_killed or was_early
    if is_explained or (name == "INT" and "KeyboardInterrupt" in err):
        return ""
    return f"{what}: code {process.returncode} without a word\n{err}"


@pytest.mark.parametrize("seed", range(3))
def test_launch_ends_with_its_cause_and_leaves_nothing(command, seed):
    assert not complaint_about(command, seed)


@pytest.mark.soak
def test_many_launches_end_with_their_causes_and_leave_nothing(tmp_path):
    def launch(seed):
        folder = tmp_path / str(seed)
        folder.mkdir()
        return complaint_about(CommandLine(folder), seed)

    seeds = range(FIRST_SEED, FIRST_SEED + LAUNCHES)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        complaints = [text for text in threads.map(launch, seeds) if text]
    assert not complaints, f"{len(complaints)} of {LAUNCHES}:\n" + "\n".join(complaints)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + LAUNCHES // 50))
def test_launch_over_two_hosts_ends_on_both(command, hosts, seed):
    """A signal to a process of either host, or the link is cut."""
    pick = random.Random(seed)
    options = ["--launcher", "torchrun", "--nnodes", "2", "-n", "2", "--timeout", str(TIMEOUT_S)]
    options += ["--master-addr", "10.77.0.1", "--launch-id", f"soak-{seed}"]
    script = command.script(SCRIPT)
    processes = [
        command.start(
            "run", *options, "--node-rank", str(index), script,
            around=hosts.command(index, []),
        )
        for index in range(2)
    ]  # fmt: skip
    time.sleep(pick.random() * 10)
    process = pick.choice(processes)
    name = choice(pick, {"KILL": 3, "TERM": 1, "INT": 1, "STOP": 1, "cut": 3})
    pids = [process.pid, *sorted(linux.descendants(process.pid))]
    victim = pick.choice(pids[1:] if name == "STOP" and len(pids) > 1 else pids)
    what = f"seed {seed}: {name} to {linux.process_name(victim)!r} of {len(pids)}"
    if name == "cut":
        hosts.set_link(0, "down")
    elif name != "STOP" or victim != process.pid:
        send(victim, name)
    try:
        errors = [each.communicate(timeout=TIMEOUT_S + 60)[1] for each in processes]
    finally:
        hosts.set_link(0, "up")
    left = command.left(patience_s=GONE_S)
    assert not left, f"{what}: left {left}\n{errors}"
    codes = [each.returncode for each in processes]
    was_killed = victim in (each.pid for each in processes) and name != "cut"
    is_explained = any("╭" in err for err in errors) or codes == [0, 0] or was_killed
    assert is_explained, f"{what}: codes {codes} without a word\n{errors}"
