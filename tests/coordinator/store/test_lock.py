"""Locks of a node: without support of the filesystem, and the folder that they live in."""

import os
from concurrent.futures import ThreadPoolExecutor

import filelock
import pytest

from coordinator import Coordinator, CoordinatorError, CoordinatorTimeout
from coordinator.call_site import begin_call
from coordinator.store import lock as locks
from launcher import LaunchInfo


def test_a_filesystem_without_locks_still_locks(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("no flock here")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    path = tmp_path / "a.lock"
    with (
        locks.hold(path, "a", "rank 0", begin_call("lock", 1, 1)),
        pytest.raises(CoordinatorTimeout, match="held by rank 0 since"),
        locks.hold(path, "a", "rank 1", begin_call("lock", 1, 0.1)),
    ):
        pass
    with locks.hold(path, "a", "rank 1", begin_call("lock", 2, 0.1)):
        pass


@pytest.mark.parametrize("code", locks.WITHOUT_LOCKS)
def test_a_kernel_that_refuses_locks_is_a_filesystem_without_them(tmp_path, monkeypatch, code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with locks.hold(tmp_path / "a.lock", "a", "rank 0", begin_call("lock", 1, 1)):
        assert (tmp_path / "a.soft").exists()


def test_a_folder_for_locks_that_is_gone_is_an_error(tmp_path, monkeypatch):
    """It once was tried again for ever."""
    monkeypatch.setattr(locks.tempfile, "gettempdir", lambda: str(tmp_path / "gone"))
    with Coordinator(LaunchInfo("alone")) as coor, pytest.raises(OSError, match="TMPDIR"):
        coor.lock("a")


def test_a_lock_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(locks.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"drumline-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="TMPDIR"):
        locks.folder_of("launch")


def test_the_last_to_leave_removes_the_locks_and_nobody_before(tmp_path, monkeypatch):
    monkeypatch.setattr(locks.tempfile, "gettempdir", lambda: str(tmp_path))
    first, second = locks.Locks("launch"), locks.Locks("launch")
    path = first.path("a")
    assert second.path("a") == path and second.path("b") != path
    path.touch()  # as who was killed while it held it would leave it
    first.close()
    assert path.exists()
    second.close()
    assert list(tmp_path.iterdir()) == []
    first.path("a")
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_who_comes_as_the_locks_are_removed_gets_new_ones(tmp_path, monkeypatch):
    """Eight threads enter and leave over and over: a folder is never gone from under its users."""
    monkeypatch.setattr(locks.tempfile, "gettempdir", lambda: str(tmp_path))

    def come_and_go():
        for _ in range(40):
            mine = locks.Locks("launch")
            path = mine.path("a")
            path.touch()
            assert path.exists()
            mine.close()

    with ThreadPoolExecutor(8) as pool:
        for each in [pool.submit(come_and_go) for _ in range(8)]:
            each.result()
    assert list(tmp_path.iterdir()) == []


def test_a_closed_coordinator_locks_nothing():
    coor = Coordinator(LaunchInfo("alone"))
    coor.close()
    with pytest.raises(CoordinatorError, match=r"lock .* on a closed Coordinator"):
        coor.lock("x")
