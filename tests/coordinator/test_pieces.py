"""Descriptors that are not what they should be, locks where the kernel has none, peers and ends."""

import os
import resource
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import filelock
import pytest

from coordinator import Coordinator, CoordinatorError, CoordinatorTimeout
from coordinator.call_site import traceback_of, waiting
from coordinator.control.process_monitor import Process
from coordinator.peers import Peer, start_ticks
from coordinator.store import lock as locks
from launcher import LaunchInfo


def info(**extras):
    return LaunchInfo("pieces", 2, 2, 0, 0, "127.0.0.1", 1, extras)


def test_a_descriptor_that_holds_no_secret_is_an_error():
    with open(os.devnull) as file, pytest.raises(CoordinatorError, match="launch secret"):
        Coordinator(info(secret_fd=str(file.fileno())))
    with pytest.raises(CoordinatorError, match="descriptor 999999"):
        Coordinator(info(secret_fd="999999"))


def test_a_descriptor_that_does_not_listen_is_an_error():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(CoordinatorError, match="adopt descriptor"):
            Coordinator(info(master_fd=str(bound.fileno())))


def test_a_descriptor_that_listens_everywhere_is_an_error():
    with (
        socket.create_server(("0.0.0.0", 0)) as anywhere,
        pytest.raises(CoordinatorError, match="every interface"),
    ):
        Coordinator(info(master_fd=str(anywhere.fileno())))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("address", ["0.0.0.0", "::", "0"])
def test_every_interface_is_no_address_of_rank_0(rank, address):
    launch = LaunchInfo("pieces", 2, 2, rank, rank, address, 4711)
    with pytest.raises(CoordinatorError, match=rf"rank {rank}: .* is every interface"):
        Coordinator(launch, timeout_s=1)


def test_an_address_of_one_link_joins_no_nodes():
    """Rank 0 once failed at its door with a bare OSError, and the others waited for it."""
    launch = LaunchInfo("pieces", 2, 1, 0, 0, "fe80::1%lo", 4711)
    with pytest.raises(CoordinatorError, match=r"rank 0: .* one link alone"):
        Coordinator(launch, timeout_s=1)


def test_an_address_of_another_host_cannot_be_listened_on():
    launch = LaunchInfo("pieces", 2, 2, 0, 0, "192.0.2.1", 4711)
    with pytest.raises(CoordinatorError, match=r"rank 0 .* cannot listen at 192.0.2.1:4711"):
        Coordinator(launch)


def test_a_filesystem_without_locks_still_locks(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("no flock here")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    path = tmp_path / "a.lock"
    with (
        locks.hold(path, "a", "rank 0", waiting("lock", 1, 1)),
        pytest.raises(CoordinatorTimeout, match="held by rank 0 since"),
        locks.hold(path, "a", "rank 1", waiting("lock", 1, 0.1)),
    ):
        pass
    with locks.hold(path, "a", "rank 1", waiting("lock", 2, 0.1)):
        pass


@pytest.mark.parametrize("code", locks.WITHOUT_LOCKS)
def test_a_kernel_that_refuses_locks_is_a_filesystem_without_them(tmp_path, monkeypatch, code):
    def refuse(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with locks.hold(tmp_path / "a.lock", "a", "rank 0", waiting("lock", 1, 1)):
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


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize(
    "end, said",
    [(lambda: os._exit(3), "code 3"), (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL")],
)
def test_how_a_process_ended_is_known(end, said, reaped):
    """From /proc while nobody has waited for it; afterwards from its pidfd, if the kernel tells."""
    pid = os.fork()
    if pid == 0:
        time.sleep(0.2)
        end()
    launch = LaunchInfo("pieces")
    own = Peer.me(launch)
    process = Process(replace(own, rank=1, pid=pid, start_ticks=start_ticks(pid)))
    assert not process.is_dead() and process.state() in ("sleeping", "running")
    if reaped:
        os.waitpid(pid, 0)
    assert process.dies_within(5)
    assert said in process.state() or (reaped and process.state() == "exited")
    process.close()
    if not reaped:
        os.waitpid(pid, 0)


def test_a_process_that_we_do_not_see_is_never_seen_dead():
    """Another container has numbers of its own: ours may be no process here, or a wrong one."""
    own = Peer.me(LaunchInfo("pieces"))
    there = replace(own, rank=1, memory=f"{own.boot_id}/pid:[1]/user:[1]/0", start_ticks=1)
    process = Process(there)
    assert not process.is_dead() and process.state() == ""
    process.close()


def test_a_number_that_another_process_has_by_now_is_a_death():
    own = Peer.me(LaunchInfo("pieces"))
    process = Process(replace(own, rank=1, start_ticks=own.start_ticks - 1))
    assert process.is_dead()


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


def test_a_traceback_for_others_shows_the_users_frames_alone():
    def body():
        with Coordinator(LaunchInfo("alone")) as coor, coor.master_first():
            coor.once("x", lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError) as caught:
        body()
    text = traceback_of(caught.value)
    assert "in body" in text and "1 / 0" in text and "ZeroDivisionError" in text
    assert "turns.py" not in text and "coordinator.py" not in text.replace("test_coordinator", "")


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf"), "1"])
def test_what_is_no_deadline_is_refused_everywhere(timeout_s):
    with pytest.raises(ValueError, match="no deadline"):
        Coordinator(LaunchInfo("alone"), timeout_s=timeout_s)
    with Coordinator(LaunchInfo("alone")) as coor:
        for use in (
            lambda: coor.barrier(timeout_s=timeout_s),
            lambda: coor.wait("x", timeout_s=timeout_s),
            lambda: coor.lock("x", timeout_s=timeout_s),
            lambda: coor.put("x", b"", timeout_s=timeout_s),
            lambda: coor.get("x", timeout_s=timeout_s),
            lambda: coor.split([0], timeout_s=timeout_s),
            lambda: coor.once("x", lambda: b"", timeout_s=timeout_s),
            lambda: coor.local_barrier(timeout_s=timeout_s),
            lambda: coor.close(timeout_s=timeout_s),
        ):
            with pytest.raises(ValueError, match="no deadline"):
                use()


def test_a_closed_coordinator_locks_nothing():
    coor = Coordinator(LaunchInfo("alone"))
    coor.close()
    with pytest.raises(CoordinatorError, match=r"lock .* on a closed Coordinator"):
        coor.lock("x")


def test_rank_0_says_at_once_if_it_may_not_open_enough_files():
    """One descriptor for each rank, and some for whoever knocks."""
    many = LaunchInfo("pieces", 4096, 4096, 0, 0, "127.0.0.1", 1, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            pytest.raises(CoordinatorError, match=r"1024 files.*4096 ranks.*ulimit -n"),
        ):
            port = listener.getsockname()[1]
            extras = {"master_fd": str(listener.fileno())}
            Coordinator(replace(many, master_port=port, extras=extras))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
