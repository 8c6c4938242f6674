"""The kernel's kills for want of memory: counted by cgroup, and told with the counter."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from launcher.system.oom_kills import CGROUPS, OomKills

UNITED = {"memory.events": "low 0\noom 1\noom_kill {}\n", "memory.max": "536870912\n"}
SPLIT = {"memory.oom_control": "under_oom 0\noom_kill {}\n", "memory.limit_in_bytes": str(1 << 62)}


def write(folder, files, count):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text.format(count))


@pytest.mark.parametrize(
    ("own", "place", "files", "limit"),
    [
        ("0::/pod/rank\n", "pod/rank", UNITED, "memory.max is 512 MiB"),
        ("0::/elsewhere\n", "", UNITED, "memory.max is 512 MiB"),
        ("4:memory:/pod\n0::/\n", "memory/pod", SPLIT, "memory.limit_in_bytes is not a limit"),
    ],
)
def test_kill_in_the_cgroup_is_told_with_its_counter_and_limit(tmp_path, own, place, files, limit):
    write(tmp_path / place, files, 3)
    kills = OomKills(tmp_path, own)
    assert kills.note(1) == ""
    write(tmp_path / place, files, 4)
    counter = tmp_path / place / next(iter(files))
    assert f"(OOM): {counter} counts 1 more oom_kill, and {limit}." in kills.note(1)


@pytest.fixture
def small_group():
    """The path of a cgroup of 400 MiB, which this process may make."""
    is_united = (CGROUPS / "cgroup.controllers").exists()
    folder = (CGROUPS if is_united else CGROUPS / "memory") / f"drumline-test-{os.getpid()}"
    name = "memory.max" if is_united else "memory.limit_in_bytes"
    try:
        folder.mkdir()
        (folder / name).write_text(str(400 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"makes a cgroup with a limit: runs as root of the machine ({error})")
    yield folder
    folder.rmdir()


@pytest.mark.parametrize("launcher", ["multiprocessing", "mpi"])
def test_rank_that_the_kernel_kills_for_want_of_memory_is_named_with_the_evidence(
    command, small_group, launcher
):
    """It was `killed by SIGKILL`, and of the whole machine that the kernel had killed something."""
    if launcher == "mpi" and shutil.which("mpiexec") is None:
        pytest.skip("no mpiexec: runs after `pip install mpich`")
    script = command.script(
        "import time, launcher\n"
        "if launcher.current().rank == 1: held = b'x' * (1 << 30)\n"
        "time.sleep(60)"
    )
    enter = f'echo $$ > {small_group}/cgroup.procs && exec "$@"'
    around = ["sh", "-c", enter, "sh"]
    ended = command.run("run", "--launcher", launcher, "-n", "2", script, around=around, timeout=60)
    _, *report = ended.err[ended.err.index("╭") :].splitlines()
    assert ended.code == 137 and "rank 1 (local rank 1, pid " in report[0]
    assert "was killed by SIGKILL" in report[0], ended.err
    assert "for want of memory (OOM): /sys/fs/cgroup" in report[1] and "400 MiB" in report[1]
    assert Path(small_group, "cgroup.procs").read_text() == ""
