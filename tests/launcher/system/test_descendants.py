"""The end of processes that a launch has left behind."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import replace

from launcher import timings
from launcher.system import descendants


def test_what_is_left_is_killed_however_long_it_takes_to_find_it(monkeypatch):
    """On a busy machine, the time was over before the first one was killed."""
    monkeypatch.setattr(timings, "TIMINGS", replace(timings.TIMINGS, unkillable_s=0.0))
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    descendants.kill_all(lambda: {child.pid for child in children if child.poll() is None})
    assert [child.wait(20) for child in children] == [-signal.SIGKILL] * 3
    unkillable = subprocess.Popen(["true"])
    descendants.kill_all(lambda: {unkillable.pid})  # ends
