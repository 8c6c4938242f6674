"""Ranks for tests: threads of this process, each with a LaunchInfo of its own; and two hosts."""

import contextlib
import functools
import gc
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher import LaunchInfo
from tests.network_hosts import NetworkHosts, NoNetworkNamespaces
from tests.programs.warm import WARM, WarmParent, WarmProcess

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
        try:
            done = subprocess.run(
                [*around, "bash", "-c", found],
                env={**environ, "PATH": path, "PYTHONPATH": str(ROOT)},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=60,
            )
        except subprocess.TimeoutExpired as late:  # what it printed says who waits for whom
            printed = (late.stdout or b"") + (late.stderr or b"")
            raise AssertionError(f"no end after 60 s: {printed.decode()}") from None
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return line


@pytest.fixture(scope="session")
def warm(pytestconfig: pytest.Config) -> Iterator[WarmParent]:
    """Starts processes that have torch and transformers imported already."""
    found = pytestconfig.pluginmanager.get_plugin(WARM)
    parent = found or WarmParent()
    yield parent
    if not found:
        parent.close()


@pytest.fixture(scope="session")
def commands(warm: WarmParent, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With these variables python, drumline and torchrun have torch imported already."""
    return warm.commands(tmp_path_factory.mktemp("commands"))


COMMAND_ON_HOST = """
import sys
from drumline.cli import main
from tests.network_hosts import enter
enter(sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""


class Hosts(NetworkHosts):
    """Two hosts that reach each other by name; to itself, each is a name of its loopback."""

    def __init__(self):
        super().__init__(2, network="10.77.0")
        for index, (name, other) in enumerate([self.names, reversed(self.names)]):
            self.write_table(index, f"127.0.1.1 {name}\n{self.addresses[1 - index]} {other}")

    def start(self, index, command, **environ):
        return subprocess.Popen(
            self.command(index, command),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        )

    def warm(self, parent: WarmParent, index: int, line: str, **environ: str) -> WarmProcess:
        """`drumline ...` as a page has it, by a process that has imported torch already."""
        line = line.replace("10.0.0.1", self.addresses[0])
        words = shlex.split(line, comments=True)[1:]
        env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
        return parent.start("-c", COMMAND_ON_HOST, self.names[index], *words, env=env, cwd=ROOT)

    def typed(self, page, commands, start="torchrun --nnodes 2", **words):
        """What the lines for two machines on a page print, each typed on its own host.

        commands: the fixture. words: what stands on the page for something of the reader's, and
        what it is here.
        """
        lines = re.findall(f"^{start} .*", page.read_text(), re.MULTILINE)
        environ = {**commands, "DRUMLINE_TOKEN": secrets.token_hex(32)}
        agents = []
        for index, line in enumerate(lines):
            for word, here in words.items():
                line = line.replace(word, str(here))
            line = line.replace("10.0.0.1", "10.77.0.1")
            agents.append(self.start(index, ["bash", "-c", line], **environ))
        told = [agent.communicate(timeout=100)[0] for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0]
        return told

    def run(self, command, **environ):
        """What a command on the first host prints."""
        process = self.start(0, command, **environ)
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        return out


@pytest.fixture(scope="module")
def hosts():
    """Two hosts, made of network namespaces on this machine: 10.77.0.1 and 10.77.0.2."""
    try:
        network = Hosts()
    except NoNetworkNamespaces as error:
        pytest.skip(str(error))
    with network:
        yield network


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT reaches this process and its children, also if a shell started the tests with `&`, and
    so ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A cgroup with a limit of 256 MiB, where this process may make one."""
    for root, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup", root, f"drumline-{os.getpid()}")
        with contextlib.suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(256 << 20))
                yield group
                return
            finally:
                group.rmdir()
    pytest.skip("no memory cgroup can be made here, as in most containers: run as root")


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """What is left of a file is not looked through again at each collection of garbage: late in a
    run, which has imported hundreds of models, that was most of the time of many tests."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


FORKING = ("launcher", "coordinator")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """First those that fork here and there: a process with threads (torch's, say) must not."""
    if "soak" not in config.getoption("markexpr"):
        soak = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item not in soak]
    items.sort(key=lambda item: item.path.parent.name not in FORKING)
