"""Backend launchers that can start ranks: path and version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from launcher import timings
from launcher.doctor.finding import Finding, installed_version

# What pip installs lies beside this Python, which need not be activated.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
# Command -> the option that prints its version, and how to install it.
LAUNCHERS = {
    "torchrun": ([], "it comes with torch"),
    "mpiexec": (["--version"], "pip install mpich mpi4py"),
    "srun": (["--version"], "clusters with SLURM have it"),
    "ray": ([], "pip install ray"),
}
# The meaning of a command that exists and prints no version.
WITHOUT_VERSION = {
    "srun": "of no cluster that this machine knows (no slurm.conf), so it starts nothing here"
}
DISTRIBUTIONS = {"torchrun": "torch", "ray": "ray"}


def launchers() -> Iterator[Finding]:
    """None of them is needed: `python -m launcher run` starts ranks by itself on one machine."""
    for name, (version_option, origin) in LAUNCHERS.items():
        path = shutil.which(name, path=PATH)
        if path is None:
            yield Finding("launchers", name, None, f"not found; {origin}")
        else:
            works, version = _version(name, path, version_option)
            yield Finding("launchers", name, works or None, f"{version}, {path}")
    version = installed_version("mpi4py")
    missing = "not found; over several nodes MPI needs it: pip install mpi4py"
    yield Finding("launchers", "mpi4py", bool(version) or None, version or missing)


def _version(name: str, path: str, option: list[str]) -> tuple[bool, str]:
    """(True if the command works, its version)."""
    if not option:
        distribution = DISTRIBUTIONS[name]
        version = installed_version(distribution)
        missing = f"of another Python: this one has no {distribution}"
        return bool(version), f"{distribution} {version}" if version else missing
    limit_s = timings.TIMINGS.version_answer_s
    try:
        done = subprocess.run([path, *option], capture_output=True, text=True, timeout=limit_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"it cannot be asked for its version: {error}"
    if done.returncode and name in WITHOUT_VERSION:
        return False, WITHOUT_VERSION[name]
    lines = (done.stdout + done.stderr).strip().splitlines() or ["it prints no version"]
    hydra = [line.split()[-1] for line in lines if line.strip().startswith("Version:")]
    version = f"MPICH's process manager {hydra[0]}" if hydra else lines[0].strip()
    return done.returncode == 0, version
