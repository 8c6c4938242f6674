"""What only the higher floors know. They are asked in processes of their own, as anyone could."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from launcher.doctor.finding import Finding, unless
from launcher.doctor.launcher_checks import PATH

ASKING_S = 180.0
INSTALL = "pip install -e . (this builds the native parts; a C++ compiler must be there)"
OVER_MPI = (
    "-m",
    "launcher",
    "run",
    "--launcher",
    "mpi",
    "-n",
    "2",
    "-m",
    "communicator.backend_info",
)
CONFORMS, FAILS = (
    "conforms",
    "fails",
)  # as communicator/backend_info.py says it; else it is not usable


def nccl() -> Iterator[Finding]:
    """Which NCCL the Communicator would load."""
    found = _ask("-m", "communicator.backend_info", "--nccl")
    if isinstance(found, str):
        yield Finding("nccl", "communicator", False, found, INSTALL)
    elif "path" in found:
        yield Finding("nccl", "library", True, f"{found['version']}, {found['path']}")
    else:
        yield Finding("nccl", "library", None, found["reason"])


def network() -> Iterator[Finding]:
    """Interfaces, and which of them a Coordinator over several nodes would listen on."""
    found = _ask("-m", "coordinator.host_info")
    if isinstance(found, str):
        yield Finding("network", "coordinator", False, found, INSTALL)
        return
    told = [f"{name} ({', '.join(have)})" for name, have in found["interfaces"].items() if have]
    yield Finding("network", "interfaces", True, ", ".join(told))
    yield Finding("network", "on one node", True, "the Coordinator listens on 127.0.0.1 alone")
    chosen = found["outward"]
    there = f"it listens on {chosen[0]}" if chosen else "no address that other hosts could reach"
    yield Finding("network", "on several nodes", True if chosen else None, there)
    yield _host_name(chosen)


def _host_name(chosen: list[str]) -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        found = f"{name} is {address}"
    except OSError as error:
        address, found = "", f"{name} is not known to this host: {error.strerror}"
    if address and not address.startswith("127."):
        return Finding("network", "host name", True, found)
    remedy = f"on several nodes: --master-addr {chosen[0]}" if chosen else ""
    return Finding("network", "host name", None, f"{found}, so other hosts need an address", remedy)


def backends() -> Iterator[Finding]:
    """Does each backend do here, on two ranks, what a communicator must?"""
    found = _ask("-m", "communicator.backend_info")
    if isinstance(found, str):
        yield Finding("backends", "communicator", False, found, INSTALL)
        return
    told = found["backends"]
    if "mpi" in told and shutil.which("mpiexec", path=PATH) and find_spec("mpi4py"):
        under_mpi = _ask(*OVER_MPI, "--rank", "mpi")
        told["mpi"] = [FAILS, under_mpi] if isinstance(under_mpi, str) else under_mpi["mpi"]
    for name, (verdict, detail) in told.items():
        again = f"python -m communicator check --backend {shlex.quote(name)} -n 2"
        ok = {CONFORMS: True, FAILS: False}.get(verdict)
        yield Finding("backends", name, ok, detail, unless(ok is False, again))


def _ask(*arguments: str) -> Any:
    """The object that this command prints last, or in words why it printed none."""
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=ASKING_S,
            env={**os.environ, "PATH": PATH},
        )
    except subprocess.TimeoutExpired:
        return f"{shlex.join(command)} did not end within {ASKING_S:.0f} s"
    said = [line[line.find("{") :] for line in done.stdout.splitlines() if "{" in line]
    if done.returncode == 0 and said:
        return json.loads(said[-1])
    last = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
    return f"{shlex.join(command)} failed: {last}"
