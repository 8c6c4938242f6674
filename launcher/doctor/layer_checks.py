"""Checks that need the higher layers: they run as commands in processes of their own."""

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

from launcher import timings
from launcher.doctor.finding import Finding, installed_version
from launcher.doctor.launcher_checks import PATH
from launcher.system import host_addresses

INSTALL = "pip install -e . (this builds the native parts; a C++ compiler must be there)"
UNDER_MPI_CHECK = "-m launcher run --launcher mpi -n 2 -m communicator.backend_info --rank mpi"
# As communicator/backend_info.py prints them; a backend with another verdict is not usable here.
CONFORMS, FAILS = "conforms", "fails"


def nccl() -> Iterator[Finding]:
    """The NCCL that the Communicator would load."""
    answer = _json_of("-m", "communicator.backend_info", "--nccl")
    if isinstance(answer, str):
        yield Finding("nccl", "communicator", False, answer, INSTALL)
    elif "path" in answer:
        yield Finding("nccl", "library", True, f"{answer['version']}, {answer['path']}")
    else:
        yield Finding("nccl", "library", None, answer["reason"])


def network() -> Iterator[Finding]:
    """Interfaces, and the one on which a Coordinator over several nodes would listen."""
    named = host_addresses.interfaces().items()
    interfaces = [f"{name} ({', '.join(have)})" for name, have in named if have]
    yield Finding("network", "interfaces", True, ", ".join(interfaces))
    yield Finding("network", "on one node", True, "the Coordinator listens on 127.0.0.1 alone")
    routable = host_addresses.routable_addresses()
    detail = (
        f"it listens on {routable[0]}" if routable else "no address that other hosts could reach"
    )
    yield Finding("network", "on several nodes", True if routable else None, detail)
    yield _host_name(routable)


def _host_name(routable: list[str]) -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        detail = f"{name} is {address}"
    except OSError as error:
        address, detail = "", f"{name} is not known to this host: {error.strerror}"
    if address and not address.startswith("127."):
        return Finding("network", "host name", True, detail)
    detail += ", so other hosts need an address"
    remedy = f"on several nodes: --master-addr {routable[0]}" if routable else ""
    return Finding("network", "host name", None, detail, remedy)


def models() -> Iterator[Finding]:
    """The installed transformers, and whether drumline's fast paths happen with it."""
    if not installed_version("transformers"):
        yield Finding("models", "transformers", None, "not installed", "pip install '.[models]'")
        return
    answer = _json_of("-m", "drumline.pipeline.fast_paths")
    if isinstance(answer, str):
        yield Finding("models", "drumline", False, answer, INSTALL)
        return
    read = answer["read"]
    detail = f"{answer['transformers']} is installed; read: {', '.join(read)}"
    yield Finding("models", "transformers", True, detail)
    for name, happens in answer["fast_paths"].items():
        detail = "happen" if happens else "do not happen: tokens come later, or an error does"
        remedy = "" if happens else f"pip install 'transformers=={read[-1]}'"
        yield Finding("models", name, happens, detail, remedy)


def backends() -> Iterator[Finding]:
    """The conformance of each backend, on two ranks of this machine."""
    answer = _json_of("-m", "communicator.backend_info")
    if isinstance(answer, str):
        yield Finding("backends", "communicator", False, answer, INSTALL)
        return
    verdicts = answer["backends"]
    if "mpi" in verdicts and shutil.which("mpiexec", path=PATH) and find_spec("mpi4py"):
        under_mpi = _json_of(*UNDER_MPI_CHECK.split())
        verdicts["mpi"] = [FAILS, under_mpi] if isinstance(under_mpi, str) else under_mpi["mpi"]
    for name, (verdict, detail) in verdicts.items():
        command = f"python -m communicator check --backend {shlex.quote(name)} -n 2"
        ok = {CONFORMS: True, FAILS: False}.get(verdict)
        yield Finding("backends", name, ok, detail, command if ok is False else "")


def _json_of(*arguments: str) -> Any:
    """The object that this command of Python prints last, or the reason why it printed none."""
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timings.TIMINGS.doctor_layer_s,
            env={**os.environ, "PATH": PATH},
        )
    except subprocess.TimeoutExpired:
        return f"{shlex.join(command)} did not end within {timings.TIMINGS.doctor_layer_s:.0f} s"
    objects = [line[line.find("{") :] for line in done.stdout.splitlines() if "{" in line]
    if done.returncode == 0 and objects:
        return json.loads(objects[-1])
    last = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
    return f"{shlex.join(command)} failed: {last}"
