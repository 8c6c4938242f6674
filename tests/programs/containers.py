"""The steps of docs/Dockerfile without a registry of images, and what their containers then do.

    python -m tests.programs.containers FOLDER [PATH...] [--debian 13] [--tests FILES]

mmdebstrap makes the root file systems that FROM names, from Debian's packages; RUN, COPY, ENV and
WORKDIR are those of the file. Of `machine` two are started with networks and processes of their
own, and run the README's first lines as two machines. In `source` the README's second command runs,
`make test`, of all tests or those of FILES. As root. PATH: of this machine, seen there too, such as
pip's settings.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.network_hosts import NetworkHosts

ROOT = Path(__file__).parents[2]
RELEASES = {"debian:12-slim": "bookworm", "debian:13-slim": "trixie"}
INSIDE = """set -e
for path in /etc/resolv.conf {shared}; do
    mkdir -p "{root}${{path%/*}}"
    if [ -d "$path" ]; then mkdir -p "{root}$path"; else touch "{root}$path"; fi
    mount --bind "$path" "{root}$path"
    mount -o remount,bind,ro "{root}$path"
done
mount --rbind /dev "{root}/dev"
mount -t proc proc "{root}/proc"
exec chroot "{root}" env -i {environ} sh -c 'cd {folder} && exec "$@"' sh "$@"
"""


class Container:
    """A root file system, made by the steps of a stage. shared: paths of this machine."""

    def __init__(self, root: Path, image: str, shared: Sequence[str]) -> None:
        self.root, self.shared, self.folder = root, shared, "/"
        self.environ = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        self.environ |= {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "SSL_"))}
        command = ["mmdebstrap", "--quiet", "--variant=minbase", RELEASES[image], str(root)]
        subprocess.run([*command, "http://deb.debian.org/debian"], check=True)
        names = f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n"  # as Docker writes it
        (root / "etc" / "hosts").write_text(names)

    def command(self, *words: str) -> list[str]:
        """The words in the container, with processes of its own."""
        environ = " ".join(f"{name}='{value}'" for name, value in self.environ.items())
        script = INSIDE.format(
            root=self.root, shared=" ".join(self.shared), environ=environ, folder=self.folder
        )
        own = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return [*own, "sh", "-c", script, "sh", *words]

    def run(self, line: str) -> None:
        print(f"   RUN {line}", flush=True)
        subprocess.run(self.command("sh", "-c", line), check=True)

    def copy(self, source: Path, target: str) -> None:
        place = self.root / target.lstrip("/")
        if (source / ".git").exists():  # as .dockerignore leaves out what is not of the source
            place.mkdir(parents=True)
            archive = subprocess.Popen(
                ["git", "-C", source, "archive", "HEAD"], stdout=subprocess.PIPE
            )
            subprocess.run(["tar", "x", "-C", place], stdin=archive.stdout, check=True)
        else:
            shutil.copytree(source, place)


def build(file: Path, debian: str, folder: Path, shared: Sequence[str]) -> dict[str, Container]:
    stages: dict[str, Container] = {}
    text = file.read_text().replace("${DEBIAN}", debian)
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            image, _, name = rest.split()
            print(f"== {name}: {image}", flush=True)
            stage = stages[name] = Container(folder / name, image, shared)
        elif word == "RUN":
            stage.run(rest)
        elif word == "ENV":
            stage.environ |= [rest.split("=", 1)]
        elif word == "WORKDIR":
            stage.folder = rest
        elif word == "COPY":
            *of, source, target = rest.split()
            other = stages[of[0].partition("=")[2]].root if of else ROOT
            stage.copy(other / source.strip("/."), target)
    return stages


def run_on_two(machine: Container, folder: Path) -> None:
    """The program of the README's first screen: its text is that of one machine."""
    readme = (ROOT / "README.md").read_text()
    (machine.root / "work" / "generate.py").write_text(
        readme.split("```python\n")[1].split("```")[0]
    )
    other = folder / "other"
    subprocess.run(["cp", "--archive", machine.root, other], check=True)  # with its devices
    for weights in (other / "work" / "demo").rglob("*.safetensors*"):
        weights.unlink()  # only the first machine has them
    second = copy.copy(machine)
    second.root = other
    machine.environ["DRUMLINE_TOKEN"] = secrets.token_hex(32)
    alone = subprocess.check_output(machine.command("python", "generate.py"), text=True)
    with NetworkHosts(2) as hosts:
        first = hosts.addresses[0]
        lines = (f"auto --nnodes 2 --master-addr {first} generate.py", f"join {first}")
        commands = [
            hosts.command(n, (machine, second)[n].command("drumline", *line.split()))
            for n, line in enumerate(lines)
        ]
        started = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands
        ]
        told = [process.communicate(timeout=300)[0] for process in started]
    print(*told, sep="", flush=True)
    assert [process.returncode for process in started] == [0, 0]
    assert told[0].replace("[0] ", "") == alone, json.dumps([told[0], alone])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("shared", nargs="*")
    parser.add_argument("--debian", default="12")
    parser.add_argument("--tests", default="")
    options = parser.parse_args()
    folder = options.folder.absolute()
    stages = build(ROOT / "docs" / "Dockerfile", options.debian, folder, options.shared)
    print("== two containers as two machines", flush=True)
    run_on_two(stages["machine"], folder)
    print("== make test in source", flush=True)
    stages["source"].run(f"make test TESTS='{options.tests}'" if options.tests else "make test")


if __name__ == "__main__":
    main()
