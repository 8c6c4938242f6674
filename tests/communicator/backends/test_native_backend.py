"""The C++ part of the torch backend: what happens where it cannot be compiled."""

import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest

from communicator.torch_interop import native_backend


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    native_backend.load.cache_clear()
    yield tmp_path
    native_backend.load.cache_clear()


def test_cpp_part_is_compiled_and_loaded_here():
    native_backend.load.cache_clear()
    assert hasattr(native_backend.load(), "DrumlineBackend")


def test_calls_that_are_submitted_to_a_closed_queue_run():
    """The second one waited for a thread that had ended."""
    queue = native_backend.load().CallQueue(0)
    for _ in range(2):
        queue.close()
        for _ in range(3):
            assert queue.submit(lambda: None, []).wait(timedelta(seconds=20))
            time.sleep(0.01)


def test_without_a_compiler_a_warning_says_what_to_install(home, monkeypatch):
    monkeypatch.setattr(native_backend.shutil, "which", lambda _: None)
    with pytest.warns(RuntimeWarning, match=r"no C\+\+ compiler is found. Install one"):
        assert native_backend.load() is None


def test_compiler_that_fails_is_quoted(home, monkeypatch):
    def fail(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "a.h:1: error: no such thing\n")

    monkeypatch.setattr(native_backend.subprocess, "run", fail)
    with pytest.warns(RuntimeWarning, match="refused it: a.h:1: error: no such thing"):
        assert native_backend.load() is None


def test_folder_that_others_may_write_is_not_used(home):
    (home / ".cache/drumline/torch").mkdir(parents=True)
    (home / ".cache/drumline/torch").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="chmod 700"):
        assert native_backend.load() is None


def test_group_without_the_cpp_part_still_works(home, monkeypatch, tmp_path):
    monkeypatch.setattr(native_backend.shutil, "which", lambda _: None)
    import torch
    import torch.distributed as dist

    import communicator.torch_interop.process_group  # noqa: F401

    store = dist.FileStore(str(tmp_path / "store"), 1)
    with pytest.warns(RuntimeWarning):
        dist.init_process_group("drumline", store=store, rank=0, world_size=1)
    try:
        work = dist.all_reduce(total := torch.ones(3), async_op=True)
        assert work.wait() and total.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()
