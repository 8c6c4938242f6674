"""Sums of small tensors in one kernel, for ranks of one node whose GPUs reach each other.

comm = Communicator(coor, backend="nccl", oneshot=True)
comm.allreduce(tensor)       # by the kernel where choose() says so, by NCCL otherwise

The kernel (csrc/cuda/oneshot.cu) is optional: csrc/scripts/build_cuda.sh builds it where nvcc is.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch

from communicator.errors import CommunicatorError, CommunicatorTimeout, DrumlineError, Unsupported
from coordinator import Coordinator

LIBRARY = os.path.join(os.path.dirname(__file__), "_oneshot.so")
ABI = 1
MAX_RANKS = 8
MAX_BLOCKS = 24
HANDLE_BYTES = 64
VECTOR_BYTES = 16
THREADS = 512
KIB = 1024

DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # as in communicator.h
# Up to how many bytes each way was published to win over NCCL on GPUs joined by NVLink (vLLM
# pull requests 24111 and 24532, SGLang issue 2904), kept below where they cross.
ONE_SHOT_BYTES = {2: 512 * KIB, 4: 256 * KIB, 6: 128 * KIB, 8: 64 * KIB}
TWO_SHOT_BYTES = {2: 512 * KIB, 4: 512 * KIB, 6: 512 * KIB, 8: 256 * KIB}


class Algorithm(IntEnum):
    ONE_SHOT = 1  # every rank reads everything
    TWO_SHOT = 2  # every rank adds up a part, and the others fetch it


def choose(world_size: int, nbytes: int, dtype: torch.dtype) -> Algorithm | None:
    """How to sum; None leaves it to NCCL. Of nothing but these three, so that all ranks agree."""
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


class Call(ctypes.Structure):
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
        ("error", ctypes.c_void_p),
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

    def __getattr__(self, name: str) -> Callable[..., None]:
        """oneshot_<name>, raising CommunicatorError if CUDA refuses."""
        function = getattr(self._library, f"oneshot_{name.rstrip('_')}")

        def checked(*values: Any) -> None:
            if code := function(*values):
                text = self._library.oneshot_error_text(code).decode()
                raise CommunicatorError(f"one-shot {name} failed in CUDA: {text} ({code})")

        return checked


class ErrorWord:
    """Where a kernel that gave up waiting says who did not come: host memory that the GPU sees."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._host = ctypes.POINTER(ctypes.c_uint32)()
        self.address = ctypes.c_void_p()
        kernels.error_create(ctypes.byref(self._host), ctypes.byref(self.address))

    def check(self, rank: int) -> None:
        if word := self._host[0]:
            raise CommunicatorTimeout(
                f"rank {rank}: the one-shot kernel of rank {(word & 15) - 1} waited in vain for "
                f"rank {word >> 4 & 15}, which did not make the same call or is gone. Results "
                "since then are not to be used. Close the communicator and make a new one."
            )

    def close(self) -> None:
        self._kernels.error_destroy(self._host)


class Oneshot:
    """The arenas of a group of ranks, mapped into each other. Collective to make.

    Raises Unsupported on every rank if one of them cannot: another node, no kernel, no way between
    the GPUs, or a first sum that comes out wrong.
    """

    def __init__(self, coor: Coordinator, device: int) -> None:
        self.coor, self.rank, self.world_size = coor, coor.rank, coor.world_size
        self._device, self._closed = device, False
        self._captured = False  # then graphs may use the arenas for as long as the process lasts
        self._call = Call(struct_size=ctypes.sizeof(Call), world=self.world_size, num_here=1)
        self._call.first = self.rank
        self._call.timeout_ns = int(coor.timeout_s * 1e9)
        self._imported: list[ctypes.c_void_p] = []
        offers = self._together(self._offer)
        self._together(lambda: self._reach(offers))
        self._together(self._try)

    def _together(self, step: Callable[[], Any]) -> list[Any]:
        """step on every rank, then one exchange of how it went; the same decision everywhere."""
        mine: dict[str, Any] = {"problem": "", "result": None}
        try:
            with torch.cuda.device(self._device):
                mine["result"] = step()
        except DrumlineError as error:
            mine["problem"] = str(error)
        said = [json.loads(data) for data in self.coor.allgather(json.dumps(mine).encode())]
        for peer, theirs in zip(self.coor.peers, said, strict=True):
            if theirs["problem"]:
                raise Unsupported(f"rank {self.rank}: {peer}: {theirs['problem']}")
        return [theirs["result"] for theirs in said]

    def _offer(self) -> dict[str, Any]:
        """What the peers need to map this rank's arena."""
        if self.world_size not in ONE_SHOT_BYTES:
            raise Unsupported(f"one-shot sums are for 2, 4, 6 or 8 ranks, not {self.world_size}")
        if self.coor.local_world_size != self.world_size:
            raise Unsupported("one-shot sums are for the ranks of one node")
        self._kernels = Kernels()
        self._error = ErrorWord(self._kernels)
        self._call.error = self._error.address
        self._arena = ctypes.c_void_p()
        self._kernels.create(ctypes.byref(self._arena))
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        self._kernels.export(self._arena, handle)
        return {
            "device": self._device,
            "pointer": self._arena.value,
            "handle": handle.raw.hex(),
        }

    def _reach(self, offers: list[dict[str, Any]]) -> None:
        for rank, offer in enumerate(offers):
            if self._is_here(rank):
                self._kernels.reach(offer["device"])
                self._call.arena[rank] = offer["pointer"]
                continue
            arena = ctypes.c_void_p()
            self._kernels.import_(bytes.fromhex(offer["handle"]), ctypes.byref(arena))
            self._imported.append(arena)
            self._call.arena[rank] = arena.value

    def _is_here(self, rank: int) -> bool:
        """Is it a thread of this process? Two containers may each have a process of one number."""
        peer = self.coor.peers[rank]
        return peer.is_visible and peer.pid == os.getpid()

    def _try(self) -> None:
        """Add up numbers that are known: drivers have been seen to claim a way that is none."""
        tensor = torch.full((4096,), float(self.rank + 1), device=f"cuda:{self._device}")
        for algorithm in Algorithm:
            self.sum(tensor.clone(), found := torch.empty_like(tensor), algorithm)
            torch.cuda.synchronize()
            self.check()
            expected = self.world_size * (self.world_size + 1) / 2
            if not bool((found == expected).all()):
                raise CommunicatorError(f"a first {algorithm.name} sum came out wrong")

    def check(self) -> None:
        """Raise CommunicatorTimeout if a kernel has given up waiting."""
        self._error.check(self.rank)

    def sum(self, tensor: torch.Tensor, out: torch.Tensor, algorithm: Algorithm) -> None:
        """Enqueue the sum of every rank's tensor into out, which may be tensor."""
        self.check()
        self._captured = self._captured or torch.cuda.is_current_stream_capturing()
        call, nbytes = self._call, tensor.nbytes
        call.algorithm, call.dtype, call.nbytes = algorithm, DTYPES[tensor.dtype], nbytes
        call.blocks = num_blocks(self.world_size, nbytes, algorithm)
        call.in_[self.rank], call.out[self.rank] = tensor.data_ptr(), out.data_ptr()
        call.stream = torch.cuda.current_stream(self._device).cuda_stream
        with torch.cuda.device(self._device):
            self._kernels.launch(ctypes.byref(call))

    def close(self) -> None:
        """Give the arenas back. Collective: a peer may still be reading this one.

        If a sum was captured in a graph they stay, a few MiB, for the graph holds their addresses.
        """
        if self._closed or self._captured:
            return
        self._closed = True
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            self.coor.barrier()
            for arena in reversed(self._imported):
                self._kernels.close(arena)
            self.coor.barrier()
            self._kernels.destroy(self._arena)
        self._error.close()


def is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % VECTOR_BYTES == 0
