"""NCCL through cupy.cuda.nccl, for machines where our own extension cannot be built.

comm = Communicator(coor, backend="cupy")       # pip install cupy-cuda13x (or -cuda12x)

Slower to call than "nccl", and with less: no split, no scaled sums, no registered memory, and no
deadline but that of the start.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from communicator.backend import Backend, Capabilities
from communicator.calls.default_collectives import P2PCall
from communicator.calls.dtypes import OPS, dtype_info
from communicator.calls.failures import describe_lost
from communicator.errors import WORK_ERRORS, CommunicatorError, CommunicatorTimeout, Unsupported
from coordinator import Coordinator

SCORE = 150
BYTE = 1  # ncclUint8
LAST_DTYPE = 9  # ncclBfloat16; older NCCLs know no more


class Cupy(Backend):
    """Work goes on torch's current stream."""

    name = "cupy"
    device_type = "cuda"
    # Comparing would wait for the GPU, which a capture does not survive.
    capabilities = Capabilities(checked_calls=0)
    closes_when_forgotten = False

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        if not torch.cuda.is_available():
            raise Unsupported("torch sees no CUDA device in this process")
        _nccl()
        return SCORE

    def open(self) -> None:
        self._captured = False  # then NCCL's own end would wait for the graph, for ever
        self._nccl = _nccl()
        unique_ids = self.coor.run_on_all_ranks(
            lambda: self._bounded("make an id", self._nccl.get_unique_id) if self.rank == 0 else (),
            error_class=WORK_ERRORS,
        )
        self.coor.run_on_all_ranks(
            lambda: self._bounded("start", lambda: self._join(tuple(unique_ids[0]))),
            error_class=WORK_ERRORS,
        )

    def _join(self, unique_id: tuple[int, ...]) -> None:
        with torch.cuda.device(self.device):
            self._comm = self._nccl.NcclCommunicator(self.world_size, unique_id, self.rank)

    def _bounded(self, what: str, body: Callable[[], Any]) -> Any:
        """The result of body, on a thread that is abandoned if it does not end in time."""
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(_result(body)), daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if not results:
            raise CommunicatorTimeout(
                f"{self._me}: NCCL did not {what} within {self.timeout_s:g} s. Is every rank "
                f"there?{describe_lost(self._lost_peers())} NCCL_DEBUG=INFO tells more."
            )
        if isinstance(results[0], Exception):
            raise CommunicatorError(
                f"{self._me}: NCCL did not {what}: {_describe(results[0])}. This "
                "communicator cannot be used. NCCL_DEBUG=INFO tells more."
            ) from results[0]
        return results[0]

    def close(self) -> None:
        comm = self.__dict__.pop("_comm", None)
        if comm is None:
            return
        if self._captured:
            _leak(comm)
        else:
            self._bounded("end", comm.destroy)

    def __del__(self) -> None:
        """Never calls NCCL, whose end waits for others; cupy's own would."""
        if comm := self.__dict__.pop("_comm", None):
            _leak(comm)

    def _run(self, call: str, *arguments: Any) -> None:
        self._captured = self._captured or torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._check(call, lambda: getattr(self._comm, call)(*arguments, stream))

    def _check(self, call: str, body: Callable[[], Any]) -> None:
        """Run a body that makes this call of NCCL's."""
        with torch.cuda.device(self.device):
            result = _result(body)
        if isinstance(result, Exception):
            raise CommunicatorError(
                f"{self._me}: {call} failed in NCCL: {_describe(result)}. Its result is not "
                f"to be used.{describe_lost(self._lost_peers())} NCCL_DEBUG=INFO tells more."
            ) from result

    def _reduction_codes(self, tensor: torch.Tensor, op: str) -> tuple[int, int]:
        """NCCL's numbers for dtype and op. A bool is a byte: max is any, min and prod are all."""
        if tensor.dtype == torch.bool:
            return BYTE, OPS["min" if op == "prod" else op].nccl
        number = dtype_info(tensor.dtype).number
        if number is None or number > LAST_DTYPE:
            raise Unsupported(
                f"{self._me}: cupy's NCCL does not reduce {tensor.dtype}. Convert it, or use "
                "backend='nccl'."
            )
        return number, OPS[op].nccl

    def allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        codes = self._reduction_codes(tensor, op)
        self._run("allReduce", tensor.data_ptr(), out.data_ptr(), tensor.numel(), *codes)

    def reduce(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, op: str) -> None:
        codes = self._reduction_codes(tensor, op)
        to = 0 if out is None else out.data_ptr()
        self._run("reduce", tensor.data_ptr(), to, tensor.numel(), *codes, dst)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        codes = self._reduction_codes(tensor, op)
        self._run("reduceScatter", tensor.data_ptr(), out.data_ptr(), out.numel(), *codes)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        at = tensor.data_ptr()
        self._run("broadcast", at, at, tensor.nbytes, BYTE, src)

    def allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._run("allGather", tensor.data_ptr(), out.data_ptr(), tensor.nbytes, BYTE)

    def alltoall(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        out[self.rank].copy_(tensor[self.rank])
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        sends = [("send", tensor[rank], rank) for rank in others]
        self.group(sends + [("recv", out[rank], rank) for rank in others])

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self._run("send", tensor.data_ptr(), tensor.nbytes, BYTE, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        self._run("recv", tensor.data_ptr(), tensor.nbytes, BYTE, src)

    def group(self, calls: list[P2PCall]) -> None:
        self._check("groupStart", self._nccl.groupStart)
        try:
            for kind, tensor, peer in calls:
                self.send(tensor, peer) if kind == "send" else self.recv(tensor, peer)
        except BaseException:
            _result(self._nccl.groupEnd)
            raise
        self._check("groupEnd", self._nccl.groupEnd)

    def barrier(self) -> None:
        word = torch.zeros(1, device=self.device)
        self.allreduce(word, word, "max")


def _nccl() -> Any:
    """cupy's NCCL. Raises Unsupported if cupy is not installed, or was built without."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise Unsupported(
            f"cupy is not installed ({error}). Install cupy-cuda13x or cupy-cuda12x."
        ) from error
    if not getattr(nccl, "available", False):
        raise Unsupported("this cupy has no NCCL. Install nvidia-nccl beside it.")
    return nccl


def _result(body: Callable[[], Any]) -> Any:
    """The result of body, or its exception: cupy's NcclError, or KeyError for newer codes.

    Any exception: on the thread of _bounded it would be lost, and taken for a timeout.
    """
    try:
        return body() or True
    except Exception as error:
        return error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _leak(comm: Any) -> None:
    """Keep comm for ever: cupy destroys it in garbage collection, even under a living graph."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))
