"""Stacks of another process, which goes on as if nothing had happened."""

import os
import subprocess
import sys
from types import SimpleNamespace

from coordinator.failure import stack_dump, stuck_ranks

# Threads whose frames come and go all the time, as those of rank 0's server.
BUSY = """
import os, sys, threading
from coordinator.failure import stack_dump

DOWN = '''
def down(depth):
    return depth and down(depth - 1)
down(20)
'''

def work():
    while True:
        exec(DOWN, {})

fd, _ = stack_dump.stack_memory(os.getpid())
sys.setswitchinterval(1e-5)
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
print(fd, flush=True)
input()
"""


def test_a_process_whose_stacks_are_read_goes_on():
    """It ended with SIGSEGV after some ten reads, when the stacks of all threads were read."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        fd = int(process.stdout.readline())
        peer = SimpleNamespace(pid=process.pid, stack_fd=fd, is_visible=True)
        for _ in range(100):
            _, text = stack_dump.read(peer, 10.0)
            assert process.poll() is None, os.waitstatus_to_exitcode(process.returncode)
            assert "input" in text or "<module>" in text
        process.stdin.close()


def test_a_process_that_ends_before_it_is_asked_is_no_error(monkeypatch):
    with subprocess.Popen(["true"]) as process:
        pass
    peer = SimpleNamespace(pid=process.pid, is_visible=True, is_known_dead=lambda: False)
    monkeypatch.setattr(stack_dump.linux, "catches_signal", lambda *_: True)
    assert stack_dump.ask([peer]) == [peer]


def test_ranks_that_wait_for_one_that_is_not_seen_are_in_no_deadlock():
    """A rank of another host that was at work was taken for a part of a deadlock."""
    waits = {n: stuck_ranks.StuckRank(n, "recv", n + 1, f"a.py:{n}", []) for n in (0, 1)}
    text = stuck_ranks.describe(waits[0], waits.get, [1], lambda rank: f"rank {rank}")
    assert text == "rank 1 is here:\n"
    waits[1] = waits[1]._replace(other=0)
    text = stuck_ranks.describe(waits[0], waits.get, [1], lambda rank: f"rank {rank}")
    assert text.startswith("Deadlock: rank 0 waits in recv from rank 1 (a.py:0), and rank 1")
