"""The engines that can start ranks: found where, and which version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from launcher.doctor.finding import Finding

ANSWER_S = 20
# What pip installs lies beside this Python, which need not be activated.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
# The command to look for, how it tells its version, and where it comes from.
ENGINES = {
    "torchrun": ([], "it comes with torch"),
    "mpiexec": (["--version"], "pip install mpich mpi4py"),
    "srun": (["--version"], "clusters with SLURM have it"),
    "ray": ([], "pip install ray"),
}
# What it means if the command is there and tells no version.
SILENT = {
    "srun": "of no cluster that this machine knows (no slurm.conf), so it starts nothing here"
}
DISTRIBUTIONS = {"torchrun": "torch", "ray": "ray"}


def engines() -> Iterator[Finding]:
    """None of them is needed: `python -m launcher run` starts ranks by itself on one machine."""
    for name, (ask, origin) in ENGINES.items():
        path = shutil.which(name, path=PATH)
        if path is None:
            yield Finding("engines", name, None, f"not found; {origin}")
        else:
            works, told = _version(name, path, ask)
            yield Finding("engines", name, works or None, f"{told}, {path}")
    yield _mpi4py()


def _version(name: str, path: str, ask: list[str]) -> tuple[bool, str]:
    """Whether the command answers, and what."""
    if not ask:
        return _installed(DISTRIBUTIONS[name])
    done = subprocess.run([path, *ask], capture_output=True, text=True, timeout=ANSWER_S)
    if done.returncode and name in SILENT:
        return False, SILENT[name]
    said = (done.stdout + done.stderr).strip().splitlines() or ["it tells nothing"]
    version = [line.split()[-1] for line in said if line.strip().startswith("Version:")]
    told = f"MPICH's process manager {version[0]}" if version else said[0].strip()
    return done.returncode == 0, told


def _installed(distribution: str) -> tuple[bool, str]:
    try:
        return True, f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return False, f"of another Python: this one has no {distribution}"


def _mpi4py() -> Finding:
    try:
        return Finding("engines", "mpi4py", True, metadata.version("mpi4py"))
    except metadata.PackageNotFoundError:
        found = "not found; over several nodes MPI needs it: pip install mpi4py"
        return Finding("engines", "mpi4py", None, found)
