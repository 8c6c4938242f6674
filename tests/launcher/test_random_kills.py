"""A random signal to a random process of a launch at a random moment: it ends and says why.

SOAK_SEED=5000 SOAK_LAUNCHES=1000 make soak TESTS=tests/launcher/test_random_kills.py
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.system import linux
from tests.cases import soak
from tests.launcher.conftest import CommandLine

LAUNCHES = int(os.environ.get("SOAK_LAUNCHES", "1000"))
FIRST_SEED = int(os.environ.get("SOAK_SEED", "3"))
SIDE_BY_SIDE = int(os.environ.get("SOAK_SIDE_BY_SIDE", "8"))  # a launch mostly waits
# Of the launch: what waits for a suspended process ends then. Longer where a start takes long.
TIMEOUT_S = int(os.environ.get("SOAK_TIMEOUT", "15"))
GONE_S = 15.0  # after the command has ended
DEADLINE_S = 60.0  # for the command to end, on a machine that does many other things
SIGNALS = {
    "KILL": 6, "SEGV": 3, "ABRT": 2, "TERM": 3, "INT": 3, "HUP": 2, "STOP": 3, "STOP and CONT": 2,
}  # fmt: skip
DEADLY = ("KILL", "SEGV", "ABRT")
LAUNCHERS = {"multiprocessing": 5, "torchrun": 2, "threads": 2}
if shutil.which("mpiexec"):
    LAUNCHERS["mpi"] = 2
# What a rank prints when it comes to each moment; nobody has printed before the first.
MOMENTS = {"starting": 3, "joining": 2, "running": 4, "closed": 2}
SCRIPT = """
import subprocess, time
print("joining", flush=True)
from coordinator import Coordinator
with Coordinator() as coor:
    subprocess.Popen(["sleep", "77"], start_new_session=True)
    coor.barrier()
    print("running", flush=True)
    end = time.monotonic() + 3
    while not coor.all_true(time.monotonic() > end):
        time.sleep(0.01)
print("closed", flush=True)
time.sleep(2)
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


def listening(pids=None):
    """The sockets that listen on this machine, or at which these processes do; by inode."""
    rows = [line.split() for line in linux.read_proc("net/tcp").splitlines()[1:]]
    sockets = {row[9] for row in rows if row[3] == "0A"}
    if pids is None:
        return sockets
    links = []
    for pid in pids:
        with contextlib.suppress(OSError):
            links += [
                linux.read_proc_link(f"{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")
            ]
    return sockets & {link.removeprefix("socket:[").rstrip("]") for link in links}


class Launch:
    """One launch, and the signal that it gets at a random moment; all by the seed."""

    def __init__(self, command, seed):
        self.command, self.pick, self.start_s = command, random.Random(seed), time.monotonic()
        self.launcher = "multiprocessing" if seed < 3 else choice(self.pick, LAUNCHERS)
        self.signal, self.moment = choice(self.pick, SIGNALS), choice(self.pick, MOMENTS)
        self.temporary = command.folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        size = str(self.pick.choice([2, 3, 4]))
        options = ["--launcher", self.launcher, "-n", size, "--timeout", str(TIMEOUT_S)]
        environ = {"TMPDIR": str(self.temporary)}
        self.process = command.start("run", *options, command.script(SCRIPT), env=environ)
        self.what = f"seed {seed}, {self.launcher}, {self.moment}: {self.signal}"

    def send(self):
        """Wait for the moment, and a little longer; signal a process that is not a child's."""
        if self.moment != "starting":
            while (line := self.process.stdout.readline()) and self.moment not in line:
                pass
        time.sleep(self.pick.random() * (1.5 if self.moment == "starting" else 0.3))
        pids = [self.process.pid, *sorted(linux.descendants(self.process.pid))]
        names = {pid: linux.process_name(pid) for pid in pids}
        self.sockets = listening(pids)
        self.victim = self.pick.choice([pid for pid, name in names.items() if name != "sleep"])
        self.name, self.is_launcher = names[self.victim], self.victim == self.process.pid
        if self.is_launcher and self.signal == "STOP":
            self.signal = "STOP and CONT"  # nobody else could end it
        self.what += f" to {'the launcher' if self.is_launcher else repr(self.name)}"
        after_s = time.monotonic() - self.start_s
        self.what += f" after {after_s:.1f} s"
        # On a loaded machine: the launch may be ending all ranks for its own deadline by then.
        self.is_late = after_s >= TIMEOUT_S
        send(self.victim, self.signal)

    def complaints(self):
        """What is wrong with the end of the launch."""
        try:
            _, self.err = self.process.communicate(timeout=TIMEOUT_S + DEADLINE_S)
        except subprocess.TimeoutExpired:
            left = self.command.left()
            for line in left:
                linux.send_signal(int(line.split()[0]), signal.SIGKILL)
            self.err = self.process.communicate()[1]
            yield f"does not end: {left}"
            return
        if left := self.command.left(patience_s=GONE_S):
            yield f"left {left}"
        if sockets := self.sockets & listening():
            yield f"left {len(sockets)} listening sockets"
        if files := [*self.temporary.iterdir(), *Path("/dev/shm").glob("*drumline*")]:
            yield f"left {files}"
        if not self.is_explained():
            yield f"code {self.process.returncode} without a word"
        if (wrong := self.wrong_report()) is not None:
            yield wrong

    def is_explained(self):
        number = getattr(signal, f"SIG{self.signal}", 0)
        code = self.process.returncode
        # Killed, or by a signal before the launcher had its handlers.
        launcher_ended = self.is_launcher and code == -number
        if launcher_ended or code == 0 or "╭" in self.err:
            return True
        return self.signal == "INT" and re.search("KeyboardInterrupt|interrupted", self.err)

    def wrong_report(self):
        """What the report does not say, but should; None if it says all."""
        if self.process.returncode == 0 or self.is_launcher or "╭" not in self.err:
            return None
        report = self.err[self.err.index("╭") :].splitlines()[1]
        kind, _, number = self.name.replace("-", " ").rpartition(" ")
        is_rank = kind in ("rank", "wrapper") and self.moment != "starting"
        if (
            is_rank
            and not self.is_late
            and self.signal in DEADLY
            and not re.search(rf"ranks? .*\b{number}\b", report)
        ):
            return f"does not name rank {number} first"
        if self.signal == "STOP" and "suspended" not in self.err.lower():
            return "does not tell who is suspended"
        return None


def complaint_about(command, seed):
    """What is wrong with one launch; "" if nothing is."""
    launch = Launch(command, seed)
    launch.send()
    complaints = [*launch.complaints()]
    return f"{launch.what}: {'; '.join(complaints)}\n{launch.err}" if complaints else ""


@pytest.mark.parametrize("seed", [0, soak(1), soak(2)])
def test_launch_ends_with_its_cause_and_leaves_nothing(command, seed):
    assert not complaint_about(command, seed)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_launches_end_with_their_causes_and_leave_nothing(tmp_path):
    def launch(seed):
        folder = tmp_path / str(seed)
        folder.mkdir()
        complaint = complaint_about(CommandLine(folder), seed)
        if complaint:
            print(complaint, flush=True)
        return complaint

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
            around=hosts.command(index, []), env={"DRUMLINE_TOKEN": "5e" * 32},
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
