"""The command line as a process, and a look at what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass
class Ended:
    code: int
    out: str
    err: str
    seconds: float

    def lines(self, rank: int) -> list[str]:
        """What that rank printed on standard output."""
        mark = f"[{rank}] "
        return [line[len(mark) :] for line in self.out.splitlines() if line.startswith(mark)]


class CommandLine:
    """Starts `python -m launcher`; every process below it has a mark in its environment."""

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
        usual = {"cwd": self.folder, "preexec_fn": _hear_signals}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", "launcher", *arguments]
        return subprocess.Popen(
            command, env=environ, text=True, errors="replace", **(usual | pipes | options)
        )

    def run(self, *arguments: str, timeout: float = 30, stdin: str = "", **options) -> Ended:
        began = time.monotonic()
        process = self.start(*arguments, stdin=subprocess.PIPE, **options)
        out, err = process.communicate(stdin, timeout=timeout)
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return Ended(code, out or "", err or "", time.monotonic() - began)

    def left(self, patience_s: float = 0.0) -> list[str]:
        """Processes of this command line that still live, after waiting so long for there to be
        none.
        """
        deadline = time.monotonic() + patience_s
        while (found := self._marked()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _marked(self) -> list[str]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = self.mark.encode() in (folder / "environ").read_bytes()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if marked and state != "Z":
                found.append(f"{folder.name} {(folder / 'comm').read_text().strip()}")
        return found


def _hear_signals() -> None:
    """Whoever runs the tests in the background has SIGINT ignored, and we would inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def command(tmp_path: Path):
    """A CommandLine; the test fails if a process of it is left."""
    line = CommandLine(tmp_path)
    yield line
    left = line.left()
    for entry in left:
        os.kill(int(entry.split()[0]), signal.SIGKILL)
    assert not left, f"processes left behind: {left}"
