"""Libraries that implement csrc/abi/communicator.h: ours for shared memory, and any vendor's.

comm = Communicator(coor, backend="path/to/libvendor.so")
comm.allreduce(torch.ones(4))
"""

from __future__ import annotations

import ctypes
import math
import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

import communicator._native as _native
from communicator.backends.byte_streams import ByteStreams
from communicator.base import Communicator
from communicator.calls.default_collectives import P2PCall
from communicator.calls.dtypes import Op
from communicator.calls.failures import describe_lost, run_on_all_ranks
from communicator.errors import DrumlineError, PeerLost, Unsupported
from communicator.interceptors.call_checker import CallChecker
from coordinator import Coordinator

ONE_NODE = 1 << 1  # COMM_CAP_ONE_NODE of communicator.h
THREADS = 1 << 2  # COMM_CAP_THREADS
EMPTY = 1 << 3  # COMM_CAP_EMPTY
MAX_TIMEOUT_MS = 2**31 - 1
TORCH_DEVICE = {1: "cpu", 2: "cuda", 10: "cuda"}  # from DLDeviceType; torch calls ROCm "cuda"


class PluginCommunicator(Communicator):
    """A communicator whose work is done by a C library. Options are given to it as "key=value".

    Arguments are checked in C, where that costs nanoseconds. The methods here call the entries of
    the library; `load` makes a class in which those that a library lacks are composed instead.
    """

    path: ClassVar[str]
    is_trusted: ClassVar[bool] = False  # not to crash in its probe
    agrees_in_init: ClassVar[bool] = False  # on its version, and whether it failed on a rank
    _comm: _native.Comm
    _call_checker: CallChecker | None = None

    def __init__(self, coor: Coordinator, backend: Any = None, **options: Any) -> None:
        super().__init__(coor, backend, **options)
        declared = self.capabilities
        is_checked = declared.checked_calls > 0 and not declared.compares_every_call
        if is_checked and self.world_size > 1:
            self._call_checker = CallChecker(self, declared.checked_calls)
            self._call_checker.install(self)

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
        if not cls.is_trusted:
            plugin.try_probe()
        return plugin.probe()

    def do_open(self, **options: Any) -> None:
        self._load_plugin()
        name, unique_id = ("", b"") if self.agrees_in_init else self._agree()
        try:
            if self.agrees_in_init:
                self._init(name, unique_id, options)
            else:
                run_on_all_ranks(self.coor, lambda: self._init(name, unique_id, options))
        except Exception:
            self.do_close()
            raise

    def _straight(self) -> dict[str, Callable[..., Any]]:
        is_own = type(self).allreduce is PluginCommunicator.allreduce
        return {"allreduce": self._comm.allreduce} if is_own else {}

    def _init(self, name: str, unique_id: bytes, options: dict[str, Any]) -> None:
        self._comm = self._plugin.init(
            self.rank,
            self.world_size,
            self.coor,
            device=-1 if self.device_type == "cpu" else self.device.index,
            timeout_ms=_milliseconds(self.timeout_s),
            name=name,
            unique_id=unique_id,
            options=[f"{key}={value}" for key, value in options.items()],
        )
        self._comm.name_rank(self._me)

    def _load_plugin(self) -> None:
        self._plugin = _native.open(self.path)
        empty = bool(self._plugin.caps & EMPTY)
        self.capabilities = replace(
            self.capabilities, empty_messages=empty, empty_collectives=empty
        )

    def _agree(self) -> tuple[str, bytes]:
        """A name no other group has, and rank 0's unique id; all must have the same library."""
        library = f"{self._plugin.name} {self._plugin.version}"
        name = f"{self.coor.info.launch_id}-{secrets.token_hex(4)}"
        unique_id = self._plugin.unique_id() if self.rank == 0 else b""
        proposals = self.coor.allgather_object([library, name, unique_id])
        for rank, (other, _, _) in enumerate(proposals):
            if other != library:
                raise Unsupported(
                    f"{self._me}: this rank has {library}, {self.rank_name(rank)} has {other}. "
                    "Their messages may differ; install the same version everywhere."
                )
        return proposals[0][1], proposals[0][2]

    def _check_same_call(
        self, call: str, tensor: torch.Tensor | None = None, details: str = ""
    ) -> None:
        """Done already, by the CallChecker or by the library."""

    def is_capturing(self) -> bool:
        """True while torch's current stream is captured in a CUDA graph."""
        return (
            self.device_type == "cuda"
            and torch.cuda.is_available()
            and torch.cuda.is_current_stream_capturing()
        )

    def check_peers(self, call: str) -> None:
        """Raise PeerLost if a peer that the call would wait for is known dead."""
        if lost := self._lost_peers():
            raise PeerLost(
                f"{self._me} lost a peer before {call}.{describe_lost(lost)} Start all ranks "
                "again, and look at what those printed last.",
                lost,
            )

    def do_close(self) -> None:
        if self._call_checker is not None:
            self._call_checker.remove()
        if hasattr(self, "_comm"):  # not if init failed
            self._comm.close()

    def set_timeout(self, timeout_s: float) -> None:
        if self._plugin.offers("set_timeout"):
            self._comm.set_timeout(_milliseconds(timeout_s))
        elif self.device_type == "cpu":  # else the deadline is that of waiting for the stream
            raise Unsupported(
                f"{self._me}: {self._plugin.name} keeps the deadline that it was made with. Make a "
                "new communicator."
            )
        super().set_timeout(timeout_s)

    def abort(self) -> None:
        """Let waiting and later calls raise PeerLost, here and on the peers; any thread may."""
        self._comm.abort()

    @property
    def streams(self) -> ByteStreams | None:
        """Streams beside the calls, until close(); None if the library has none."""
        return self._comm if self._plugin.offers("stream_check") and self.world_size > 1 else None

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor in memory that the peers reach: allreduce in place of such tensors copies least.

        Not collective, but of use only if every rank has one. Let go of it before the communicator
        is closed, or its memory is given back only when the process ends.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if self.world_size == 1 or math.prod(sizes) == 0:
            return torch.empty(sizes, dtype=dtype, device=self.device)
        return self._empty_shared(sizes, dtype)

    def _empty_shared(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.device_type != "cpu":
            raise Unsupported(
                f"{self._me}: empty over {self._plugin.name}: its mem_alloc gives memory of "
                f"{self.device}, of which no tensor is made here. Use torch.empty(..., "
                "device=comm.device), which every collective takes."
            )
        nbytes = math.prod(sizes) * dtype.itemsize
        address = self._comm.mem_alloc(nbytes)
        memory = (ctypes.c_byte * nbytes).from_address(address)
        weakref.finalize(memory, _mem_free, self._comm, address).atexit = False
        return torch.frombuffer(memory, dtype=dtype).view(sizes)

    def allreduce(
        self, tensor: torch.Tensor, op: Op = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._comm.allreduce(tensor, op, out)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        return self._comm.broadcast(tensor, src)

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: Op = "sum") -> torch.Tensor:
        return self._comm.reduce(tensor, dst, op)

    def allgather(
        self,
        tensor: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        dim: int | None = None,
        sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        if dim is not None or sizes is not None:
            return super().allgather(tensor, out=out, dim=dim, sizes=sizes)
        if out is None:
            size = self.world_size
            out = self._new("allgather", tensor, lambda shape: (size, *shape))
        return self._comm.allgather(tensor, out)

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: Op = "sum",
        *,
        out: torch.Tensor | None = None,
        dim: int | None = None,
        sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        if dim is not None or sizes is not None:
            return super().reduce_scatter(tensor, op, out=out, dim=dim, sizes=sizes)
        if out is None:
            out = self._new("reduce_scatter", tensor, lambda shape: shape[1:])
        return self._or_decline(lambda: self._comm.reduce_scatter(tensor, op, out))

    def alltoall(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            self._check("alltoall", tensor)
            out = torch.empty_like(tensor)
        return self._or_decline(lambda: self._comm.alltoall(tensor, out))

    def _new(
        self,
        call: str,
        tensor: torch.Tensor,
        shape_of: Callable[[torch.Size], tuple[int, ...]],
    ) -> torch.Tensor:
        """An empty tensor for the result of a call, in which C then checks both."""
        try:
            return tensor.new_empty(shape_of(tensor.shape))
        except Exception:
            self._check(call, tensor)  # which says why it is none to move
            raise

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        if self._pending is None:
            self._note_peer(dst)
            self._comm.send(tensor, dst)
        else:
            super().send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        if self._pending is None:
            self._note_peer(src)
            return self._comm.recv(tensor, src)
        return super().recv(tensor, src)

    def barrier(self) -> None:
        self._comm.barrier()

    def do_decline(self, why: str) -> None:
        if self._plugin.offers("decline"):
            self._comm.decline(why)
        elif self._call_checker is not None:
            self._call_checker.decline(why)

    def do_send(self, tensor: torch.Tensor, dst: int) -> None:
        self._comm.send(tensor, dst)

    def do_recv(self, tensor: torch.Tensor, src: int) -> None:
        self._comm.recv(tensor, src)

    def do_allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: str) -> None:
        self._comm.allreduce(tensor, op, out)

    def do_gather(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int) -> None:
        self._comm.gather(tensor, out, dst)

    def do_scatter(self, out: torch.Tensor, rows: torch.Tensor | None, src: int) -> None:
        self._comm.scatter(out, rows, src)

    def do_allgatherv(self, out: torch.Tensor, tensor: torch.Tensor, counts: list[int]) -> None:
        self._comm.allgatherv(tensor, out, counts)

    def do_reduce_scatterv(
        self, out: torch.Tensor, tensor: torch.Tensor, counts: list[int], op: Op
    ) -> None:
        self._comm.reduce_scatterv(tensor, op, out, counts)

    def do_group(self, calls: list[P2PCall]) -> None:
        self._comm.group_start()
        try:
            for kind, tensor, peer in calls:
                (self._comm.send if kind == "send" else self._comm.recv)(tensor, peer)
        finally:
            self._comm.group_end()


def _milliseconds(timeout_s: float) -> int:
    return min(max(1, int(timeout_s * 1000)), MAX_TIMEOUT_MS)


def _mem_free(comm: _native.Comm, address: int) -> None:
    try:
        comm.mem_free(address)
    except DrumlineError:
        pass  # closed before: the process gives it back


def _empty_private(
    self: PluginCommunicator, sizes: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device=self.device)


# By optional entry of the library: the method that calls it, and what stands in for it.
REPLACEMENTS = {
    "broadcast": ("broadcast", Communicator.broadcast),
    "reduce": ("reduce", Communicator.reduce),
    "allgather": ("allgather", Communicator.allgather),
    "reduce_scatter": ("reduce_scatter", Communicator.reduce_scatter),
    "alltoall": ("alltoall", Communicator.alltoall),
    "gather": ("do_gather", Communicator.do_gather),
    "scatter": ("do_scatter", Communicator.do_scatter),
    "allgatherv": ("do_allgatherv", Communicator.do_allgatherv),
    "reduce_scatterv": ("do_reduce_scatterv", Communicator.do_reduce_scatterv),
    "barrier": ("barrier", Communicator.barrier),
    "group_start": ("do_group", Communicator.do_group),
    "mem_alloc": ("_empty_shared", _empty_private),
}


def load(path: str) -> type[PluginCommunicator]:
    """The class for the library at path, each of whose methods is decided here.

    Raises Unsupported if the library does not implement communicator.h.
    """
    plugin = _native.open(path)
    if plugin.device_type not in TORCH_DEVICE:
        raise Unsupported(f"{path} moves memory of device type {plugin.device_type}, unknown here")
    attributes = {"name": path, "path": path, "device_type": TORCH_DEVICE[plugin.device_type]}
    missing = [REPLACEMENTS[entry] for entry in REPLACEMENTS if not plugin.offers(entry)]
    return type("Library", (PluginCommunicator,), {**attributes, **dict(missing)})
