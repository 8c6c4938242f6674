"""Descriptors that are not what they should be, locks where the kernel has none, peers and ends."""

import os
import signal
import socket
import time
from dataclasses import replace

import filelock
import pytest

from coordinator import Coordinator, CoordinatorError, CoordinatorTimeout
from coordinator import lock as locks
from coordinator.peers import Peer, start_ticks
from coordinator.vitals import Process
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
        locks.hold(path, "a", "rank 0", 1),
        pytest.raises(CoordinatorTimeout, match="held by rank 0 since"),
        locks.hold(path, "a", "rank 1", 0.1),
    ):
        pass
    with locks.hold(path, "a", "rank 1", 0.1):
        pass


def test_a_lock_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(locks.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"drumline-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="TMPDIR"):
        locks.lock_path("launch", "name")


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
