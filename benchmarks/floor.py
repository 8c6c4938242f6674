"""What the machine allows whoever moves tensors between ranks, measured beside them.

with Floor(comm, library) as floor:  # collective; library: compiled(EXCHANGE, folder, *SHARED)
    floor.us("allreduce", 1 << 20)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import subprocess
import time
from pathlib import Path

import torch

from communicator import Communicator

ROOT = Path(__file__).parents[1]
EXCHANGE = ROOT / "benchmarks" / "exchange.c"
SHARED = ("-shared", "-fPIC")
PIECE = 64 << 10  # as in exchange.c
CACHED = 1 << 20  # of more than this, a pass over the own tensor is a floor too


def compiled(source: Path, folder: str, *flags: str) -> Path:
    target = Path(folder) / source.stem
    command = [
        "cc",
        "-O2",
        f"-I{ROOT / 'csrc'}",
        f"-I{ROOT / 'csrc' / 'abi'}",
        *flags,
        source,
        "-o",
        target,
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return target


def taken_in(operation: str, nbytes: int, size: int) -> int:
    """The bytes of other ranks that a rank must read, however it is done."""
    share = nbytes * (size - 1) // size
    return {
        "allreduce": 2 * share,  # its share of the operands, and the rest of the result
        "reduce_scatter": share,
        "alltoall": share,
        "allgather": nbytes * (size - 1),
        "barrier": 0,
    }.get(operation, nbytes)


class Floor:
    """Memory that all ranks share, to read what another has just written."""

    def __init__(self, comm: Communicator, library: str) -> None:
        self.comm, self.size, self.steps = comm, comm.world_size, ctypes.c_uint(0)
        self.crowded = self.size > len(os.sched_getaffinity(0))
        functions = ctypes.CDLL(library)
        functions.exchange_bytes.restype = ctypes.c_size_t
        functions.exchange_ns.restype = ctypes.c_int64
        nbytes = functions.exchange_bytes(self.size)
        descriptor = os.memfd_create("floor")
        os.ftruncate(descriptor, nbytes)
        offers = comm.coor.allgather(f"/proc/{os.getpid()}/fd/{descriptor}".encode())
        with open(offers[0], "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), nbytes)
        comm.barrier()  # all have opened what rank 0 offered
        os.close(descriptor)
        base = (ctypes.c_char * nbytes).from_buffer(self.memory)
        own = ctypes.create_string_buffer(PIECE)
        self.exchange = lambda count: functions.exchange_ns(
            base,
            comm.rank,
            self.size,
            ctypes.byref(self.steps),
            self.crowded,
            own,
            ctypes.c_size_t(count),
        )

    def us(self, operation: str, nbytes: int) -> float:
        """Microseconds on this rank. Collective."""
        count = taken_in(operation, nbytes, self.size)
        times = 101 if count <= 1 << 20 else 5
        exchanged = statistics.median(self._exchange_us(count) for _ in range(times))
        return max(exchanged, self._pass_us(nbytes)) if nbytes > CACHED else exchanged

    def _exchange_us(self, count: int) -> float:
        self.comm.barrier()  # parts ranks that have come to share a core
        return float(self.exchange(count)) / 1000

    def _pass_us(self, nbytes: int) -> float:
        """All ranks at once read and write their own tensor once."""
        tensor, found = torch.zeros(nbytes // 4), []
        for _ in range(9):
            self.comm.barrier()
            start = time.perf_counter_ns()
            tensor.add_(1)
            found.append((time.perf_counter_ns() - start) / 1000)
        return statistics.median(found)
