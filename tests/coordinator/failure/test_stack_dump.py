"""Stacks of another process, which goes on as if nothing had happened."""

import os
import subprocess
import sys
from types import SimpleNamespace

from coordinator.failure import stack_dump

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
