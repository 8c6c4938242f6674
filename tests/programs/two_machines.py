"""Record the program of the README's first screen on two machines: network namespaces of this one.

    python -m tests.programs.two_machines MODEL

As root, with iproute2. Each machine has a terminal, into which is typed what a person would type;
only the first has the weights. Writes docs/two-machines.cast, for `asciinema play`, and its lines
into the README.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.network_hosts import NetworkHosts

ROOT = Path(__file__).parents[2]
CAST = ROOT / "docs" / "two-machines.cast"
BLOCK = re.compile(r"(?<=`make recording` -->\n).*(?=<!-- recording ends)", re.DOTALL)
TOKEN, JOIN = r"(?:[0-9A-Z]{4}-){6}[0-9A-Z]{4}", r"drumline join [\d.]+"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
MACHINES = ("first ", "second")
LIMIT_S = 300


class Recording:
    """The lines of both terminals, in the order in which they ended, with the seconds."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.lines: list[tuple[float, str]] = []
        self.shown = ["", ""]
        self._lock = threading.Lock()

    def add(self, machine: int, text: str) -> None:
        with self._lock:
            unended = self.shown[machine].rpartition("\n")[2]
            self.shown[machine] += text
            for line in (unended + text).split("\n")[:-1]:
                if plain := ESCAPES.sub("", line).rstrip():
                    seconds = time.monotonic() - self.start
                    self.lines.append((seconds, f"{MACHINES[machine]} {plain}"))

    def await_text(self, machine: int, pattern: str) -> str:
        while time.monotonic() < self.start + LIMIT_S:
            if match := re.search(pattern, self.shown[machine]):
                return match[0]
            time.sleep(0.02)
        raise TimeoutError(f"no {pattern} in:\n{self.shown[machine]}")


class Terminal:
    """A line that is typed on a machine, and what comes back."""

    def __init__(self, recording: Recording, hosts: NetworkHosts, machine: int, line: str) -> None:
        recording.add(machine, f"$ {line}\n")
        self._own, other = pty.openpty()
        program, *arguments = line.split()
        named = ["sh", "-c", f'hostname {MACHINES[machine]}; exec "$@"', "sh"]
        program = str(Path(sys.executable).parent / program)
        self.process = subprocess.Popen(
            hosts.command(machine, [*named, program, *arguments]),
            stdin=other,
            stdout=other,
            stderr=other,
            cwd=str(machine),
            start_new_session=True,
        )
        os.close(other)
        self._thread = threading.Thread(target=self._read, args=(recording, machine))
        self._thread.start()

    def _read(self, recording: Recording, machine: int) -> None:
        try:
            while data := os.read(self._own, 1 << 16):
                recording.add(machine, data.decode(errors="replace"))
        except OSError:  # the other end is closed
            pass

    def type(self, text: str) -> None:
        os.write(self._own, f"{text}\n".encode())

    def await_end(self) -> None:
        code = self.process.wait(LIMIT_S)
        self._thread.join()
        os.close(self._own)
        if code:
            raise SystemExit(f"the command of a machine ended with {code}")


def record(model: Path, program: str) -> Recording:
    """The run in the current folder, with a folder for each machine."""
    for machine in range(2):
        ignored = shutil.ignore_patterns("*.safetensors*") if machine else None
        shutil.copytree(model, Path(str(machine), "demo", "llama"), ignore=ignored)
        Path(str(machine), "generate.py").write_text(program)
    with NetworkHosts(2, network="10.0.0") as hosts:
        recording = Recording()
        first = Terminal(recording, hosts, 0, "drumline auto --nnodes 2 generate.py")
        token, line = recording.await_text(0, TOKEN), recording.await_text(0, JOIN)
        second = Terminal(recording, hosts, 1, line)
        recording.await_text(1, "token of the launch")
        second.type(token)
        first.await_end()
        second.await_end()
    return recording


def main() -> None:
    readme, model = ROOT / "README.md", Path(sys.argv[1]).absolute()
    text = readme.read_text()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        lines = record(model, text.split("```python\n")[1].split("```")[0]).lines
        os.chdir(ROOT)
    head = {"version": 2, "width": 110, "height": len(lines) + 2, "title": "two machines"}
    events = [[round(seconds, 3), "o", f"{line}\r\n"] for seconds, line in lines]
    CAST.write_text("".join(json.dumps(event) + "\n" for event in [head, *events]))
    block = "```text\n" + "".join(f"{s:4.1f} s  {line}\n" for s, line in lines) + "```\n"
    readme.write_text(BLOCK.sub(lambda _: block, text))
    print(block, end="")


if __name__ == "__main__":
    main()
