"""torch.distributed on our communicators gives what it gives on gloo.

The programs are in programs/process_group_programs.py, which forks their ranks, and those of sends
and receives in programs/p2p_programs.py.
"""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "programs"
FILES = ("process_group_programs.py", "p2p_programs.py")
PROGRAMS = [
    (file, name)
    for file in FILES
    for name in re.findall(r"^@program\(\d\)\ndef (\w+)", (FOLDER / file).read_text(), re.MULTILINE)
]


@pytest.fixture(scope="module")
def outcomes(warm, tmp_path_factory):
    """The folder of a file of programs, with what went wrong in each of them."""

    @functools.cache
    def folder_of(file):
        folder = tmp_path_factory.mktemp(file.removesuffix(".py"))
        done = warm.run(FOLDER / file, folder, timeout=110)
        assert done.returncode == 0, done.stderr
        return folder

    return folder_of


@pytest.mark.parametrize(("file", "program"), PROGRAMS, ids=lambda value: value)
def test_a_program_gives_the_same_on_gloo_and_on_drumline(outcomes, file, program):
    assert (outcomes(file) / program).read_text() == ""


RESTARTED = """
import os, sys, torch, torch.distributed as dist, communicator.torch_interop.process_group
dist.init_process_group("drumline")
half = dist.new_group([0, 1])
total = torch.ones(3)
dist.all_reduce(total, group=half)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(3)
sys.stdout.write(f"sum {total.sum().item():g}\\n")
dist.destroy_process_group()
"""


def test_ranks_that_torchrun_restarts_meet_again(warm, commands, tmp_path):
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    start = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "1")
    options = ("--monitor-interval", "0.1", "--nproc-per-node", "2")
    done = warm.run(*start, *options, script, env=commands)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 6") == 2


# Rank 1 sends what rank 0 leaves unread, and receives once rank 0 has ended, or waits to end.
SENT = """
import os, sys, time, torch, torch.distributed as dist
from communicator import PeerLost
from communicator.backends.tcp import Tcp
from communicator.calls.async_work import WorkQueue
from communicator.p2p.group_ranks import GroupRanks, meet
from communicator.torch_interop.process_group import DrumlineProcessGroup
sends, sent = os.pipe()
rank = int(os.fork() == 0)
coor = meet(dist.FileStore(sys.argv[1], 2), rank, 2, 20.0)
group = DrumlineProcessGroup(GroupRanks(coor), WorkQueue(), chosen={"cpu": Tcp, "cuda": None})
value, came = torch.ones(40_000), torch.zeros(40_000)
if rank == 0:
    work = group.send([value], 1)
    work.wait()
    os.write(sent, b"s")
    time.sleep(0.2)
    if sys.argv[2] == "shutdown":
        group.shutdown()
    sys.exit()
os.read(sends, 1)
group._p2p.engine._streams.stream_write(0, b"unread", 0, 0)  # a send would read, too
time.sleep(0.5)
group.recv([came], 0).wait()
assert came.eq(1).all()
try:
    group.recv([came], 0).wait()
except PeerLost:
    print("came", end="", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("end", ["shutdown", "exit"])
def test_what_was_sent_over_connections_comes_although_the_sender_ends(warm, tmp_path, end):
    """The system dropped it at the sender's exit, and shutdown() told the other rank nothing."""
    done = warm.run("-c", SENT, tmp_path / "store", end)
    assert (done.returncode, done.stdout) == (0, "came"), done.stderr


# A message on a device, whose communicator notes when it moves.
DEFERRED = """
import contextlib, os, sys, types, torch, torch.distributed as dist
import communicator.torch_interop.process_group
from coordinator import torch_private
rank = int(os.fork() == 0)
dist.init_process_group("drumline", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
total, moved = torch.ones(3), []
dist.all_reduce(total)
(backend,) = {*torch_private.backends_of(dist.group.WORLD)}
comms = backend.group._comms
on_device = types.SimpleNamespace(group=contextlib.nullcontext, send=lambda *_: moved.append(1))
comms.of = lambda kind, of=comms.of: on_device if kind == "meta" else of(kind)
comms.check = lambda kind: None
work = backend.send([torch.ones(3, device="meta")], 1 - rank, 0)
assert moved == []
dist.all_reduce(total)
assert moved == [1] and total.tolist() == [4] * 3
dist.all_reduce(total)
os._exit(rank == 0 and os.wait()[1] != 0)
"""


def test_a_message_on_a_device_starts_with_the_next_collective_on_the_cpu(warm, tmp_path):
    """It was left for later by a collective that passes Python by, and its receiver waited."""
    done = warm.run("-c", DEFERRED, tmp_path / "store")
    assert done.returncode == 0, done.stderr


# Its queue's thread is in a call, of a tensor with gaps, which goes through Python.
LEFT = """
import os, sys, time, torch, torch.distributed as dist, communicator.torch_interop.process_group
class Last:
    def __del__(self, open=os.open, path=sys.argv[3], flags=os.O_CREAT, sleep=time.sleep):
        open(path, flags)
        sleep(2)
def instructions():
    frames = sys._current_frames().values()
    return [frame.f_lasti for frame in frames if frame.f_code.co_name == "allreduce"]
rank = int(sys.argv[1])
dist.init_process_group("drumline", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
tensor = torch.ones(4, 6)[::2]
dist.all_reduce(tensor)
if rank == 0:
    last, work = Last(), dist.all_reduce(tensor, async_op=True)
    before, now = [], instructions()
    while not now or before != now:  # it waits in the call: within an operation, torch aborts
        time.sleep(0.5)
        before, now = now, instructions()
else:
    while not os.path.exists(sys.argv[3]):
        time.sleep(0.01)
    time.sleep(0.5)
    dist.all_reduce(tensor)
    os._exit(int(tensor.sum()) != 48)
"""


def test_an_interpreter_may_end_while_a_call_of_its_group_runs(tmp_path):
    """The thread was ended as it asked for the GIL, and what it unwound aborted the process."""
    command = [sys.executable, "-c", LEFT]
    files = tmp_path / "store", tmp_path / "ending"
    ranks = [subprocess.Popen([*command, str(rank), *files]) for rank in range(2)]
    try:
        assert [rank.wait(100) for rank in ranks] == [0, 0]  # the first may have to compile
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
