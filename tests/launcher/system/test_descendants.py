"""The end of processes that a launch has left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace

from launcher import timings
from launcher.system import descendants, linux


def test_what_is_left_is_killed_however_long_it_takes_to_find_it(monkeypatch):
    """On a busy machine, the time was over before the first one was killed."""
    monkeypatch.setattr(timings, "TIMINGS", replace(timings.TIMINGS, unkillable_s=0.0))
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    descendants.kill_all(lambda: {child.pid for child in children if child.poll() is None})
    # 0: what kill_all has reaped, of which Popen knows no more. None ended by itself.
    assert {child.wait(20) for child in children} <= {-signal.SIGKILL, 0}
    unkillable = subprocess.Popen(["true"])
    descendants.kill_all(lambda: {unkillable.pid})  # ends


def test_what_another_user_runs_is_left_without_an_error(monkeypatch):
    """After `sudo` in a rank, a launch that was well had PermissionError, and exit code 2."""

    def refuse(pid, number):
        raise PermissionError

    monkeypatch.setattr(timings, "TIMINGS", replace(timings.TIMINGS, unkillable_s=0.0))
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child,
        monkeypatch.context() as patch,
    ):
        patch.setattr(os, "kill", refuse)
        descendants.signal_all(signal.SIGTERM)
        descendants.kill_all(lambda: {child.pid})
        assert child.poll() is None


def test_a_process_adopts_until_the_last_of_its_launches_has_ended():
    """The first launch switched it off for the others, and the last one left it on."""

    def is_subreaper():
        before = linux.set_subreaper(True)
        linux.set_subreaper(before)
        return before

    first, last = linux.adopting(), linux.adopting()
    first.__enter__()
    last.__enter__()
    pid = os.fork()
    if pid == 0:
        with linux.adopting():
            os._exit(is_subreaper())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1, "its own launch has to adopt"
    first.__exit__(None, None, None)
    assert is_subreaper()
    last.__exit__(None, None, None)
    assert not is_subreaper()
