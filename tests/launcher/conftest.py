"""The command line as a process, or called in this one; and the processes that are left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher import cli
from launcher.system import linux

ROOT = Path(__file__).parents[2]


@dataclass
class CommandResult:
    code: int
    out: str
    err: str

    def lines(self, rank: int) -> list[str]:
        """The lines of a rank on standard output."""
        label = f"[{rank}] "
        return [line[len(label) :] for line in self.out.splitlines() if line.startswith(label)]


class CommandLine:
    """Start `python -m launcher`; every process below it has a mark in its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"LEAK_MARK={uuid.uuid4().hex}"

    def script(self, text: str) -> str:
        path = self.folder / f"script-{uuid.uuid4().hex[:6]}.py"
        path.write_text(text)
        return str(path)

    def start(self, *arguments: str, **options) -> subprocess.Popen:
        name, _, value = self.mark.partition("=")
        environ = {**os.environ, name: value, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
        usual = {"cwd": self.folder, "preexec_fn": _reset_signals}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        around = options.pop("around", [])
        command = [*around, sys.executable, "-m", "launcher", *arguments]
        return subprocess.Popen(
            command, env=environ, text=True, errors="replace", **(usual | pipes | options)
        )

    def run(
        self, *arguments: str, timeout: float = 60, stdin: str = "", **options
    ) -> CommandResult:
        process = self.start(*arguments, stdin=subprocess.PIPE, **options)
        out, err = process.communicate(stdin, timeout=timeout)
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return CommandResult(code, out or "", err or "")

    def left(self, patience_s: float = 0.0) -> list[str]:
        """Processes of this command line that still run, at the latest after patience_s."""
        deadline = time.monotonic() + patience_s
        while (processes := self._marked()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return processes

    def _marked(self) -> list[str]:
        processes = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = self.mark.encode() in (folder / "environ").read_bytes()
                stat = linux.process_stat(int(folder.name))
            except OSError:
                continue
            if marked and stat and stat.state != "Z":
                processes.append(f"{folder.name} {linux.process_name(int(folder.name))}")
        return processes


def _reset_signals() -> None:
    """Tests that run in the background inherit an ignored SIGINT."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def command(tmp_path: Path):
    """A CommandLine; the test fails if a process of it is left."""
    line = CommandLine(tmp_path)
    yield line
    left = line.left()
    for process in left:
        os.kill(int(process.split()[0]), signal.SIGKILL)
    assert not left, f"leaked processes: {left}"


@pytest.fixture
def usage_error(capsys) -> Callable[..., str]:
    """Call the command line in this process; the text of the usage error with which it ends."""

    def call(*arguments: str) -> str:
        assert cli.main(arguments) == cli.USAGE_CODE
        out, err = capsys.readouterr()
        assert out == ""
        return err

    return call
