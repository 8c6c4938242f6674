"""Processes of this host: how they ended, and those that cannot be seen."""

import os
import signal
import time
from dataclasses import replace

import pytest

from coordinator.control.process_monitor import PeerProcess
from coordinator.peers import Peer, start_ticks
from launcher import LaunchInfo


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize(
    "end, text",
    [(lambda: os._exit(3), "code 3"), (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL")],
)
def test_how_a_process_ended_is_known(end, text, reaped):
    """From /proc while nobody has waited for it; afterwards from its pidfd, if the kernel tells."""
    pid = os.fork()
    if pid == 0:
        time.sleep(0.2)
        end()
    launch = LaunchInfo("pieces")
    own = Peer.me(launch)
    process = PeerProcess(replace(own, rank=1, pid=pid, start_ticks=start_ticks(pid)))
    assert not process.is_dead() and process.state() in ("sleeping", "running")
    if reaped:
        os.waitpid(pid, 0)
    assert process.dies_within(5)
    assert text in process.state() or (reaped and process.state() == "exited")
    process.close()
    if not reaped:
        os.waitpid(pid, 0)


def test_a_child_forked_while_it_is_closed_keeps_another_file_of_its_number(monkeypatch):
    process, close, statuses = PeerProcess(Peer.me(LaunchInfo("closed"))), os.close, []
    number = process.fileno()

    def close_as_others_fork(fd):
        monkeypatch.setattr(os, "close", close)
        close(fd)
        another = os.open(os.devnull, os.O_RDONLY)
        assert another == fd == number
        child = os.fork()
        if child == 0:
            os._exit(not os.path.exists(f"/proc/self/fd/{number}"))
        statuses.append(os.waitpid(child, 0)[1])
        close(another)

    monkeypatch.setattr(os, "close", close_as_others_fork)
    process.close()
    assert statuses == [0]


def test_a_process_that_we_do_not_see_is_never_seen_dead():
    """Another container has numbers of its own: ours may be no process here, or a wrong one."""
    own = Peer.me(LaunchInfo("pieces"))
    there = replace(own, rank=1, memory=f"{own.boot_id}/pid:[1]/user:[1]/0", start_ticks=1)
    process = PeerProcess(there)
    assert not process.is_dead() and process.state() == ""
    process.close()


def test_a_number_that_another_process_has_by_now_is_a_death():
    own = Peer.me(LaunchInfo("pieces"))
    process = PeerProcess(replace(own, rank=1, start_ticks=own.start_ticks - 1))
    assert process.is_dead()
