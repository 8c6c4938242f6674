"""A launcher is killed at any line: its folder is removed, once its last process has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

PROGRAM = """
import os, signal, sys
from launcher.records import temporary_folder as module
def run(kill_at):
    lines = 0
    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        if lines == kill_at: os.kill(os.getpid(), signal.SIGKILL)
        return trace if frame.f_code.co_filename == module.__file__ else None
    sys.settrace(trace)
    with module.temporary_folder("drumline-test-") as (folder, _):
        (folder / "nested").mkdir()
        (folder / "nested" / "file").touch()
    sys.settrace(None)
    return lines
num_lines = run(-1)
for line in range(1, num_lines + 1):
    if os.fork() == 0: run(line)
    assert os.wait()[1] == signal.SIGKILL, line
print(num_lines)
"""
HOLDS_IT = """
import os, signal, subprocess
from launcher.records.temporary_folder import temporary_folder
with temporary_folder("drumline-test-") as (_, holder_fd):
    holder = subprocess.Popen(["sleep", "77"], pass_fds=[holder_fd], stdout=2)
    print(holder.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def start(program, folder):
    environ = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def is_empty(folder, within_s):
    deadline = time.monotonic() + within_s
    while [*folder.iterdir()] and time.monotonic() < deadline:
        time.sleep(0.01)
    return not [*folder.iterdir()]


def test_folder_is_removed_if_its_process_is_killed_at_any_line(tmp_path):
    """It stayed if the launcher was killed before the reaper ran, or after the reaper's end."""
    assert int(start(PROGRAM, tmp_path).communicate()[0]) > 10
    assert is_empty(tmp_path, within_s=30)


def test_folder_stays_while_a_process_that_writes_into_it_is_left(tmp_path):
    """A backend launcher would make it again."""
    holder = int(start(HOLDS_IT, tmp_path).communicate()[0])
    assert not is_empty(tmp_path, within_s=0.2)
    os.kill(holder, signal.SIGKILL)
    assert is_empty(tmp_path, within_s=30)
