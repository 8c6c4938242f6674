"""Libraries that speak csrc/abi/communicator.h: ours for shared memory, and any vendor's.

comm = Communicator(coor, backend="path/to/libvendor.so")
comm.allreduce(torch.ones(4))
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import secrets
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from communicator import _native
from communicator.base import Communicator
from communicator.errors import CommunicatorError, DrumlineError, PeerLost, Unsupported
from communicator.first_call_check import FirstCalls
from coordinator import Coordinator

ONE_NODE = 1 << 1  # COMM_CAP_ONE_NODE of communicator.h
THREADS = 1 << 2  # COMM_CAP_THREADS
EMPTY = 1 << 3  # COMM_CAP_EMPTY
TORCH_DEVICE = {1: "cpu", 2: "cuda", 10: "cuda"}  # from DLDeviceType; torch calls ROCm "cuda"


class Native(Communicator):
    """A communicator whose work is done by a C library. Options are given to it as "key=value".

    What the library leaves out is built from its send and recv. Arguments are checked in C, where
    that costs nanoseconds.
    """

    path: ClassVar[str]
    trusted: ClassVar[bool] = False  # that its probe does not crash
    compares: ClassVar[bool] = False  # does the library itself compare every call?
    _first_calls: FirstCalls | None = None

    def __init__(self, coor: Coordinator, backend: Any = None, **options: Any) -> None:
        super().__init__(coor, backend, **options)
        self._compare_first_calls()

    def _compare_first_calls(self) -> None:
        if self._checked_calls > 0 and self.world_size > 1 and not self.compares:
            self._first_calls = FirstCalls(self, self._checked_calls)

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        plugin = _native.open(cls.path)
        if plugin.caps & ONE_NODE and coor.local_world_size != coor.world_size:
            raise Unsupported(
                f"{plugin.name} works within one node, and {coor.local_world_size} of the "
                f"{coor.world_size} ranks are on this one"
            )
        processes = {(peer.host, peer.memory, peer.pid) for peer in coor.peers}
        if not plugin.caps & THREADS and len(processes) < coor.world_size:
            raise Unsupported(
                f"{plugin.name} cannot have two ranks in one process, and here ranks are threads"
            )
        if not cls.trusted:
            plugin.try_probe()
        return plugin.probe()

    _comm: _native.Comm

    def _open(self, **options: Any) -> None:
        self._plugin = _native.open(self.path)
        self._offers = frozenset(name for name in _ENTRIES if self._plugin.offers(name))
        self._takes_empty = bool(self._plugin.caps & EMPTY)
        name, unique_id = self._agree()
        error: Exception | None = None
        try:
            self._comm = self._plugin.init(
                self.rank,
                self.world_size,
                self.coor,
                device=-1 if self.device_type == "cpu" else self._device().index,
                timeout_ms=max(1, int(self.timeout_s * 1000)),
                name=name,
                unique_id=unique_id,
                options=[f"{key}={value}" for key, value in options.items()],
            )
        except (DrumlineError, ValueError) as caught:
            error = caught
        self._all_or_none(error)
        if type(self).allreduce is Native.allreduce:  # called most, so without a step in between
            self.allreduce = self._comm.allreduce  # type: ignore[method-assign]

    def _agree(self) -> tuple[str, bytes]:
        """A name no other group has, and rank 0's unique id; all must have the same library."""
        unique_id = self._plugin.unique_id() if self.rank == 0 else b""
        mine = {
            "library": [self._plugin.name, self._plugin.version],
            "name": f"{self.coor.info.launch_id}-{secrets.token_hex(4)}",
            "unique_id": unique_id.hex(),
        }
        everyones = [json.loads(data) for data in self.coor.allgather(json.dumps(mine).encode())]
        for rank, theirs in enumerate(everyones):
            if theirs["library"] != mine["library"]:
                raise Unsupported(
                    f"rank {self.rank}: this rank has {' '.join(mine['library'])}, rank {rank} has "
                    f"{' '.join(theirs['library'])}. Their messages may differ; install the same "
                    "version everywhere."
                )
        return everyones[0]["name"], bytes.fromhex(everyones[0]["unique_id"])

    def _all_or_none(self, error: Exception | None) -> None:
        """Fail on every rank if one could not join: the others would wait for it."""
        said = self.coor.allgather(str(error or "").encode())
        if error is not None:
            raise error
        for rank, text in enumerate(said):
            if text:
                self._close()
                raise CommunicatorError(
                    f"rank {self.rank}: rank {rank} could not join the {self._plugin.name} "
                    f"communicator, so nobody can use it. It says: {text.decode()}"
                )

    def _compare(self, call: str, tensor: torch.Tensor | None = None, how: str = "") -> None:
        """Done already, by _first_calls or by the library."""

    def _is_capturing(self) -> bool:
        return (
            self.device_type == "cuda"
            and torch.cuda.is_available()
            and torch.cuda.is_current_stream_capturing()
        )

    def _raise_if_lost(self, call: str) -> None:
        """Raise PeerLost if who is waited for will not come any more."""
        if gone := self._lost_peers():
            raise PeerLost(
                f"rank {self.rank} lost a peer before {call}.{gone} Start all ranks again, and "
                "look at what those printed last."
            )

    def _close(self) -> None:
        if self._first_calls is not None:
            self._first_calls.step_aside()
        if hasattr(self, "_comm"):  # not if joining failed
            self._comm.close()

    def abort(self) -> None:
        """From any thread: calls that wait and later ones raise PeerLost, here and on the peers."""
        self._comm.abort()

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor in memory that the peers reach: allreduce in place of such tensors copies least.

        Not collective, but of use only if every rank has one. Let go of it before the communicator
        is closed, or its memory is given back only when the process ends.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        numel = math.prod(sizes)
        if self.world_size == 1 or numel == 0 or "mem_alloc" not in self._offers:
            return torch.empty(sizes, dtype=dtype, device=self._device())
        if self.device_type != "cpu":
            raise Unsupported(
                f"rank {self.rank}: empty over {self._plugin.name}: its mem_alloc gives memory of "
                f"{self._device()}, of which no tensor is made here. Use torch.empty(..., "
                "device=comm.device), which every collective takes."
            )
        nbytes = numel * dtype.itemsize
        address = self._comm.mem_alloc(nbytes)
        memory = (ctypes.c_byte * nbytes).from_address(address)
        weakref.finalize(memory, _give_back, self._comm, address).atexit = False
        return torch.frombuffer(memory, dtype=dtype).view(sizes)

    def allreduce(
        self, tensor: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._comm.allreduce(tensor, op, out)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        if "broadcast" not in self._offers:
            return super().broadcast(tensor, src)
        return self._comm.broadcast(tensor, src)

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: str = "sum") -> torch.Tensor:
        if "reduce" not in self._offers:
            return super().reduce(tensor, dst, op)
        return self._comm.reduce(tensor, dst, op)

    def allgather(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if "allgather" not in self._offers:
            return super().allgather(tensor, out=out)
        if out is None:
            self._check("allgather", tensor)
            out = tensor.new_empty((self.world_size, *tensor.shape))
        return self._comm.allgather(tensor, out)

    def reduce_scatter(
        self, tensor: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if "reduce_scatter" not in self._offers:
            return super().reduce_scatter(tensor, op, out=out)
        if out is None:
            self._check("reduce_scatter", tensor)
            out = tensor.new_empty(tensor.shape[1:])
        return self._comm.reduce_scatter(tensor, op, out)

    def alltoall(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if "alltoall" not in self._offers:
            return super().alltoall(tensor, out=out)
        if out is None:
            self._check("alltoall", tensor)
            out = torch.empty_like(tensor)
        return self._comm.alltoall(tensor, out)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        if self._pending is None:
            self._comm.send(tensor, dst)
        else:
            super().send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        if self._pending is None:
            return self._comm.recv(tensor, src)
        return super().recv(tensor, src)

    def barrier(self) -> None:
        if "barrier" in self._offers:
            self._comm.barrier()
        else:
            super().barrier()

    def _send(self, tensor: torch.Tensor, dst: int) -> None:
        self._comm.send(tensor, dst)

    def _recv(self, tensor: torch.Tensor, src: int) -> None:
        self._comm.recv(tensor, src)

    def _allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        self._comm.allreduce(tensor, op, out)

    def _exchange(self, calls: list[tuple[str, torch.Tensor, int]]) -> None:
        if "group_start" not in self._offers:
            return super()._exchange(calls)
        self._comm.group_start()
        try:
            for kind, tensor, peer in calls:
                (self._comm.send if kind == "send" else self._comm.recv)(tensor, peer)
        finally:
            self._comm.group_end()


_ENTRIES = (
    "broadcast",
    "reduce",
    "allgather",
    "reduce_scatter",
    "alltoall",
    "barrier",
    "group_start",
    "mem_alloc",
)


def _give_back(comm: _native.Comm, address: int) -> None:
    try:
        comm.mem_free(address)
    except DrumlineError:
        pass  # closed before: the process gives it back


class Shm(Native):
    """Ranks of one node through shared memory: processes or threads, any number of them.

    instructions: "plain", "avx2" or "avx512" for the code that adds, of what the processor has;
        the best if not given.
    stores: "ordinary" or "streaming" for those that hand tensors over; measured if not given. The
        results have the same bits with any.
    """

    name = "shm"
    path = os.path.join(os.path.dirname(__file__), "_shm.abi3.so")
    trusted = True
    compares = True


def library(path: str) -> type[Native]:
    """The class for the library at path. Raises Unsupported if it does not speak communicator.h."""
    plugin = _native.open(path)
    if plugin.device_type not in TORCH_DEVICE:
        raise Unsupported(f"{path} moves memory of device type {plugin.device_type}, unknown here")
    device_type = TORCH_DEVICE[plugin.device_type]
    return type("Library", (Native,), {"name": path, "path": path, "device_type": device_type})
