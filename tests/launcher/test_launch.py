"""launcher.launch: results, failures, and what travels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import launcher


def identity(*args):
    info = launcher.current()
    return [info.rank, info.local_rank, info.world_size, info.local_world_size, list(args)]


def raise_on_rank_1():
    if launcher.current().rank == 1:
        raise ZeroDivisionError("planned")
    time.sleep(1.5)


def give_a_set():
    return {1, 2}


@contextmanager
def a_second_thread() -> Iterator[None]:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.parametrize("name", ["multiprocessing", "threads"])
def test_each_rank_knows_who_it_is_and_its_result_comes_back_in_order(name):
    results = launcher.launch(identity, 3, launcher=name, args=("a", b"\0\xff", 2.5, None))
    assert results == [[r, r, 3, 3, ["a", b"\0\xff", 2.5, None]] for r in range(3)]


def test_a_program_with_threads_gets_its_ranks_from_a_fresh_interpreter(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    monkeypatch.setattr(identity, "__module__", "test_launch")
    with a_second_thread():
        assert launcher.launch(identity, 2, args=(b"x",)) == [
            [r, r, 2, 2, [b"x"]] for r in range(2)
        ]


def test_a_nested_function_cannot_be_found_by_a_fresh_interpreter():
    with a_second_thread(), pytest.raises(launcher.TargetError, match="nested"):
        launcher.launch(lambda: None, 2)


@pytest.mark.parametrize("name", ["multiprocessing", "threads"])
def test_the_first_failure_names_its_rank_and_carries_its_traceback(name):
    began = time.monotonic()
    with pytest.raises(launcher.LaunchError) as raised:
        launcher.launch(raise_on_rank_1, 3, launcher=name)
    first = raised.value.failures[0]
    assert (first.rank, first.type, first.message) == (1, "ZeroDivisionError", "planned")
    assert "in raise_on_rank_1" in first.traceback and first.pid > 0 and first.host
    assert time.monotonic() - began < 2.9


def test_a_result_that_only_pickle_could_carry_is_refused_by_its_type():
    with pytest.raises(launcher.LaunchError, match=r"builtins\.set"):
        launcher.launch(give_a_set, 2)


def test_a_rank_that_leaves_without_a_result_is_a_failure():
    with pytest.raises(launcher.LaunchError, match="rank 0"):
        launcher.launch(lambda: os._exit(0), 1)


def test_a_rank_killed_by_a_signal_gives_128_and_its_number():
    with pytest.raises(launcher.LaunchError, match="SIGKILL") as raised:
        launcher.launch(lambda: os.kill(os.getpid(), signal.SIGKILL), 2)
    assert raised.value.exit_code == 128 + signal.SIGKILL


def test_the_secret_is_the_same_on_every_rank_and_different_in_the_next_launch():
    def secret():
        return os.pread(int(launcher.current().extras["secret_fd"]), 100, 0)

    first, second = launcher.launch(secret, 2), launcher.launch(secret, 2)
    assert first[0] == first[1] and len(first[0]) == 32 and first[0] != second[0]


def test_exit_handlers_of_the_program_do_not_run_in_its_ranks(tmp_path):
    import atexit

    def leave_a_mark():
        (tmp_path / f"mark-{os.getpid()}").touch()

    atexit.register(leave_a_mark)
    try:
        launcher.launch(lambda: None, 2)
    finally:
        atexit.unregister(leave_a_mark)
    assert not list(tmp_path.iterdir())


def test_importing_the_launcher_loads_nothing_but_the_standard_library():
    code = "import sys, launcher, launcher.cli; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "numpy", "rich", "pynvml"} & set(loaded.stdout.split())
