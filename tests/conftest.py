"""Ranks for tests: threads of this process, each with a LaunchInfo of its own; and two hosts."""

import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher import LaunchInfo
from tests.programs.warm import WARM, WarmParent

ROOT = Path(__file__).parents[1]
# As an activated environment does: programs that pip has installed, mpiexec among them, are found.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def run_threads(fn: Callable[..., Any], nprocs: int, nodes: list[int] | None = None) -> list[Any]:
    """fn(info) on each rank; results or exceptions, by rank. nodes: the ranks on each."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    sizes = nodes or [nprocs]
    places = [(local, size) for size in sizes for local in range(size)]
    launch_id = uuid.uuid4().hex
    found: list[Any] = [None] * nprocs

    def run(rank: int) -> None:
        extras = {"master_fd": str(listener.fileno())} if rank == 0 else {}
        local, size = places[rank]
        port = listener.getsockname()[1]
        info = LaunchInfo(launch_id, nprocs, size, rank, local, "127.0.0.1", port, extras)
        try:
            found[rank] = fn(info)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(nprocs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    listener.close()
    return found


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """Call ranks(fn, n): fn(info) on n threads; raises the first exception any of them raised."""

    def run(fn: Callable[..., Any], nprocs: int, nodes: list[int] | None = None) -> list[Any]:
        found = run_threads(fn, nprocs, nodes)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found

    return run


@pytest.fixture
def ranks_or_errors() -> Callable[..., list[Any]]:
    """Like ranks, but an exception is a result like any other."""
    return run_threads


@pytest.fixture
def documented(tmp_path) -> Callable[[str, str], Callable[..., str]]:
    """documented(page, start): types the one line of a page of the documents that begins so, in a
    folder with the page's files; words and environ are what differs here."""

    def line(page: str, start: str) -> Callable[..., str]:
        text = (ROOT / "docs" / page).read_text()
        for name, content in re.findall(r'```python title="(.*?)"\n(.*?)```', text, re.DOTALL):
            (tmp_path / name).write_text(content)
        (found,) = re.findall(f"^{start} .*", text, re.MULTILINE)
        return functools.partial(typed, found)

    def typed(found: str, around: tuple[str, ...] = (), words=(), environ=os.environ) -> str:
        for word, here in words:
            assert word in found
            found = found.replace(word, here)
        path = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
        done = subprocess.run(
            [*around, "bash", "-c", found],
            env={**environ, "PATH": path, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return line


# What an MPI calls instead of ssh: options, a host, a command.
REMOTE_SHELL = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
case $1 in {b}|10.77.0.2) host={b};; *) host={a};; esac
shift
exec {ip} netns exec $host unshare --uts sh -c "hostname $host; $*"
"""


@pytest.fixture(scope="session")
def warm(pytestconfig: pytest.Config) -> Iterator[WarmParent]:
    """Starts processes that have torch and transformers imported already."""
    found = pytestconfig.pluginmanager.get_plugin(WARM)
    parent = found or WarmParent()
    yield parent
    if not found:
        parent.close()


@dataclass
class Hosts:
    """Two hosts that reach each other by name; to itself, each is a name of its loopback."""

    names: tuple[str, str]
    remote_shell: Path

    def command(self, index, command):
        name = self.names[index]
        inside = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c"]
        return [*inside, f'hostname {name}; exec "$@"', "sh", *command]

    def start(self, index, command, **environ):
        return subprocess.Popen(
            self.command(index, command),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        )

    def typed(self, page, start="torchrun --nnodes 2", **words):
        """What the lines for two machines on a page print, each typed on its own host.

        words: what stands on the page for something of the reader's, and what it is here.
        """
        lines = re.findall(f"^{start} .*", page.read_text(), re.MULTILINE)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        agents = []
        for index, line in enumerate(lines):
            for word, here in words.items():
                line = line.replace(word, str(here))
            line = line.replace("10.0.0.1", "10.77.0.1")
            agents.append(self.start(index, ["bash", "-c", line], PATH=path))
        told = [agent.communicate(timeout=100)[0] for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0]
        return told

    def set_link(self, state):
        """Cut the link between the two ("down"), or mend it ("up")."""
        ip("-n", self.names[0], "link", "set", f"{self.names[0]}0", state)

    def run(self, command, **environ):
        """What a command on the first host prints."""
        process = self.start(0, command, **environ)
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        return out


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, timeout=10, capture_output=True)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Two hosts, made of network namespaces on this machine: 10.77.0.1 and 10.77.0.2."""
    a, b = (f"dl{os.getpid()}{letter}" for letter in "ab")
    tables = {a: f"127.0.1.1 {a}\n10.77.0.2 {b}\n", b: f"127.0.1.1 {b}\n10.77.0.1 {a}\n"}
    made = []
    try:
        for name, table in tables.items():
            try:
                ip("netns", "add", name)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no network namespaces ({error}): runs as root on Linux with iproute2")
            made.append(name)
            folder = Path("/etc/netns", name)  # ip-netns(8): `ip netns exec` mounts it over /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
        ip("link", "add", f"{a}0", "netns", a, "type", "veth", "peer", "name", f"{b}0", "netns", b)
        for name, address in ((a, "10.77.0.1/24"), (b, "10.77.0.2/24")):
            ip("-n", name, "addr", "add", address, "dev", f"{name}0")
            for device in ("lo", f"{name}0"):
                ip("-n", name, "link", "set", device, "up")
        remote_shell = tmp_path_factory.mktemp("hosts") / "remote_shell"
        remote_shell.write_text(REMOTE_SHELL.format(a=a, b=b, ip=shutil.which("ip")))
        remote_shell.chmod(0o755)
        yield Hosts((a, b), remote_shell)
    finally:
        for name in made:
            ip("netns", "del", name)
            shutil.rmtree(f"/etc/netns/{name}")


@pytest.fixture
def no_memory_left() -> Iterator[None]:
    """The test fails if it leaves shared memory; that of tests beside it goes by itself."""
    before = _segments()
    yield
    deadline = time.monotonic() + 10
    left = _segments() - before
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left &= _segments()
    assert not left


def _segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "drumline" in name}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--skipped-into",
        type=Path,
        help="append what is skipped to this file: pytest @FILE runs it",
    )


class SkippedTests:
    """Notes the tests that were skipped, to be run where more is installed."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            with self._file.open("a") as file:  # of several processes: a short line is one write
                file.write(f"{report.nodeid}\n")

    pytest_runtest_logreport = pytest_collectreport = _note


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--skipped-into"):
        config.pluginmanager.register(SkippedTests(file))


FORKING = ("launcher", "coordinator")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """First those that fork here and there: a process with threads (torch's, say) must not."""
    if "soak" not in config.getoption("markexpr"):
        soak = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item not in soak]
    items.sort(key=lambda item: item.path.parent.name not in FORKING)
