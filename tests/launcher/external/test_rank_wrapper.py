"""The process between an external launcher and a rank."""

import fcntl
import itertools
import os
import subprocess
import sys
import threading
from io import FileIO
from pathlib import Path

from launcher.external import backend_launcher, rank_main, rank_wrapper
from launcher.runtime import rank_environment

ROOT = Path(__file__).parents[3]


def test_a_log_that_cannot_be_written_is_named_and_the_rank_goes_on(capfd, tmp_path):
    """The rank's output was closed, and it raised BrokenPipeError, without a word of the disk."""
    whole = FileIO(tmp_path / "rank-0.err", "w")
    files = {"out": FileIO("/dev/full", "w"), "err": whole}
    for _ in range(2):
        rank_wrapper._log(files, "out", b"text")
        rank_wrapper._log(files, "err", b"text")
    assert [*files] == ["err"] and (tmp_path / "rank-0.err").read_bytes() == b"texttext"
    said = "[launcher] /dev/full cannot be written, and ends here: No space left on device\n"
    assert capfd.readouterr().err == said


def test_a_log_that_cannot_be_opened_is_named_and_the_rank_goes_on(capfd, tmp_path):
    """The rank failed with BrokenPipeError: nobody read what it printed."""
    (tmp_path / "rank-0.err").mkdir()
    with rank_wrapper._log_files(tmp_path, 0) as files:
        rank_wrapper._log(files, "out", b"text")
        rank_wrapper._log(files, "err", b"text")
    assert (tmp_path / "rank-0.out").read_bytes() == b"text"
    line = f"[launcher] {tmp_path}/rank-0.err cannot be written, and ends here: Is a directory\n"
    assert capfd.readouterr().err == line


TALKS = """
from pathlib import Path
from launcher.external import rank_wrapper

def talk(report_identity):
    print("x" * 200_000, flush=True)
    report_identity(rank=3, local_rank=3)
    print("known", flush=True)
    return 0

rank_wrapper.run_wrapped(talk, Path("missing"))
"""


def test_a_rank_may_print_more_than_a_pipe_takes_before_it_knows_who_it_is():
    """As in MPI_Init, where MPI is told to be verbose: both waited for each other."""
    done = subprocess.run(
        [sys.executable, "-c", TALKS], capture_output=True, cwd=ROOT, timeout=20, check=True
    )
    assert done.stdout.splitlines() == [b"[3] " + b"x" * 200_000, b"[3] known"]


NAMED = """
import os
from pathlib import Path
from launcher.external import rank_wrapper
from launcher.system import linux

def show(report_identity):
    report_identity(rank=3, local_rank=3)
    while linux.process_name(os.getppid()).startswith("python"): pass
    print(linux.process_name(os.getppid()), flush=True)
    return 0

rank_wrapper.run_wrapped(show, Path("missing"))
"""


def test_the_name_of_a_wrapper_is_one_word():
    """Slurm's proctrack/linuxproc took no process of another name for one of the step."""
    done = subprocess.run(
        [sys.executable, "-c", NAMED], capture_output=True, cwd=ROOT, timeout=20, check=True
    )
    assert done.stdout == b"[3] wrapper-3\n"


LEAVES = """
import os, sys
from pathlib import Path
from launcher.external import rank_wrapper

def leave(report_identity):
    report_identity(rank=3, local_rank=3)
    print("printed")
    os._exit(7)

sys.exit(rank_wrapper.run_wrapped(leave, Path("missing")).exit_code)
"""


def test_a_rank_that_ends_at_once_has_printed_its_lines(monkeypatch):
    """They stayed in its buffer."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    command = [sys.executable, "-c", LEAVES]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (7, b"[3] printed\n")


def test_a_child_that_prints_for_ever_does_not_keep_a_rank_that_has_ended():
    """The launch did not end."""
    with open("/dev/zero", "rb") as endless, subprocess.Popen(["true"]) as ended:
        pidfd = os.pidfd_open(ended.pid)
        ended.wait()
        read = itertools.islice(rank_wrapper._read({endless.fileno(): "out"}, pidfd), 9)
        sizes = [len(data) for _, data in read]
        os.close(pidfd)
    assert sizes == [rank_wrapper.PIPE_NBYTES, 0]


def test_the_last_lines_are_read_also_where_a_pipe_holds_a_mebibyte():
    """As with pages of 64 KiB, where one of 64 KiB was read."""
    reading, writing = os.pipe()
    size = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)
    os.write(writing, bytes(size))
    with subprocess.Popen(["true"]) as ended:
        pidfd = os.pidfd_open(ended.pid)
        ended.wait()
        read = list(rank_wrapper._read({reading: "out"}, pidfd))
    for fd in (reading, writing, pidfd):
        os.close(fd)
    assert sum(len(data) for _, data in read) == size == 1 << 20


ENDLESS = """
from pathlib import Path
from launcher.external import rank_wrapper

def talk(report_identity):
    report_identity(rank=3, local_rank=3)
    print("x" * 3_000_000, end="", flush=True)
    return 0

rank_wrapper.run_wrapped(talk, Path("missing"))
"""


def test_a_line_without_an_end_is_printed_in_parts():
    """It was kept whole until the end of the rank, however long."""
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS], capture_output=True, cwd=ROOT, timeout=20, check=True
    )
    parts = [line.removeprefix(b"[3] ") for line in done.stdout.splitlines()]
    assert len(parts) > 1 and b"".join(parts) == b"x" * 3_000_000


def test_a_full_stream_that_does_not_block_is_waited_for(monkeypatch):
    """Another process had made it so, and the rank failed with BrokenPipeError."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    monkeypatch.setitem(rank_wrapper.STREAMS, "out", writing)
    received = []
    with open(reading, "rb") as stream:
        reader = threading.Timer(0.2, lambda: received.append(stream.read()))
        reader.start()
        rank_wrapper._print("out", 0, [b"x" * 1000] * 500)
        os.close(writing)
        reader.join()
    assert received == [(b"[0] " + b"x" * 1000 + b"\n") * 500]


def test_a_restart_leaves_the_log_of_the_attempt_before(monkeypatch, tmp_path):
    for text in (b"first\n", b"second\n"):
        with rank_wrapper._log_files(tmp_path, 0) as files:
            rank_wrapper._log(files, "out", text)
        monkeypatch.setenv(rank_environment.RESTART_COUNT, "1")
    assert (tmp_path / "rank-0.out").read_bytes() == b"first\nsecond\n"


def test_a_folder_that_cannot_be_written_is_named_and_the_error_of_the_rank_is_told(
    capsys, tmp_path
):
    """The rank raised OSError in place of it, and was said to be killed from outside."""
    (tmp_path / ".0.part").symlink_to("/dev/full")
    rank_main._report(tmp_path, 0, {"failure": {"type": "ValueError", "traceback": "its own\n"}})
    rank_main.complete_record(tmp_path, 0, {})
    line = f"[launcher] {tmp_path} cannot be written: No space left on device\n"
    assert capsys.readouterr().err == f"{line}its own\n{line}"


CRASH = {"rank": 1, "signal": 11, "exit_code": 139, "traceback": "File stack.py"}


def test_a_rank_that_dies_in_an_exit_handler_has_failed(tmp_path):
    """Nobody told of it: its record had a result."""
    rank_main.write_record(tmp_path, 1, {"result": None})
    rank_main.complete_record(tmp_path, 1, CRASH)
    assert backend_launcher._records(tmp_path) == {1: {"failure": CRASH}}


def test_a_crash_where_the_folder_of_the_launch_is_not_is_told_there(capsys, tmp_path):
    """As on other hosts, where its stack was lost."""
    rank_main.complete_record(tmp_path / "elsewhere", 1, CRASH)
    printed = capsys.readouterr().err
    assert printed.startswith("rank 1 (") and printed.endswith(
        "was killed by SIGSEGV\nFile stack.py\n"
    )


def test_a_rank_that_the_launcher_has_ended_is_not_told_where_its_folder_is_not(capsys, tmp_path):
    """The error of the rank that failed was followed by the stacks of all others."""
    rank_main.complete_record(tmp_path / "elsewhere", 1, {**CRASH, "ended_by_launcher": True})
    assert capsys.readouterr().err == ""


def test_a_log_takes_a_traceback_that_is_not_utf_8_and_is_named_where_it_is_full(capsys, tmp_path):
    log = tmp_path / rank_main.LOGS / "rank-0.err"
    log.parent.mkdir()
    log.touch()
    rank_main.write_record(tmp_path, 0, {"failure": {"traceback": "ValueError: \udcff\n"}})
    rank_main.complete_record(tmp_path, 0, {})
    assert log.read_bytes() == b"ValueError: ?\n"
    log.unlink()
    log.symlink_to("/dev/full")
    rank_main.complete_record(tmp_path, 0, {})
    said = f"[launcher] {log} cannot be written: No space left on device\n"
    assert capsys.readouterr().err == said
