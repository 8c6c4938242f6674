"""Tensors over MPI, for ranks that an mpiexec started: its networks, and its algorithms.

# mpiexec -n 4 python script.py
comm = Communicator(Coordinator(), backend="mpi")

What MPI cannot reduce (16-bit and 8-bit floats), and max and min of floats, in which it may lose a
NaN, are reduced here, in order of rank.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch

from communicator import timings
from communicator.backend import Capabilities
from communicator.backends.tagged_p2p import TaggedP2PBackend, as_bytes
from communicator.calls.dtypes import OPS, dtype_info, keeps_nan
from communicator.errors import Unsupported
from coordinator import Coordinator

EAGER_TESTS = 200  # of a call before its thread sleeps between them
SLEEP_FRACTION = 1 / 20  # then it sleeps this part of the time it has waited, so is little late


class Mpi(TaggedP2PBackend):
    """Ranks of one mpiexec, or some of them. Used only if named: it starts MPI.

    MPI frees a group only where all its ranks ask for it, so close() leaves that to the end of the
    process.
    """

    name = "mpi"
    capabilities = Capabilities(only_by_name=True, empty_messages=True)

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

    def open(self) -> None:
        super().open()
        self._mpi = _mpi4py()
        world = self._mpi.COMM_WORLD
        own_place = [world.Get_rank(), world.Get_size(), _version(self._mpi)]
        places = self.coor.allgather_object(own_place)
        self._check_same_world(places)
        group = world.Get_group().Incl([rank for rank, _, _ in places])
        self._comm = world.Create_group(group)
        self._largest_tag = int(self._comm.Get_attr(self._mpi.TAG_UB))

    def _check_same_world(self, places: list[Any]) -> None:
        """Raise Unsupported unless the ranks are different ones of one mpiexec."""
        worlds = {(size, version) for _, size, version in places}
        if len(worlds) > 1 or len({rank for rank, _, _ in places}) < self.world_size:
            raise Unsupported(
                f"{self._me}: the ranks are not of one MPI, but rank, size and version are "
                f"{places}. Start all of them with the mpiexec of the MPI that mpi4py loads."
            )

    def start_bytes(self, kind: str, data: torch.Tensor, peer: int, tag: int) -> Any:
        start = self._comm.Isend if kind == "send" else self._comm.Irecv
        return _kept(start(self._bytes(data), peer, tag))

    def barrier(self) -> None:
        self._complete("barrier", self._comm.Ibarrier())

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self._complete("broadcast", self._comm.Ibcast(self._bytes(tensor), src))

    def allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        own = self._bytes(_apart(tensor, out))
        self._complete("allgather", self._comm.Iallgather(own, self._bytes(out)))

    def alltoall(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._complete("alltoall", self._comm.Ialltoall(self._bytes(tensor), self._bytes(out)))

    def allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        if not _is_reduced(tensor, op):
            return super().allreduce(out, tensor, op)
        if out is not tensor:
            out.copy_(tensor)
        numbers, in_place = self._numbers(out), self._mpi.IN_PLACE
        self._complete("allreduce", self._comm.Iallreduce(in_place, numbers, self._op(op)))
        self._average(out, op)

    def reduce(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, op: str) -> None:
        if not _is_reduced(tensor, op):
            return super().reduce(out, tensor, dst, op)
        if out is None:
            numbers = self._numbers(tensor)
            self._complete("reduce", self._comm.Ireduce(numbers, None, self._op(op), dst))
            return
        if out is not tensor:
            out.copy_(tensor)
        numbers, in_place = self._numbers(out), self._mpi.IN_PLACE
        self._complete("reduce", self._comm.Ireduce(in_place, numbers, self._op(op), dst))
        self._average(out, op)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        if not _is_reduced(tensor, op):
            return super().reduce_scatter(out, tensor, op)
        rows, row = self._numbers(_apart(tensor, out)), self._numbers(out)
        start = self._comm.Ireduce_scatter_block
        self._complete("reduce_scatter", start(rows, row, self._op(op)))
        self._average(out, op)

    def _average(self, out: torch.Tensor, op: str) -> None:
        if op == "avg":
            out.div_(self.world_size)

    def _op(self, op: str) -> Any:
        return getattr(self._mpi, OPS[op].mpi)

    def _bytes(self, tensor: torch.Tensor) -> tuple[Any, Any]:
        return self._memory(tensor), self._mpi.BYTE

    def _numbers(self, tensor: torch.Tensor) -> tuple[Any, Any]:
        return self._memory(tensor), getattr(self._mpi, dtype_info(tensor.dtype).mpi or "UINT8_T")

    def _memory(self, tensor: torch.Tensor) -> Any:
        """The bytes of the tensor, as what keeps it alive: a request holds on to it."""
        return as_bytes(tensor).numpy()

    def _complete(self, call: str, request: Any) -> None:
        self.wait_for(call, _kept(request))

    def wait_for(self, call: str, work: Any) -> None:
        """Test until the request has ended: MPI itself would wait for ever, and burn a core."""
        self._test(call, work)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(work))

    def _test(self, call: str, work: Any) -> None:
        for _ in range(EAGER_TESTS):
            if work.Test():
                return
        start = last_check = now = time.monotonic()
        while not work.Test():
            time.sleep(min((now - start) * SLEEP_FRACTION, timings.TIMINGS.stream_poll_s))
            now = time.monotonic()
            if now - last_check > timings.TIMINGS.liveness_poll_s:
                self._check_wait(call, now - start)
                last_check = now

    def _check_wait(self, call: str, waited_s: float) -> None:
        """Raise PeerLost if a peer is known dead, CommunicatorTimeout past the deadline."""
        lost = self._lost_peers()
        if lost or waited_s >= self.timeout_s:
            raise self.wait_error(call, waited_s, not lost, lost)


def _kept(request: Any) -> Any:
    """The request, kept until wait_for sees its end, or for ever: MPI may still write."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(request))
    return request


def _is_reduced(tensor: torch.Tensor, op: str) -> bool:
    """True if MPI reduces it. A bool is sent as a byte: max is "any", min and prod are "all"."""
    is_known = dtype_info(tensor.dtype).mpi is not None or tensor.dtype == torch.bool
    return is_known and keeps_nan(tensor.dtype, op)


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
