"""launcher.launch: results, failures, and the values that travel."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import launcher
from launcher.local import fork_server_handle
from launcher.system import linux, stop_signals


def identity(*args):
    info = launcher.current()
    return [info.rank, info.local_rank, info.world_size, info.local_world_size, list(args)]


def raise_on_rank_1():
    if launcher.current().rank == 1:
        raise ZeroDivisionError("planned")
    time.sleep(0.5)


def return_a_set():
    return {1, 2}


def return_five_megabytes():
    return b"x" * 5_000_000


def print_hello():
    print("hello")


def sleep_a_minute():
    time.sleep(60)


def kill_the_fork_server():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def interrupt(program):
    if launcher.current().rank == 0:
        os.kill(program, signal.SIGINT)
    time.sleep(60)


@pytest.mark.parametrize(
    ("name", "number"), [("memfd_create", 0), ("pipe", 0), ("pipe", 5), ("fork", 0)]
)
def test_a_launch_for_which_no_descriptors_are_left_keeps_none(monkeypatch, tmp_path, name, number):
    """A program that tried again had fewer each time."""
    make, calls = getattr(os, name), itertools.count()

    def make_or_fail(*arguments):
        if next(calls) == number:
            raise OSError(errno.EMFILE, "Too many open files")
        return make(*arguments)

    (tmp_path / "script.py").touch()
    monkeypatch.setattr(os, name, make_or_fail)
    before = linux.open_fds()
    with pytest.raises(OSError, match="Too many open files"):
        launcher.launch(tmp_path / "script.py", 2)
    assert linux.open_fds() == before


def test_signals_come_again_after_a_launch_whose_loop_could_not_begin(monkeypatch, tmp_path):
    """They stayed blocked: no Ctrl-C ended the program."""

    def fail(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    (tmp_path / "script.py").touch()
    monkeypatch.setattr(fork_server_handle, "Supervisor", fail)
    try:
        with pytest.raises(OSError, match="Too many open files"):
            launcher.launch(tmp_path / "script.py", 2)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        stop_signals.unblock()
    assert not blocked & {*stop_signals.STOP_SIGNALS}


@pytest.mark.parametrize("argument", ["a\0b", "\ud800"])
def test_signals_come_again_after_an_argument_that_no_command_can_have(tmp_path, argument):
    (tmp_path / "script.py").touch()
    try:
        with pytest.raises(ValueError, match=r"null byte|surrogates"):
            launcher.launch(tmp_path / "script.py", launcher="torchrun", args=(argument,))
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        stop_signals.unblock()
    assert not blocked & {*stop_signals.STOP_SIGNALS}


def has_wave():
    return "wave" in sys.modules


@contextmanager
def a_second_thread() -> Iterator[None]:
    finished = threading.Event()
    thread = threading.Thread(target=finished.wait)
    thread.start()
    yield
    finished.set()
    thread.join()


@pytest.mark.parametrize("name", ["multiprocessing", "threads"])
def test_results_are_ordered_by_rank(name):
    results = launcher.launch(identity, 3, launcher=name, args=("a", b"\0\xff", 2.5, None))
    assert results == [[r, r, 3, 3, ["a", b"\0\xff", 2.5, None]] for r in range(3)]


def test_a_program_with_threads_starts_ranks_in_a_new_interpreter(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    monkeypatch.setattr(identity, "__module__", "test_launch_job")
    with a_second_thread():
        assert launcher.launch(identity, 2, args=(b"x",)) == [
            [r, r, 2, 2, [b"x"]] for r in range(2)
        ]


def test_a_new_interpreter_cannot_import_a_nested_function():
    with a_second_thread(), pytest.raises(launcher.TargetError, match="nested"):
        launcher.launch(lambda: None, 2)


@pytest.mark.parametrize("name", ["multiprocessing", "threads"])
def test_the_first_failure_has_its_rank_and_traceback(name):
    with pytest.raises(launcher.LaunchError) as raised:
        launcher.launch(raise_on_rank_1, 3, launcher=name)
    first = raised.value.failures[0]
    assert (first.rank, first.type, first.message) == (1, "ZeroDivisionError", "planned")
    assert "in raise_on_rank_1" in first.traceback and first.pid > 0 and first.host


def test_a_result_that_needs_pickle_is_an_error():
    with pytest.raises(launcher.LaunchError, match=r"builtins\.set"):
        launcher.launch(return_a_set, 2)


def run_program(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """A program with one thread, whose ranks are forked from it: pytest's process may have more."""
    script = folder / "program.py"
    script.write_text("import os, signal, launcher\n" + text)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=30)


def test_a_rank_that_exits_without_a_result_is_a_failure(tmp_path):
    ended = run_program(tmp_path, "launcher.launch(lambda: os._exit(0), 1)")
    assert ended.returncode == 1 and "LaunchError: rank 0" in ended.stderr


def test_the_exit_code_of_a_signal_is_128_plus_its_number(tmp_path):
    text = """
try:
    launcher.launch(lambda: os.kill(os.getpid(), signal.SIGKILL), 2)
except launcher.LaunchError as error:
    print(error.exit_code, error)
"""
    ended = run_program(tmp_path, text)
    assert ended.stdout.startswith("137 ") and "SIGKILL" in ended.stdout


def test_the_launch_secret_is_equal_on_all_ranks_and_new_in_the_next_launch(tmp_path):
    text = """
def secret():
    return os.pread(int(launcher.current().extras["secret_fd"]), 100, 0)
first, second = launcher.launch(secret, 2), launcher.launch(secret, 2)
print(first[0] == first[1], len(first[0]) == 32, first[0] != second[0])
"""
    assert run_program(tmp_path, text).stdout == "True True True\n"


def test_exit_handlers_of_the_program_do_not_run_in_its_ranks(tmp_path):
    text = """
import atexit
atexit.register(lambda: print("bye from", os.getpid() == program))
program = os.getpid()
launcher.launch(lambda: None, 2)
"""
    assert run_program(tmp_path, text).stdout == "bye from True\n"


def test_finalizers_of_a_rank_run_at_its_end_and_those_of_the_program_do_not(tmp_path):
    """None ran, so that a model in a global of rank 0 did not release the other ranks."""
    text = """
import weakref
weakref.finalize(run := lambda: bool(weakref.finalize(run, print, "rank")), print, "program")
launcher.launch(run, 2)
"""
    lines = run_program(tmp_path, text).stdout.splitlines()
    assert sorted(lines[:-1]) == ["[0] rank", "[1] rank"] and lines[-1] == "program"


def test_an_error_that_the_program_has_shown_is_none_of_its_ranks(tmp_path):
    """At a prompt it stays, and by it a rank knows at its end that it has failed."""
    text = """
import sys
sys.last_value = ValueError()
print(launcher.launch(lambda: hasattr(sys, "last_value"), 2))
"""
    assert run_program(tmp_path, text).stdout == "[False, False]\n"


def test_exit_handlers_of_a_rank_see_the_error_that_ends_it(tmp_path):
    """A model in a global of rank 0 released the other ranks as after a success."""
    text = """
import atexit, contextlib, sys
def fail():
    atexit.register(lambda: print(repr(getattr(sys, "last_value", None))))
    sys.exit(3)
with contextlib.suppress(BaseException):
    launcher.launch(fail, 1)
"""
    assert "SystemExit(3)" in run_program(tmp_path, text).stdout


def test_a_launch_loads_only_the_standard_library_and_little_of_that():
    code = "import sys, launcher.cli, launcher.local.launch_local; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    others = {"torch", "numpy", "rich", "pynvml"}
    slow = {"importlib.metadata", "difflib", "hmac", "statistics", "tempfile"}
    assert not (others | slow) & set(loaded.stdout.split())


def name_and_wait():
    time.sleep(0.5)
    return launcher.current().launch_id


def test_two_threads_of_a_program_can_each_launch(monkeypatch):
    """The orphans of one launch are told from the processes of the other."""
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    monkeypatch.setattr(name_and_wait, "__module__", "test_launch_job")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(launcher.launch, name_and_wait, 2, launch_id="first")
        second = pool.submit(launcher.launch, name_and_wait, 2, launch_id="second")
        assert (first.result(), second.result()) == (["first"] * 2, ["second"] * 2)


def test_a_thread_that_was_joined_but_still_ends_does_not_prevent_a_fork(tmp_path):
    text = """
import threading
from launcher.system import linux
for _ in range(300):
    threads = [threading.Thread(target=int) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    linux.wait_for_ending_threads()
    if linux.count_threads() != 1: print("a thread runs")
print(launcher.launch(lambda: 1, 2))
"""
    assert run_program(tmp_path, text).stdout == "[1, 1]\n"


def test_children_of_the_program_survive_a_killed_fork_server():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(launcher.LaunchError, match="killed from outside") as raised:
        launcher.launch(kill_the_fork_server, 2)
    assert raised.value.exit_code == 137
    assert child.poll() is None
    child.kill()
    child.wait()
    with pytest.raises(ChildProcessError):  # nothing of the launch is left, not even to be reaped
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_in_a_program_that_launches_is_a_keyboard_interrupt():
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(interrupt, 2, args=(os.getpid(),))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_output_of_ranks_reaches_a_standard_output_without_descriptor(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    launcher.launch(print_hello, 2)
    assert sorted(shown.getvalue().splitlines()) == ["[0] hello", "[1] hello"]


def test_a_timeout_is_a_timeout_error():
    with pytest.raises(TimeoutError, match="not over after"):
        launcher.launch(sleep_a_minute, 2, timeout_s=0.3)


def test_large_results_arrive_whole():
    results = launcher.launch(return_five_megabytes, 2)
    assert [len(result) for result in results] == [5_000_000] * 2


def test_preload_from_a_program():
    assert launcher.launch(has_wave, 2, preload=["wave"]) == [True, True]
    assert "wave" not in sys.modules


def test_a_script_can_be_launched_from_a_program(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text("import sys, launcher\nprint(__name__, sys.argv[1], launcher.current().rank)")
    assert launcher.launch(script, 2, args=["x"]) == [None, None]
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[0] __main__ x 0",
        "[1] __main__ x 1",
    ]


def test_an_archive_of_zipapp_runs_as_under_python(tmp_path, capfd):
    archive = tmp_path / "app.pyz"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", "import helper, sys; print(__name__, helper.X, sys.argv)")
        file.writestr("helper.py", "X = 5")
    launcher.launch(archive, 1, args=["x"])
    assert capfd.readouterr().out == f"[0] __main__ 5 ['{archive}', 'x']\n"


def test_an_archive_without_a_main_program_is_refused(tmp_path):
    archive = tmp_path / "app.pyz"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("helper.py", "X = 5")
    with pytest.raises(launcher.TargetError, match=r"app.pyz' has no __main__.py"):
        launcher.launch(archive, 2)


def test_ranks_of_a_killed_program_die_while_its_own_child_lives(tmp_path):
    """The child, forked during the launch, holds the program's end of the command pipe as well."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, threading, time, launcher\n"
        "def rank():\n"
        "    open(f'{os.environ[\"FOLDER\"]}/rank-{os.getpid()}', 'w').close()\n"
        "    time.sleep(60)\n"
        "def fork():\n"
        "    time.sleep(1)\n"
        "    if os.fork() == 0: time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    threading.Thread(target=fork, daemon=True).start()\n"
        "    launcher.launch(rank, 2)\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.getcwd(), "FOLDER": str(tmp_path)}
    run = [sys.executable, str(program)]
    process = subprocess.Popen(run, env=environ, start_new_session=True)
    wait_for(lambda: len(list(tmp_path.glob("rank-*"))) == 2)
    ranks = [int(path.name[len("rank-") :]) for path in tmp_path.glob("rank-*")]
    wait_for(lambda: len(children(process.pid)) == 2)
    process.kill()
    process.wait()
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in ranks))
    os.killpg(process.pid, signal.SIGKILL)


def children(pid):
    pids = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            pids += (thread / "children").read_text().split()
    return pids


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def fail_but_for_rank_1(said, fails_itself):
    info = launcher.current()
    if info.rank == 1:
        launcher.outlive_failures(info)
        Path(said).touch()
        if not fails_itself:
            return info.rank
    while not Path(said).exists():
        time.sleep(0.01)
    if info.rank == 1 or not fails_itself:
        raise ZeroDivisionError("planned")
    signal.pause()


def test_a_rank_that_outlives_failures_of_others_ends_the_launch_well(tmp_path):
    args = (str(tmp_path / "said"), False)
    assert launcher.launch(fail_but_for_rank_1, 3, args=args) == [None, 1, None]


def test_the_failure_of_a_rank_that_outlives_others_is_that_of_the_launch(tmp_path):
    with pytest.raises(launcher.LaunchError, match=r"rank 1 .*planned"):
        launcher.launch(fail_but_for_rank_1, 3, args=(str(tmp_path / "said"), True))
