"""Tensors over MPI, for ranks that an mpiexec started: its networks, and its algorithms.

# mpiexec -n 4 python script.py
comm = Communicator(Coordinator(), backend="mpi")

What MPI cannot reduce (16-bit and 8-bit floats) is reduced here, in order of rank.
"""

from __future__ import annotations

import ctypes
import json
import time
from typing import Any

import torch

from communicator.backends.tagged_p2p import Network, as_bytes
from communicator.errors import (
    CommunicatorTimeout,
    DrumlineError,
    PeerLost,
    Unsupported,
)
from coordinator import Coordinator

# MPI's names for what it reduces (MPI 4.1, section 6.9.2). bool travels as bytes: max is any.
REDUCES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}
OPS = {"sum": "SUM", "avg": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN"}
EAGER_TESTS = 200  # of a call before its thread sleeps between them
PATIENCE = 20  # then it sleeps this part of the time it has waited, so that it is little late,
PAUSE_S = 1e-3  # but no longer than this
LOOK_S = 0.1  # between looks at whether the peers live


class Mpi(Network):
    """Ranks of one mpiexec, or some of them. Taken only when asked for: it starts MPI.

    MPI gives back a group only where all its ranks ask for it, so close() leaves that to the end of
    the process.
    """

    name = "mpi"
    asked_only = True

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        started_by = coor.info.extras.get("launcher")
        if started_by != "mpi":
            raise Unsupported(
                f"mpiexec did not start this rank ({started_by or 'no launcher'} did). Use "
                "`mpiexec -n 4 python script.py`, or `python -m launcher run --launcher mpi`"
            )
        _mpi4py()
        return 20

    def _open(self) -> None:
        super()._open()
        self._mpi = _mpi4py()
        world = self._mpi.COMM_WORLD
        mine = json.dumps([world.Get_rank(), world.Get_size(), _version(self._mpi)])
        said = [json.loads(data) for data in self.coor.allgather(mine.encode())]
        self._check_same_world(said)
        group = world.Get_group().Incl([rank for rank, _, _ in said])
        self._comm = world.Create_group(group)
        self._largest_tag = int(self._comm.Get_attr(self._mpi.TAG_UB))

    def _check_same_world(self, said: list[Any]) -> None:
        """The ranks must be different ones of one mpiexec: else they would wait for ever."""
        worlds = {(size, version) for _, size, version in said}
        if len(worlds) > 1 or len({rank for rank, _, _ in said}) < self.world_size:
            raise Unsupported(
                f"rank {self.rank}: the ranks are not of one MPI, but rank, size and version are "
                f"{said}. Start all of them with the mpiexec of the MPI that mpi4py loads."
            )

    def _launch(self, kind: str, data: torch.Tensor, peer: int, tag: int) -> Any:
        start = self._comm.Isend if kind == "send" else self._comm.Irecv
        return start(self._bytes(data), peer, tag)

    def _barrier(self) -> None:
        self._await("barrier", self._comm.Ibarrier())

    def _broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self._await("broadcast", self._comm.Ibcast(self._bytes(tensor), src))

    def _allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        mine = self._bytes(_apart(tensor, out))
        self._await("allgather", self._comm.Iallgather(mine, self._bytes(out)))

    def _alltoall(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._await("alltoall", self._comm.Ialltoall(self._bytes(tensor), self._bytes(out)))

    def _allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        if not self._reduces(tensor):
            return super()._allreduce(out, tensor, op)
        if out is not tensor:
            out.copy_(tensor)
        numbers, in_place = self._numbers(out), self._mpi.IN_PLACE
        self._await("allreduce", self._comm.Iallreduce(in_place, numbers, self._op(op)))
        self._average(out, op)

    def _reduce(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, op: str) -> None:
        if not self._reduces(tensor):
            return super()._reduce(out, tensor, dst, op)
        if out is None:
            numbers = self._numbers(tensor)
            self._await("reduce", self._comm.Ireduce(numbers, None, self._op(op), dst))
            return
        if out is not tensor:
            out.copy_(tensor)
        numbers, in_place = self._numbers(out), self._mpi.IN_PLACE
        self._await("reduce", self._comm.Ireduce(in_place, numbers, self._op(op), dst))
        self._average(out, op)

    def _reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        if not self._reduces(tensor):
            return super()._reduce_scatter(out, tensor, op)
        rows, row = self._numbers(_apart(tensor, out)), self._numbers(out)
        start = self._comm.Ireduce_scatter_block
        self._await("reduce_scatter", start(rows, row, self._op(op)))
        self._average(out, op)

    def _average(self, out: torch.Tensor, op: str) -> None:
        if op == "avg":
            out.div_(self.world_size)

    def _reduces(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype in REDUCES or tensor.dtype == torch.bool

    def _op(self, op: str) -> Any:
        return getattr(self._mpi, OPS[op])

    def _bytes(self, tensor: torch.Tensor) -> tuple[Any, Any]:
        return self._memory(tensor), self._mpi.BYTE

    def _numbers(self, tensor: torch.Tensor) -> tuple[Any, Any]:
        return self._memory(tensor), getattr(self._mpi, REDUCES.get(tensor.dtype, "UINT8_T"))

    def _memory(self, tensor: torch.Tensor) -> Any:
        """The bytes of the tensor, as what keeps it alive: a request holds on to it."""
        return as_bytes(tensor).numpy()

    def _await(self, call: str, request: Any) -> None:
        """Test until the request has ended: MPI itself would wait for ever, and burn a core."""
        for _ in range(EAGER_TESTS):
            if request.Test():
                return
        begun = looked = now = time.monotonic()
        while not request.Test():
            time.sleep(min((now - begun) / PATIENCE, PAUSE_S))
            now = time.monotonic()
            if now - looked > LOOK_S:
                self._look(call, request, now - begun)
                looked = now

    def _look(self, call: str, request: Any, waited_s: float) -> None:
        """Raise if waiting has become pointless."""
        lost = self._lost_peers()
        if not lost and waited_s < self.timeout_s:
            return
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(request))  # for ever: MPI may still write
        kind: type[DrumlineError] = PeerLost if lost else CommunicatorTimeout
        raise kind(
            f"rank {self.rank} waited {waited_s:.1f} s in {call} (mpi, {self.world_size} ranks)."
            f"{lost} Are all ranks in the same call, with tensors of the same "
            "size, and alive?"
        )


def _apart(tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its memory is also out's, which MPICH refuses."""
    shared = tensor.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    return tensor.clone() if shared else tensor


def _mpi4py() -> Any:
    """mpi4py.MPI, whose first import starts MPI. Raises Unsupported if it is not there."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise Unsupported(f"mpi4py does not load ({error}): `pip install mpi4py`") from error
    return MPI


def _version(mpi: Any) -> str:
    return str(mpi.Get_library_version()).splitlines()[0]
