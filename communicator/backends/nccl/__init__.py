"""GPUs through NCCL (or RCCL), with torch's own copy of the library.

comm = Communicator(Coordinator(), backend="nccl")
comm.allreduce(torch.ones(4, device=f"cuda:{comm.coor.local_rank}"))
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from communicator.backends.nccl import nccl_library
from communicator.backends.nccl.exit_notice import Farewell
from communicator.backends.nccl.nccl_library import NcclLibrary, version_text
from communicator.backends.nccl.oneshot import Oneshot, choose, is_aligned
from communicator.backends.plugin import Native
from communicator.errors import (
    CommunicatorError,
    CommunicatorTimeout,
    DrumlineError,
    PeerLost,
    Unsupported,
)
from coordinator import Coordinator

SCORE = 200
WATCH_S = 0.25
GRACE_S = 1.0  # between seeing a peer dead and giving up what it may have finished
POLL_S = 0.0005
PAGE = 4096  # NCCL_WIN_REQUIRED_ALIGNMENT


def _naming(call: str) -> Any:
    """Native's method of this name; if the peers are to blame its error names those that died."""
    method = getattr(Native, call)

    @functools.wraps(method)
    def named(self: Nccl, *values: Any, **options: Any) -> Any:
        try:
            return method(self, *values, **options)
        except (PeerLost, CommunicatorTimeout) as error:
            raise self._blaming(error) from error

    return named


def _quick_allreduce(comm: Nccl) -> Callable[..., torch.Tensor]:
    """The same for allreduce, which is called most: one frame of Python above the C call."""
    call, owner = comm._comm.allreduce, weakref.ref(comm)

    def allreduce(
        tensor: torch.Tensor, op: Any = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        try:
            return call(tensor, op, out)
        except (PeerLost, CommunicatorTimeout) as error:
            if (found := owner()) is None:
                raise
            raise found._blaming(error) from error

    return functools.update_wrapper(allreduce, Native.allreduce)


class Nccl(Native):
    """Work goes on torch's current stream; `with torch.cuda.stream(s):` chooses another.

    library: the path of libnccl.so.2; None looks for it. All ranks must have the same build.
    device: the CUDA device of this rank, its local rank of the launch if not given.
    stream: a torch.cuda.Stream for everything this communicator does, instead of the current one.
    blocking: NCCL's own blocking mode. Calls return sooner (NCCL starts no thread for each), but a
        peer that is gone while NCCL connects is waited for without a deadline.
    max_ctas: how many thread blocks a call may use at most.
    oneshot: sum small tensors by a kernel of our own (oneshot.py). Unsupported on every rank if
        one of them cannot.
    checked_calls: how many of the first collectives are compared over the Coordinator before they
        are enqueued (32; 0 for none): each waits for the slowest rank. None while captured.

    A call may be captured in a CUDA graph once the same call has run outside, where NCCL connects.
    """

    name = "nccl"
    device_type = "cuda"
    path = os.path.join(os.path.dirname(__file__), "_nccl.abi3.so")
    trusted = True

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        if not torch.cuda.is_available():
            raise Unsupported("torch sees no CUDA device in this process")
        if coor.info.local_rank >= torch.cuda.device_count():
            raise Unsupported(
                f"local rank {coor.info.local_rank} has no GPU of its own among the "
                f"{torch.cuda.device_count()} here"
            )
        nccl_library.find()
        return SCORE

    _watch: _Watch | None = None
    _finalized = False
    _lost = ""  # who or what ended this communicator
    _farewell: Farewell
    _small: Oneshot | None = None
    _own_coor: Coordinator | None = None  # made for this communicator alone, by split()

    def _open(  # type: ignore[override]  # these options and no others
        self,
        library: str | None = None,
        device: int | None = None,
        stream: torch.cuda.Stream | None = None,
        blocking: bool = False,
        max_ctas: int | None = None,
        oneshot: bool = False,
    ) -> None:
        self._ordinal = self.coor.info.local_rank if device is None else device
        self._stream = stream
        self._retired: list[int] = []  # blocks to free when no graph is being captured
        self._found, self._problem = _find(library)
        options: dict[str, Any] = {
            "library": getattr(self._found, "path", ""),
            "blocking": blocking,
        }
        if stream is not None:
            options["stream"] = stream.cuda_stream
        if max_ctas is not None:
            options["max_ctas"] = max_ctas
        super()._open(**{key: int(v) if isinstance(v, bool) else v for key, v in options.items()})
        self._start()
        if oneshot:
            self._small = Oneshot(self.coor, self._ordinal)
            self.allreduce = self._small_or_not

    def _start(self) -> None:
        """Make the first connections now, with a deadline, and watch the others from here on."""
        self.allreduce = _quick_allreduce(self)
        if torch.cuda.is_available():
            try:
                self.barrier()
                self.synchronize()
            except DrumlineError:
                self.abort()
                raise
        if self.world_size > 1:
            self._watch = _Watch(self)
            self._watch.start()

    def _agree(self) -> tuple[str, bytes]:
        """Rank 0's unique id, once all ranks are known to have the same build of NCCL."""
        name = f"{self.coor.info.launch_id}-{secrets.token_hex(4)}"
        mine: dict[str, Any] = {"problem": self._problem, "name": name}
        if self._found is not None:
            size = os.path.getsize(self._found.path)
            mine |= {"build": [self._found.version, size], "path": self._found.path}
        if self.rank == 0 and self._found is not None:
            try:
                mine["unique_id"] = self._found.unique_id().hex()
            except Unsupported as error:
                mine["problem"] = str(error)
        everyones = [json.loads(data) for data in self.coor.allgather(json.dumps(mine).encode())]
        self._compare_libraries(everyones)
        self._farewell = Farewell(self.coor, everyones[0]["name"])
        return everyones[0]["name"], bytes.fromhex(everyones[0]["unique_id"])

    def _compare_libraries(self, everyones: list[dict[str, Any]]) -> None:
        """Raise Unsupported, on every rank alike, unless all have the same library."""
        for rank, theirs in enumerate(everyones):
            if theirs["problem"]:
                raise Unsupported(f"rank {self.rank}: {self.coor.peers[rank]}: {theirs['problem']}")
        if len({tuple(theirs["build"]) for theirs in everyones}) > 1:
            found = "; ".join(
                f"rank {rank} has NCCL {version_text(theirs['build'][0])} at {theirs['path']} "
                f"({theirs['build'][1]} bytes)"
                for rank, theirs in enumerate(everyones)
            )
            raise Unsupported(
                f"rank {self.rank}: the ranks have different NCCL libraries, whose messages may "
                f"differ: {found}. Install the same one everywhere, or name it with library=."
            )

    @property
    def library(self) -> NcclLibrary:
        """The NCCL in use: its path and version."""
        assert self._found is not None
        return self._found

    def _device(self) -> torch.device:
        return torch.device("cuda", self._ordinal)

    # Waiting, and learning of the end of others.

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait for what is enqueued on the stream, but not for ever.

        Raises PeerLost if a peer died meanwhile (then results are not to be used), and
        CommunicatorTimeout if the stream is not done in time.
        """
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        with torch.cuda.device(self._ordinal):
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream or torch.cuda.current_stream())
        while not event.query():
            if time.monotonic() > deadline:
                raise CommunicatorTimeout(
                    f"rank {self.rank}: the stream was not done in time: some rank did not make "
                    f"the same calls.{self._lost_peers()} abort() ends what waits on the GPU."
                )
            time.sleep(POLL_S)
        if self._small is not None:
            self._small.check()
        try:
            self._comm.async_error()
        except PeerLost as error:
            raise self._blaming(error) from error

    def _blaming(self, error: DrumlineError) -> DrumlineError:
        """The error with the names of the dead, or why this communicator was ended meanwhile."""
        if isinstance(self._comm, _Lost):
            return self._comm.tell()
        return type(error)(f"{error}{self._lost_peers_soon()}")

    def _lost_peers_soon(self) -> str:
        """Sockets of a process that ends are closed before it is seen dead: wait for that."""
        deadline = time.monotonic() + GRACE_S
        while not (gone := self._lost_peers()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return gone

    def _raise_if_lost(self, call: str) -> None:
        if isinstance(self._comm, _Lost):  # the watch sees to it, and abort()
            raise self._comm.tell()

    def _look_around(self) -> str:
        """In words, why no call can succeed any more; empty while all is well."""
        if died := self._farewell.died():
            time.sleep(GRACE_S)
            return f"a peer died. Gone: {', '.join(map(str, died))}."
        try:
            self._comm.async_error()
        except DrumlineError as error:
            return f"{error}{self._lost_peers_soon()}"
        return ""

    def abort(self) -> None:
        """From any thread: calls that wait and later ones raise PeerLost. Bounded in time.

        Every rank must abort, for NCCL does not tell the peers. Kernels that wait are ended; while
        a graph that captured this communicator is alive, NCCL frees its memory only later.
        """
        self._lose("abort() was called", is_told=True)

    def _lose(self, why: str, is_told: bool = False) -> None:
        if self._lost or self._closed:
            return
        self._lost = why
        comm, lost = self._comm, _Lost(self.rank, why, is_told)
        self._comm = lost  # type: ignore[assignment]
        if self._first_calls is not None:
            self._first_calls.step_aside()
        self.__dict__.pop("allreduce", None)  # the quick one, which has the old handle
        comm.abort()

    # Ending.

    def close(self) -> None:
        """Wait for what is enqueued and give everything back. Every rank closes.

        Raises CommunicatorError, and stays open, while a CUDA graph that captured this communicator
        is alive: NCCL would wait for it for ever. Delete or reset() the graph first.
        Raises PeerLost, and is closed, if a peer died and no call has said so yet: what was
        enqueued may not have happened. While another exception is in flight that is a warning.
        """
        self._end(is_failing=sys.exc_info()[0] is not None)

    def _end(self, is_failing: bool) -> None:
        if self._closed:
            return
        lost = self._comm if isinstance(self._comm, _Lost) else None
        problem = self._finish() if lost is None else None if lost.is_told else lost.tell()
        super().close()
        if problem is not None and not is_failing:
            raise problem
        if problem is not None:
            warnings.warn(str(problem), RuntimeWarning, stacklevel=3)

    def _finish(self) -> DrumlineError | None:
        """The orderly end, after which peers know that this rank did not die. What went wrong."""
        self._free_retired()
        try:
            self._comm.finalize()
        except (PeerLost, CommunicatorTimeout) as error:  # then it has been aborted
            return self._blaming(error)
        self._finalized = True
        if self._watch is not None:
            self._watch.stop()
        if self._small is not None:
            self._small.close()
        if self.world_size > 1:
            self._farewell.say()
        return None

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        if hasattr(self, "_comm") and not self._finalized:  # another rank could not join
            self._comm.abort()
        super()._close()
        if self._own_coor is not None and not self._lost:
            self._own_coor.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:  # the others may be elsewhere: wait for nobody
            self.abort()
        self._end(is_failing=error is not None)

    def __del__(self) -> None:
        """Never calls NCCL: its ends wait for other ranks, and garbage is collected anywhere."""
        if not getattr(self, "_closed", True) and hasattr(self, "_comm") and not self._lost:
            self._closed = True
            warnings.warn(
                f"rank {self.rank}: a Communicator over nccl was forgotten without close(); NCCL "
                "keeps its memory until the process ends. Use `with`.",
                ResourceWarning,
                stacklevel=2,
            )

    allreduce = _naming("allreduce")
    broadcast = _naming("broadcast")
    reduce = _naming("reduce")
    allgather = _naming("allgather")
    reduce_scatter = _naming("reduce_scatter")
    alltoall = _naming("alltoall")
    send = _naming("send")
    recv = _naming("recv")
    barrier = _naming("barrier")

    # Small sums.

    def _small_or_not(
        self, tensor: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """allreduce where oneshot was asked for: size, dtype and op decide, alike on every rank."""
        way = None
        if op == "sum" and isinstance(tensor, torch.Tensor):
            way = choose(self.world_size, tensor.nbytes, tensor.dtype)
        if way is None or self._small is None or tensor.device != self._device():
            return type(self).allreduce(self, tensor, op, out=out)  # type: ignore[no-any-return]
        self._check("allreduce", tensor)
        self._comm.async_error()
        out = tensor if out is None else self._check_out("allreduce", out, tensor.shape, tensor)
        with torch.cuda.stream(self._stream):
            if is_aligned(tensor) and is_aligned(out):
                self._small.sum(tensor, out, way)
            else:  # this may be so on some ranks only, and the others are in the kernel
                self._small.sum(copy := tensor.clone(), copy, way)
                out.copy_(copy)
        return out

    # What NCCL has beyond the common operations.

    def scaled_sum(self, scale: float, dtype: torch.dtype) -> Any:
        """An op for allreduce, reduce and reduce_scatter of dtype: the sum of scale * tensor.

        It belongs to this communicator and lasts as long.
        """
        return self._comm.scaled_sum(torch.tensor(scale, dtype=dtype))

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor in memory that NCCL's collectives use without a copy. Collective.

        Memory of ncclMemAlloc, registered as a symmetric window where the library has them. It is
        freed with the last view of it, which waits for the GPU. A graph does not keep it alive.
        Raises CommunicatorError on every rank if one has no room.
        """
        self._check_outside_capture("empty")
        self._free_retired()
        sizes = torch.Size([shape] if isinstance(shape, int) else shape)
        numel = sizes.numel()
        if numel == 0:
            return torch.empty(sizes, dtype=dtype, device=self._device())
        nbytes = -(-numel * dtype.itemsize // PAGE) * PAGE
        self._agree_on_room(nbytes)
        block = _Block(self, self._comm.mem_alloc(nbytes), nbytes)
        whole = torch.as_tensor(block, device=self._device())
        return whole[: numel * dtype.itemsize].view(dtype).view(sizes)

    def _agree_on_room(self, nbytes: int) -> None:
        """Raise on every rank if one has no room: the others would wait for it inside NCCL."""
        if self.world_size == 1:
            return
        problem = ""
        try:
            with torch.cuda.device(self._ordinal):
                self.library.try_mem_alloc(nbytes)
        except Unsupported as error:
            problem = str(error)
        for peer, said in zip(self.coor.peers, self.coor.allgather(problem.encode()), strict=True):
            if said:
                raise CommunicatorError(
                    f"rank {self.rank}: empty of {nbytes} bytes is for all ranks or none, and "
                    f"{peer} cannot have it: {said.decode()} Ask for less, or free memory there."
                )

    def _check_outside_capture(self, call: str) -> None:
        self._check_open(call)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CommunicatorError(
                f"rank {self.rank}: {call} inside the capture of a graph, which memory that is "
                "registered would break. Call it before the capture."
            )

    def _free_retired(self) -> None:
        while self._retired and not torch.cuda.is_current_stream_capturing():
            self._comm.mem_free(self._retired.pop())

    def split(self, ranks: Sequence[int]) -> Nccl | None:
        """A communicator over some ranks of this one, in the order given; None on the others.

        Collective over all ranks of this one, with the same ranks. Quicker than a new one, for NCCL
        knows the way between them.
        """
        self._check_outside_capture("split")
        coor = self.coor.split(ranks)
        mine = list(ranks).index(self.rank) if self.rank in ranks else -1
        made = self._comm.split(-1 if mine < 0 else 0, max(mine, 0), max(mine, 0), len(ranks))
        return None if coor is None or made is None else self._child(coor, made)

    def _child(self, coor: Coordinator, made: Any) -> Nccl:
        child = object.__new__(Nccl)
        child.coor = child._own_coor = coor
        child._farewell = Farewell(coor, "split")
        child.rank, child.world_size = coor.rank, coor.world_size
        child.timeout_s, child._closed = self.timeout_s, False
        child._plugin, child._offers, child._comm = self._plugin, self._offers, made
        child._ordinal, child._stream, child._found = self._ordinal, self._stream, self._found
        child._retired = []
        child._start()
        child._checked_calls = self._checked_calls
        child._compare_first_calls()
        return child


def _find(path: str | None) -> tuple[NcclLibrary | None, str]:
    """The library, or in words why there is none: the others must hear it before they wait."""
    try:
        return nccl_library.find(path), ""
    except Unsupported as error:
        return None, str(error)


def _ended(rank: int, why: str) -> str:
    return (
        f"rank {rank}: this communicator has ended: {why} Close it and make a new one over the "
        "ranks that are left."
    )


class _Lost:
    """Stands where a communicator's handle was that has been aborted.

    is_told: does whoever uses the communicator know?
    """

    def __init__(self, rank: int, why: str, is_told: bool) -> None:
        self._text, self.is_told = _ended(rank, why), is_told

    def close(self) -> None:
        pass

    abort = close

    def tell(self) -> PeerLost:
        self.is_told = True
        return PeerLost(self._text)

    def __getattr__(self, name: str) -> Any:
        raise self.tell()


class _Watch(threading.Thread):
    """Looks, a few times a second, whether the peers live, and aborts if not.

    A kernel that waits for a dead peer would wait for ever, and whoever synchronizes with it. Makes
    no CUDA call: one could end the capture of a graph.
    """

    def __init__(self, comm: Nccl) -> None:
        super().__init__(name=f"nccl watch of rank {comm.rank}", daemon=True)
        self._comm = weakref.ref(comm)
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(WATCH_S) and self._look():
            pass

    def _look(self) -> bool:
        comm = self._comm()
        if comm is None or comm._closed or comm._lost:
            return False
        why = comm._look_around()
        if why and not self._stopped.is_set():
            comm._lose(why)
        return not why

    def stop(self) -> None:
        self._stopped.set()


class _Block:
    """Memory of NCCL's that torch sees by the CUDA array interface; freed with its last view."""

    def __init__(self, comm: Nccl, address: int, nbytes: int) -> None:
        self._comm, self._library = weakref.ref(comm), comm.library
        self._address, self._device = address, comm._ordinal
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        comm = self._comm()
        registered = comm is not None and not comm._closed and not comm._lost
        if comm is not None and registered and torch.cuda.is_current_stream_capturing():
            return comm._retired.append(self._address)
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            if comm is not None and registered:
                comm._comm.mem_free(self._address)
            else:
                self._library.mem_free(self._address)
