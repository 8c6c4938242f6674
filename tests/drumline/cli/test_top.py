"""`drumline top`: a launch that was started without any option, seen from outside."""

import contextlib
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import tty
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator import hosts_view, rank_view
from drumline.cli import main, top
from launcher import LaunchInfo, linux
from tests.network_hosts import NetworkHosts, NoNetworkNamespaces

ROOT = Path(__file__).parents[3]
LIMIT_S = 60
SCRIPT = """
import pathlib, sys, time, torch
from communicator import Communicator
from coordinator import Coordinator

folder = pathlib.Path(sys.argv[1])
with Coordinator() as coor, Communicator(coor) as comm:
    own = [dict(vars(coor)), dict(vars(comm))]
    (folder / f"ready-{coor.rank}").touch()
    while not comm.allreduce(torch.tensor([float((folder / "hang").exists())])).item():
        coor.barrier()
    if coor.rank == 1:
        while not (folder / "go").exists():
            time.sleep(0.01)
    coor.barrier()
    deadline = time.monotonic() + 60
    while any(name in vars(target) and name not in before
              for target, before in zip((coor, comm), own) for name in ("barrier", "allreduce")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (folder / f"restored-{coor.rank}").touch()
"""


def wait_for(condition, what):
    """what: awaited, or a function that says what is there instead."""
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, what() if callable(what) else what
        time.sleep(0.02)


@pytest.fixture
def launch(warm, tmp_path, monkeypatch):
    monkeypatch.setattr(top, "LOOK_S", 0.3)
    monkeypatch.setattr(top, "TRACE_S", 1.5)
    monkeypatch.setattr(rank_view, "WATCH_S", 2.0)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["-m", "launcher", "run", "-n", "3", tmp_path / "script.py", tmp_path]
    process = warm.start(*command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT)
    wait_for(lambda: len([*tmp_path.glob("ready-*")]) == 3, "the ranks to start")
    yield process
    process.send_signal(signal.SIGTERM)
    process.wait()


def test_a_hang_shows_its_cause_and_looking_leaves_nothing_behind(
    launch, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "stdin", None)  # as it is where it is closed
    assert main(["top", str(launch.pid)]) == 0
    table = capsys.readouterr().out
    assert "allreduce" in table and "/s" in table and "running" in table
    (tmp_path / "hang").touch()
    view = top.LaunchView(top._chosen(str(launch.pid)))

    def shows_the_hang():
        view.update()
        calls = [look.stuck and look.stuck.call for look in view.looks]
        return view.slowest() == {1} and calls == ["barrier", "", "barrier"]

    wait_for(shows_the_hang, lambda: f"ranks {view.slowest()} are slowest: {view.report()}")
    last = view.looks
    assert [top._style(look) for look in last] == ["yellow", "green", "yellow"]
    os.kill(last[1].peer.pid, signal.SIGSTOP)
    wait_for(lambda: view.update() or view.looks[1].state == "suspended", "the stop")
    os.kill(last[1].peer.pid, signal.SIGCONT)
    (tmp_path / "go").touch()
    assert launch.wait(LIMIT_S) == 0
    assert len([*tmp_path.glob("restored-*")]) == 3
    view.update()
    assert {look.state for look in view.looks} == {"ended"}


def test_a_rank_that_makes_no_coordinator_is_named_by_those_that_wait_for_it():
    """A launch that hung there could not be looked at."""
    listener = socket.create_server(("127.0.0.1", 0))
    fd, port = listener.fileno(), listener.getsockname()[1]
    info = LaunchInfo("one-is-missing", 2, 2, 0, 0, "127.0.0.1", port, {"master_fd": f"{fd}"})
    words = [sys.executable, "-c", "import coordinator; coordinator.Coordinator()"]
    environ = {**os.environ, **info.to_env(), "DRUMLINE_SECRET": "5e" * 32}
    with listener, subprocess.Popen(words, cwd=ROOT, env=environ, pass_fds=[fd]) as process:
        try:
            wait_for(lambda: "one-is-missing" in rank_view.launches(), "rank 0 to start")
            view = top.LaunchView(top._chosen("one-is-missing"))
            wait_for(lambda: view.update() or view.looks[0].waits, "rank 0 to wait")
            assert view.cause().startswith("Not seen: rank 1.")
        finally:
            process.kill()


SLEEPER = """
import sys, time
from coordinator import Coordinator
from launcher import LaunchInfo

with Coordinator(LaunchInfo.from_bytes(sys.argv[1].encode())) as coor:
    if coor.rank == 2:
        time.sleep(1000)  # the cause
    coor.barrier()
"""
APART = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]  # as another machine is
NODE = 'for info; do "$0" -c "$SLEEPER" "$info" & done; wait'


@pytest.fixture
def over_hosts(monkeypatch):
    """Rank 0 on one host, ranks 1 and 2 on another, whose processes this one takes for no ranks."""
    monkeypatch.setattr(rank_view, "WATCH_S", 2.0)
    environ = {**os.environ, "DRUMLINE_SECRET": "5e" * 32, "PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(NetworkHosts(2))
        except NoNetworkNamespaces as error:
            pytest.skip(str(error))
        for host, ranks in enumerate([[0], [1, 2]]):
            place = "over-hosts", 3, len(ranks)
            infos = [LaunchInfo(*place, rank, i, hosts.addresses[0], 29731)
                     for i, rank in enumerate(ranks)]  # fmt: skip
            words = ["bash", "-c", NODE, sys.executable, *(i.to_bytes().decode() for i in infos)]
            command = hosts.command(host, APART * (host > 0) + words)
            process = subprocess.Popen(command, env={**environ, "SLEEPER": SLEEPER})
            stack.callback(process.wait)
            stack.callback(hosts.kill_processes)
        wait_for(lambda: "over-hosts" in rank_view.launches(), "rank 0 to start")
        yield hosts


def test_ranks_of_other_hosts_are_seen_through_rank_0_while_somebody_looks(over_hosts):
    view = top.LaunchView(top._chosen("over-hosts"))

    def shows_the_cause():
        time.sleep(0.2)
        view.update()
        stuck = [look.stuck and look.stuck.call for look in view.looks]
        return view.slowest() == {2} and stuck == ["barrier", "barrier", ""]

    wait_for(shows_the_cause, "the rank that sleeps")
    assert len(view.ranks) == 1 and view.is_complete
    assert [look.peer.host for look in view.looks][1:] == 2 * [over_hosts.names[1]]
    assert view.looks[2].stuck.where == "<string>:8"
    pid = view.ranks[0].peer.pid
    wait_for(lambda: linux.open_memory(pid, hosts_view.NAME) is None, "rank 0 to forget the viewer")


def test_keys_show_stacks_write_a_dump_and_a_trace(launch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"TERM": "xterm", "COLUMNS": "140", "LINES": "60"}.items():
        monkeypatch.setenv(name, value)
    terminal, end = os.openpty()
    with os.fdopen(end, "r+b", buffering=0) as device:
        monkeypatch.setattr(sys, "stdin", os.fdopen(os.dup(end), "r"))
        monkeypatch.setattr(sys, "stdout", os.fdopen(os.dup(end), "w"))
        thread = threading.Thread(target=top.top, args=[str(launch.pid)])
        thread.start()
        shown = b""

        def read_until(text):
            nonlocal shown
            while text not in shown:
                assert select.select([terminal], [], [], LIMIT_S)[0], shown
                shown = shown[-100_000:] + os.read(terminal, 4096)

        for key, text in ((b"s", b"File"), (b"d", b".txt"), (b"t", b".json")):
            read_until(b"quit")
            os.write(terminal, key)
            read_until(text)
        os.write(terminal, b"q")
        read_until(b"\x1b[?1049l")  # leaves the terminal's other screen
        thread.join(LIMIT_S)
        assert not thread.is_alive() and device
    (dump,) = tmp_path.glob("drumline-*.txt")
    assert "rank 2" in dump.read_text() and "script.py" in dump.read_text()
    (trace,) = tmp_path.glob("drumline-*.json")
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"allreduce", "barrier"} <= names


def test_keys_that_are_typed_at_once_are_all_taken(monkeypatch):
    """The second one waited for the next."""
    terminal, end = os.openpty()
    tty.setcbreak(end)
    os.write(terminal, b"dq")
    looks, written = [], []
    view = SimpleNamespace(
        is_over=False, update=lambda: looks.append(1), table=lambda: "", cause=lambda: ""
    )
    monkeypatch.setitem(top.WRITERS, "d", lambda view: written.append(view) or "")
    monkeypatch.setattr(sys, "stdin", os.fdopen(end, "r"))
    monkeypatch.setattr(top, "KEYS", "")
    screen = SimpleNamespace(update=lambda *_, **__: len(looks) < 3 or setattr(view, "is_over", 1))
    top._run(view, screen)
    os.close(terminal)
    assert (looks, written) == ([1], [view])


def test_memory_of_dumps_that_were_read_is_given_back():
    page = mmap.PAGESIZE
    fd = os.memfd_create("dumps")
    os.write(fd, b"x" * 10 * page)
    linux.free_pages(fd, page - 1, 9 * page + 1)
    assert os.fstat(fd).st_blocks * 512 == 2 * page and os.fstat(fd).st_size == 10 * page
    assert os.pread(fd, 1, page - 1) == os.pread(fd, 1, 9 * page) == b"x"
    linux.free_pages(fd, 0, page - 1)
    assert os.pread(fd, 1, 0) == b"x"
    os.close(fd)


@pytest.mark.parametrize("name", ["nothing", "²", "9" * 5000])
def test_what_is_no_launch_is_named(capsys, name):
    assert main(["top", name]) == 1
    assert "aunch" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_and_the_view_goes_on():
    def write(view):
        Path("/dev/null/dump").write_text(view)

    assert "nothing was written" in top._written(write, "")
