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

from communicator.base import Communicator
from communicator.errors import CommunicatorError, CommunicatorTimeout, DrumlineError, Unsupported
from coordinator import Coordinator

SCORE = 150
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}  # ncclRedOp_t
DTYPES = {  # ncclDataType_t
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
BYTE = 1


class Cupy(Communicator):
    """Work goes on torch's current stream. device: this rank's, if not its local rank."""

    name = "cupy"
    device_type = "cuda"
    _checked_calls = 0  # comparing would wait for the GPU, which a capture does not survive

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        if not torch.cuda.is_available():
            raise Unsupported("torch sees no CUDA device in this process")
        if coor.info.local_rank >= torch.cuda.device_count():
            raise Unsupported(f"local rank {coor.info.local_rank} has no GPU of its own")
        _nccl()
        return SCORE

    def _open(self, device: int | None = None) -> None:
        self._ordinal = self.coor.info.local_rank if device is None else device
        self._captured = False  # then NCCL's own end would wait for the graph, for ever
        self._nccl = _nccl()
        mine = bytes(part & 0xFF for part in self._nccl.get_unique_id()) if self.rank == 0 else b""
        unique_id = self.coor.broadcast(mine or None)
        signed = tuple(byte - 256 if byte > 127 else byte for byte in unique_id)
        problem = ""
        try:
            self._comm = self._bounded("start", lambda: self._join(signed))
        except DrumlineError as error:
            problem = str(error)
        for rank, text in enumerate(self.coor.allgather(problem.encode())):
            if text:
                raise CommunicatorError(
                    f"rank {self.rank}: rank {rank} could not join: {text.decode()}"
                )

    def _join(self, unique_id: tuple[int, ...]) -> Any:
        with torch.cuda.device(self._ordinal):
            return self._nccl.NcclCommunicator(self.world_size, unique_id, self.rank)

    def _bounded(self, what: str, body: Callable[[], Any]) -> Any:
        """body on a thread, which is left behind if it does not end in time."""
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(_result(body)), daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if not found:
            raise CommunicatorTimeout(
                f"rank {self.rank}: NCCL did not {what} within {self.timeout_s:g} s. Is every rank "
                f"there?{self._lost_peers()} NCCL_DEBUG=INFO tells more."
            )
        if isinstance(found[0], Exception):
            raise CommunicatorError(
                f"rank {self.rank}: NCCL did not {what}: {_words(found[0])}. This communicator "
                "cannot be used. NCCL_DEBUG=INFO tells more."
            ) from found[0]
        return found[0]

    def _close(self) -> None:
        comm = self.__dict__.pop("_comm", None)
        if comm is None:
            return
        if self._captured:
            _keep_for_ever(comm)
        else:
            self._bounded("end", comm.destroy)

    def __del__(self) -> None:
        """Never calls NCCL, whose end waits for others; cupy's own would."""
        if comm := self.__dict__.pop("_comm", None):
            _keep_for_ever(comm)

    def _device(self) -> torch.device:
        return torch.device("cuda", self._ordinal)

    def _run(self, call: str, *arguments: Any) -> None:
        self._captured = self._captured or torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(self._ordinal).cuda_stream
        with torch.cuda.device(self._ordinal):
            found = _result(lambda: getattr(self._comm, call)(*arguments, stream))
        if isinstance(found, Exception):
            raise CommunicatorError(
                f"rank {self.rank}: {call} failed in NCCL: {_words(found)}. Its result is not to "
                f"be used.{self._lost_peers()} NCCL_DEBUG=INFO tells more."
            ) from found

    def _reduced(self, tensor: torch.Tensor, op: str) -> tuple[int, int]:
        """NCCL's numbers for dtype and op. A bool is a byte: max is any, min and prod are all."""
        if tensor.dtype == torch.bool:
            return BYTE, OPS["min" if op == "prod" else op]
        if tensor.dtype not in DTYPES:
            raise Unsupported(
                f"rank {self.rank}: cupy's NCCL does not reduce {tensor.dtype}. Convert it, or use "
                "backend='nccl'."
            )
        return DTYPES[tensor.dtype], OPS[op]

    def _allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        kind = self._reduced(tensor, op)
        self._run("allReduce", tensor.data_ptr(), out.data_ptr(), tensor.numel(), *kind)

    def _reduce(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, op: str) -> None:
        kind = self._reduced(tensor, op)
        to = 0 if out is None else out.data_ptr()
        self._run("reduce", tensor.data_ptr(), to, tensor.numel(), *kind, dst)

    def _reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        kind = self._reduced(tensor, op)
        self._run("reduceScatter", tensor.data_ptr(), out.data_ptr(), out.numel(), *kind)

    def _broadcast(self, tensor: torch.Tensor, src: int) -> None:
        at = tensor.data_ptr()
        self._run("broadcast", at, at, tensor.nbytes, BYTE, src)

    def _allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._run("allGather", tensor.data_ptr(), out.data_ptr(), tensor.nbytes, BYTE)

    def _alltoall(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        out[self.rank].copy_(tensor[self.rank])
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        sends = [("send", tensor[rank], rank) for rank in others]
        self._exchange(sends + [("recv", out[rank], rank) for rank in others])

    def _send(self, tensor: torch.Tensor, dst: int) -> None:
        self._run("send", tensor.data_ptr(), tensor.nbytes, BYTE, dst)

    def _recv(self, tensor: torch.Tensor, src: int) -> None:
        self._run("recv", tensor.data_ptr(), tensor.nbytes, BYTE, src)

    def _exchange(self, calls: list[tuple[str, torch.Tensor, int]]) -> None:
        self._nccl.groupStart()
        try:
            for kind, tensor, peer in calls:
                self._send(tensor, peer) if kind == "send" else self._recv(tensor, peer)
        finally:
            self._nccl.groupEnd()

    def _barrier(self) -> None:
        word = torch.zeros(1, device=self._device())
        self._allreduce(word, word, "max")


def _nccl() -> Any:
    """cupy's NCCL. Raises Unsupported if cupy is not installed, or was built without."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise Unsupported(
            f"cupy is not here ({error}). Install cupy-cuda13x or cupy-cuda12x."
        ) from error
    if not getattr(nccl, "available", False):
        raise Unsupported("this cupy has no NCCL. Install nvidia-nccl beside it.")
    return nccl


def _result(body: Callable[[], Any]) -> Any:
    """What body returns, or what it raised, such as cupy's NcclError, or KeyError for newer codes.

    Anything: on the thread of _bounded it would be lost, and taken for a wait without an end.
    """
    try:
        return body() or True
    except Exception as error:
        return error


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _keep_for_ever(comm: Any) -> None:
    """So that cupy does not destroy it while memory is collected, nor under a living graph."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))
