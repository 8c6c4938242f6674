"""Sums of small tensors in one kernel, for ranks of one node whose GPUs reach each other.

comm = Communicator(coor, backend="nccl", oneshot=True)
comm.allreduce(tensor)       # by the kernel where select_algorithm() says so, or by NCCL

The kernel (csrc/cuda/oneshot.cu) is optional: csrc/scripts/build_cuda.sh builds it where nvcc is.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from enum import IntEnum
from typing import Any

import torch

from communicator import timings
from communicator.backends.nccl.given_stream import is_capturing
from communicator.calls.dtypes import dtype_info
from communicator.errors import (
    WORK_ERRORS,
    CommunicatorError,
    CommunicatorTimeout,
    DrumlineError,
    Unsupported,
)
from coordinator import Coordinator

LIBRARY = os.path.join(os.path.dirname(__file__), "_oneshot.so")
ABI = 2
MAX_RANKS = 8
MAX_BLOCKS = 24
HANDLE_BYTES = 64
OVERLAP = 2  # ONESHOT_OVERLAP
VECTOR_BYTES = 16
THREADS = 512
KIB = 1024

DTYPES = (torch.float16, torch.float32, torch.bfloat16)
# Up to how many bytes each algorithm was published to beat NCCL on GPUs joined by NVLink (vLLM
# pull requests 24111 and 24532, SGLang issue 2904), kept below where they cross.
ONE_SHOT_BYTES = {2: 512 * KIB, 4: 256 * KIB, 6: 128 * KIB, 8: 64 * KIB}
TWO_SHOT_BYTES = {2: 512 * KIB, 4: 512 * KIB, 6: 512 * KIB, 8: 256 * KIB}


class Algorithm(IntEnum):
    ONE_SHOT = 1  # every rank reads everything
    TWO_SHOT = 2  # every rank adds up a part, and the others fetch it


def select_algorithm(world_size: int, nbytes: int, dtype: torch.dtype) -> Algorithm | None:
    """The algorithm, or None for NCCL. From nothing but these three, so that all ranks agree."""
    if dtype not in DTYPES or nbytes == 0 or nbytes % VECTOR_BYTES:
        return None
    if nbytes <= ONE_SHOT_BYTES.get(world_size, 0):
        return Algorithm.ONE_SHOT
    return Algorithm.TWO_SHOT if nbytes <= TWO_SHOT_BYTES.get(world_size, 0) else None


def num_blocks(world_size: int, nbytes: int, algorithm: Algorithm) -> int:
    """Thread blocks of a launch: the same on every rank, for blocks meet one to one."""
    vectors = nbytes // VECTOR_BYTES
    if algorithm == Algorithm.TWO_SHOT:
        vectors = -(-vectors // world_size)
    return min(max(-(-vectors // THREADS), 1), MAX_BLOCKS)


Pointers = ctypes.c_void_p * MAX_RANKS


class KernelCall(ctypes.Structure):
    """oneshot_call of csrc/abi/oneshot.h."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("algorithm", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("world", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("num_here", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("nbytes", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("in_", Pointers),
        ("out", Pointers),
        ("arena", Pointers),
        ("state", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]


class Kernels:
    """The compiled kernels. Raises Unsupported if they were not built."""

    def __init__(self, path: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise Unsupported(
                f"the one-shot kernel does not load ({error}). Build it with "
                "csrc/scripts/build_cuda.sh, which needs nvcc, or leave out oneshot=True."
            ) from error
        if self._library.oneshot_abi() != ABI:
            raise Unsupported(
                f"{path} is of another version. Run csrc/scripts/build_cuda.sh again."
            )
        self._library.oneshot_error_text.restype = ctypes.c_char_p
        self._library.oneshot_state_problem.restype = ctypes.c_uint32
        self.state_problem = self._library.oneshot_state_problem
        self.state_graphs = self._library.oneshot_state_graphs
        self.state_abort = self._library.oneshot_state_abort

    def __getattr__(self, name: str) -> Callable[..., None]:
        """oneshot_<name>, raising CommunicatorError if CUDA refuses."""
        function = getattr(self._library, f"oneshot_{name.rstrip('_')}")

        def checked(*values: Any) -> None:
            if code := function(*values):
                text = self._library.oneshot_error_text(code).decode()
                raise CommunicatorError(f"one-shot {name} failed in CUDA: {text} ({code})")

        return checked


class KernelState:
    """Host memory that the kernels of a group share with this process. Any thread."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels, self._lock, self._closed = kernels, threading.Lock(), False
        self.address = ctypes.c_void_p()
        kernels.state_create(ctypes.byref(self.address))

    def check(self, rank: int, name: Callable[[int], str] = "rank {}".format) -> None:
        """Raise if a kernel has failed. No CUDA call."""
        with self._lock:
            word = 0 if self._closed else self._kernels.state_problem(self.address)
        if not word:
            return
        culprit, missing, stage = (word & 15) - 1, word >> 4 & 15, word >> 8
        if stage == OVERLAP:
            raise CommunicatorError(
                f"{name(rank)}: two one-shot sums of {name(culprit)} ran at the same "
                "time, on two streams. Results since then are not to be used. Replay graphs on the "
                "stream of the other calls, or let the streams wait for each other."
            )
        raise CommunicatorTimeout(
            f"{name(rank)}: the one-shot kernel of {name(culprit)} timed out waiting for "
            f"{name(missing)}, which did not make the same call or exited. Results since then are "
            "not to be used. Close the communicator and make a new one."
        )

    def abort(self) -> None:
        """End the kernels that wait, and every later one."""
        with self._lock:
            if not self._closed:
                self._kernels.state_abort(self.address)

    def await_graphs(self) -> int:
        """The number of graphs alive that hold a sum, once CUDA had time to report ended ones."""
        deadline = time.monotonic() + timings.TIMINGS.graph_end_s
        while (count := self._kernels.state_graphs(self.address)) and time.monotonic() < deadline:
            time.sleep(timings.TIMINGS.stream_poll_s)
        return int(count)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._kernels.state_destroy(self.address)


class Oneshot:
    """The arenas of a group of ranks, mapped into each other. Collective to make.

    Raises Unsupported on every rank if one of them cannot: another node, no kernel, no way between
    the GPUs, or a first sum that comes out wrong.
    """

    def __init__(self, coor: Coordinator, device: int, timeout_s: float) -> None:
        self.coor, self.rank, self.world_size = coor, coor.rank, coor.world_size
        self._device = device
        self._last_stream: torch.cuda.Stream | None = None
        self._call = KernelCall(struct_size=ctypes.sizeof(KernelCall))
        self._call.world, self._call.num_here = self.world_size, 1
        self._call.first = self.rank
        self.set_timeout(timeout_s)
        self._imported: list[ctypes.c_void_p] = []
        self._own = ExitStack()  # to free in close()
        try:
            exports = self._on_all_ranks(self._export_arena)
            self._on_all_ranks(lambda: self._map_arenas(exports))
            self._on_all_ranks(self._check_sums)
        except Exception:  # on every rank
            with suppress(DrumlineError):  # a peer that died since keeps what it mapped
                self.close()
            raise

    def set_timeout(self, timeout_s: float) -> None:
        """Give later sums this deadline; a graph keeps that of its capture."""
        self._call.timeout_ns = int(timeout_s * 1e9)

    def _on_all_ranks(self, step: Callable[[], Any]) -> list[Any]:
        """Every rank's result of the step; Unsupported on all if it failed on one. Collective."""

        def on_device() -> Any:
            try:
                with torch.cuda.device(self._device):
                    return step()
            except DrumlineError as error:
                raise Unsupported(f"{self.coor.rank_name()}: {error}") from error

        return self.coor.run_on_all_ranks(on_device, error_class=WORK_ERRORS)

    def _export_arena(self) -> dict[str, Any]:
        """Create this rank's arena; what peers need to map it."""
        if self.world_size not in ONE_SHOT_BYTES:
            raise Unsupported(f"one-shot sums are for 2, 4, 6 or 8 ranks, not {self.world_size}")
        if self.coor.local_world_size != self.world_size:
            raise Unsupported("one-shot sums are for the ranks of one node")
        self._kernels = Kernels()
        self._kernels.load(self.world_size)
        self.state = KernelState(self._kernels)
        self._own.callback(self.state.close)
        self._call.state = self.state.address
        arena, handle = ctypes.c_void_p(), ctypes.create_string_buffer(HANDLE_BYTES)
        self._kernels.create(ctypes.byref(arena))
        self._own.callback(self._kernels.destroy, arena)
        self._kernels.export(arena, handle)
        return {"device": self._device, "pointer": arena.value, "handle": handle.raw}

    def _map_arenas(self, exports: list[dict[str, Any]]) -> None:
        for rank, export in enumerate(exports):
            if self._is_same_process(rank):
                self._kernels.reach(export["device"])
                self._call.arena[rank] = export["pointer"]
                continue
            arena = ctypes.c_void_p()
            self._kernels.import_(export["handle"], ctypes.byref(arena))
            self._imported.append(arena)
            self._call.arena[rank] = arena.value

    def _is_same_process(self, rank: int) -> bool:
        """True for a rank that is a thread of this process. Two containers may have equal pids."""
        peer = self.coor.peers[rank]
        return peer.is_visible and peer.pid == os.getpid()

    def _check_sums(self) -> None:
        """Sum known numbers: drivers have been seen to report peer access that does not work."""
        tensor = torch.full((4096,), float(self.rank + 1), device=f"cuda:{self._device}")
        for algorithm in Algorithm:
            self.sum(tensor.clone(), result := torch.empty_like(tensor), algorithm)
            torch.cuda.synchronize()
            self.check()
            expected = self.world_size * (self.world_size + 1) / 2
            if not bool((result == expected).all()):
                raise CommunicatorError(f"a first {algorithm.name} sum came out wrong")

    def check(self) -> None:
        """Raise CommunicatorTimeout if a kernel has given up waiting, CommunicatorError if two ran
        at the same time. No CUDA call."""
        self.state.check(self.rank, self.coor.rank_name)

    def sum(self, tensor: torch.Tensor, out: torch.Tensor, algorithm: Algorithm) -> None:
        """Enqueue the sum of every rank's tensor into out, which may be tensor."""
        self.check()
        stream = torch.cuda.current_stream(self._device)
        if self._last_stream is None or stream != self._last_stream:  # no stream != None, to torch
            self._follow_last_stream(stream)
        call, nbytes = self._call, tensor.nbytes
        call.algorithm, call.dtype, call.nbytes = algorithm, dtype_info(tensor.dtype).number, nbytes
        call.blocks = num_blocks(self.world_size, nbytes, algorithm)
        call.in_[self.rank], call.out[self.rank] = tensor.data_ptr(), out.data_ptr()
        call.stream = stream.cuda_stream
        with torch.cuda.device(self._device):
            self._kernels.launch(ctypes.byref(call))

    def _follow_last_stream(self, stream: torch.cuda.Stream) -> None:
        """Let the stream wait for the sums on the last one: all of them use one arena.

        A capture waits for nothing outside of it; if its replay overlaps, the kernel says so.
        """
        if is_capturing(stream):
            return
        if self._last_stream is not None and not is_capturing(self._last_stream):
            stream.wait_stream(self._last_stream)
        self._last_stream = stream

    def prepare_close(self) -> None:
        """Wait until no rank uses the arenas any longer. Collective.

        Raises CommunicatorError on every rank while a graph of one of them holds a sum.
        """
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
        counts = self.coor.allgather_object(self.state.await_graphs())
        if any(counts):
            holders = ", ".join(
                f"{n} on {self.coor.rank_name(rank)}" for rank, n in enumerate(counts) if n
            )
            raise CommunicatorError(
                f"{self.coor.rank_name()}: close() while CUDA graphs that hold one-shot sums are "
                f"alive ({holders}): a replay would use memory that is freed. Delete or reset() "
                "the graphs first, on every rank, or call abort()."
            )

    def close(self) -> None:
        """Give back what is there, once prepared. Collective: a peer may have mapped this arena."""
        with torch.cuda.device(self._device):
            for arena in reversed(self._imported):
                self._kernels.close(arena)
            self.coor.barrier()
            self._own.close()


def is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % VECTOR_BYTES == 0
