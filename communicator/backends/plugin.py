"""Libraries that implement csrc/abi/communicator.h: ours for shared memory, and any vendor's.

comm = Communicator(coor, backend="path/to/libvendor.so")
comm.allreduce(torch.ones(4))
"""

from __future__ import annotations

import ctypes
import secrets
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import torch

import communicator._native as _native
from communicator.backend import COMPOSED, Backend
from communicator.backends.byte_streams import ByteStreams
from communicator.calls.arguments import sample_on_meta
from communicator.calls.call_check import describe_call
from communicator.calls.checked_calls import CheckedCalls
from communicator.calls.default_collectives import P2PCall
from communicator.calls.dtypes import Op
from communicator.errors import WORK_ERRORS, DrumlineError, Unsupported
from communicator.interceptors.call_checker import CallChecker
from coordinator import Coordinator

ONE_NODE = 1 << 1  # COMM_CAP_ONE_NODE of communicator.h
THREADS = 1 << 2  # COMM_CAP_THREADS
EMPTY = 1 << 3  # COMM_CAP_EMPTY
MAX_TIMEOUT_MS = 2**31 - 1
TORCH_DEVICE = {1: "cpu", 2: "cuda", 10: "cuda"}  # from DLDeviceType; torch calls ROCm "cuda"


class LibraryCalls(CheckedCalls):
    """Calls whose arguments are checked in C, where that costs nanoseconds.

    `load` makes a class in which those that the library lacks are checked in Python.
    """

    backend: PluginBackend

    def straight(self) -> dict[str, Callable[..., Any]]:
        kind, calls = type(self.backend), {"send": self.send, "recv": self.recv}
        for name in ("allreduce", "broadcast", "reduce", "barrier"):
            if getattr(kind, name) is getattr(PluginBackend, name):  # not a subclass's own
                calls[name] = getattr(self.backend._comm, name)
        return calls

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        self.backend.broadcast(tensor, src)
        return tensor

    def allreduce(
        self, tensor: torch.Tensor, op: Op = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.backend.allreduce(tensor if out is None else out, tensor, op)
        return tensor if out is None else out

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: Op = "sum") -> torch.Tensor:
        self.backend.reduce(tensor if self.rank == dst else None, tensor, dst, op)
        return tensor

    def allgather(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            size = self.world_size
            out = self._new("allgather", tensor, lambda shape: (size, *shape))
        self.backend.allgather(out, tensor)
        return out

    def reduce_scatter(
        self, tensor: torch.Tensor, op: Op = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        result = out
        if result is None:
            result = self._new("reduce_scatter", tensor, lambda shape: shape[1:])
        self.or_decline(lambda: self.backend.reduce_scatter(result, tensor, op))
        return result

    def alltoall(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        result = out
        if result is None:
            self.backend.check_tensor("alltoall", tensor)
            result = torch.empty_like(tensor)
        self.or_decline(lambda: self.backend.alltoall(result, tensor))
        return result

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        if self.pending is not None:
            return super().send(tensor, dst)
        self._note_peer(dst)
        self.backend.send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        if self.pending is not None:
            return super().recv(tensor, src)
        self._note_peer(src)
        self.backend.recv(tensor, src)
        return tensor

    def barrier(self) -> None:
        self.backend.barrier()

    def _op(self, call: str, op: Op, tensor: torch.Tensor) -> Any:
        """The op as it is: C checks it, and knows NCCL's scaled sums."""
        is_checked = self.backend.offers("reduce_scatterv") or isinstance(op, int)
        return op if is_checked else super()._op(call, op, tensor)

    def _flat(self, parts: torch.Tensor) -> torch.Tensor:
        """The parts in the shape that they have: a library may compare it."""
        return parts

    def _new(
        self, call: str, tensor: torch.Tensor, shape_of: Callable[[torch.Size], tuple[int, ...]]
    ) -> torch.Tensor:
        """An empty tensor for the result of a call, in which C then checks both."""
        try:
            return tensor.new_empty(shape_of(tensor.shape))
        except Exception:
            self.backend.check_tensor(call, tensor)  # which says why it is none to move
            raise


class PluginBackend(Backend):
    """A backend whose work is done by a C library. Options are given to it as "key=value".

    The methods here call the entries of the library; `load` makes a class in which those that a
    library lacks are composed instead.
    """

    path: ClassVar[str]
    calls: ClassVar[type[LibraryCalls]] = LibraryCalls
    is_trusted: ClassVar[bool] = False  # not to crash in its probe
    agrees_in_init: ClassVar[bool] = False  # on its version, and whether it failed on a rank
    call_checker: CallChecker | None = None
    _comm: _native.Comm

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

    def open(self, **options: Any) -> None:
        self._load_plugin()
        name, unique_id = ("", b"") if self.agrees_in_init else self._agree()
        try:
            if self.agrees_in_init:
                self._init(name, unique_id, options)
            else:
                self.coor.run_on_all_ranks(
                    lambda: self._init(name, unique_id, options), error_class=WORK_ERRORS
                )
        except Exception:
            self.close()
            raise
        self._make_call_checker()

    def _make_call_checker(self) -> None:
        """Have the first calls compared, unless the library compares every call. Collective."""
        declared = self.capabilities
        is_checked = declared.checked_calls > 0 and not declared.compares_every_call
        if is_checked and self.world_size > 1:
            self.call_checker = CallChecker(self, declared.checked_calls)

    def own_calls(self) -> LibraryCalls:
        return self.calls(self)

    def offers(self, entry: str) -> bool:
        """True if the library has this entry of communicator.h."""
        return self._plugin.offers(entry)

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
        self._dropped: list[int] = []  # addresses of tensors that nobody uses any longer
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

    def compare_call(
        self, call: str, tensor: torch.Tensor | None = None, details: str = ""
    ) -> None:
        """Compare a call whose arguments Python checks first; others have been compared before."""
        if self.call_checker is not None and call not in self.call_checker.names:
            self.call_checker.compare_first(describe_call(call, tensor, details))

    def close(self) -> None:
        if self.call_checker is not None:
            self.call_checker.remove()
        if hasattr(self, "_comm"):  # not if init failed
            _free(self._comm, self._dropped)
            self._comm.close()

    def set_timeout(self, timeout_s: float) -> None:
        if self.offers("set_timeout"):
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
        return self._comm if self.offers("stream_check") and self.world_size > 1 else None

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor in memory that the peers reach: allreduce in place of such tensors copies least.

        Not collective, but of use only if every rank has one. Let go of it before the communicator
        is closed, or its memory is given back only when the process ends.
        """
        like = sample_on_meta(self._me, shape, dtype)
        if self.world_size == 1 or like.numel() == 0:
            return torch.empty_like(like, device=self.device)
        return self._empty_shared(like)

    def _empty_shared(self, like: torch.Tensor) -> torch.Tensor:
        if self.device_type != "cpu":
            raise Unsupported(
                f"{self._me}: empty over {self._plugin.name}: its mem_alloc gives memory of "
                f"{self.device}, of which no tensor is made here. Use torch.empty(..., "
                "device=comm.device), which every collective takes."
            )
        _free(self._comm, self._dropped)
        address = self._comm.mem_alloc(like.nbytes)
        memory = (ctypes.c_byte * like.nbytes).from_address(address)
        weakref.finalize(memory, _free, self._comm, self._dropped, address).atexit = False
        return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)

    def allreduce(self, out: torch.Tensor, tensor: torch.Tensor, op: Op) -> None:
        self._comm.allreduce(tensor, op, None if out is tensor else out)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self._comm.broadcast(tensor, src)

    def reduce(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int, op: Op) -> None:
        if out is not None and out is not tensor:
            tensor = out.copy_(tensor)
        self._comm.reduce(tensor, dst, op)

    def allgather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._comm.allgather(tensor, out)

    def allgatherv(self, out: torch.Tensor, tensor: torch.Tensor, counts: list[int]) -> None:
        self._comm.allgatherv(tensor, out, counts)

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, op: Op) -> None:
        self._comm.reduce_scatter(tensor, op, out)

    def reduce_scatterv(
        self, out: torch.Tensor, tensor: torch.Tensor, counts: list[int], op: Op
    ) -> None:
        self._comm.reduce_scatterv(tensor, op, out, counts)

    def alltoall(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._comm.alltoall(tensor, out)

    def gather(self, out: torch.Tensor | None, tensor: torch.Tensor, dst: int) -> None:
        self._comm.gather(tensor, out, dst)

    def scatter(self, out: torch.Tensor, rows: torch.Tensor | None, src: int) -> None:
        self._comm.scatter(out, rows, src)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self._comm.send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        self._comm.recv(tensor, src)

    def barrier(self) -> None:
        self._comm.barrier()

    def decline(self, why: str) -> None:
        if self.offers("decline"):
            self._comm.decline(why)
        elif self.call_checker is not None:
            self.call_checker.decline(why)

    def group(self, calls: list[P2PCall]) -> None:
        self._comm.group_start()
        try:
            for kind, tensor, peer in calls:
                (self._comm.send if kind == "send" else self._comm.recv)(tensor, peer)
        finally:
            self._comm.group_end()


def _milliseconds(timeout_s: float) -> int:
    return min(max(1, int(timeout_s * 1000)), MAX_TIMEOUT_MS)


def _free(comm: _native.Comm, dropped: list[int], *addresses: int) -> None:
    """Free these, and those that were dropped before. Waits for no call of another thread, which
    may wait for this one: until that ends they are dropped, and the next empty() frees them."""
    dropped += addresses
    with suppress(DrumlineError, IndexError):  # closed before: the process gives it back
        while dropped:
            address = dropped.pop()
            if not comm.mem_free(address, False):
                return dropped.append(address)


def _empty_private(self: PluginBackend, like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, device=self.device)


# By optional entry of the library: the method that calls it, and what stands in for it.
REPLACEMENTS = {
    **{entry: (entry, getattr(Backend, entry)) for entry in COMPOSED},
    "group_start": ("group", Backend.group),
    "mem_alloc": ("_empty_shared", _empty_private),
}


def load(path: str) -> type[PluginBackend]:
    """The class for the library at path, each of whose methods is decided here.

    Raises Unsupported if the library does not implement communicator.h.
    """
    plugin = _native.open(path)
    if plugin.device_type not in TORCH_DEVICE:
        raise Unsupported(f"{path} moves memory of device type {plugin.device_type}, unknown here")
    attributes = {"name": path, "path": path, "device_type": TORCH_DEVICE[plugin.device_type]}
    missing = [entry for entry in REPLACEMENTS if not plugin.offers(entry)]
    checked = {name: getattr(CheckedCalls, name) for name in missing if hasattr(CheckedCalls, name)}
    calls = type("Calls", (LibraryCalls,), checked)
    methods = dict(REPLACEMENTS[entry] for entry in missing)
    return type("Library", (PluginBackend,), {**attributes, "calls": calls, **methods})
