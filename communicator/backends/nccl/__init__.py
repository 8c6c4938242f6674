"""GPUs through NCCL (or RCCL), with torch's own copy of the library.

comm = Communicator(Coordinator(), backend="nccl")
comm.allreduce(torch.ones(4, device=f"cuda:{comm.coor.local_rank}"))
"""

from __future__ import annotations

import functools
import os
import secrets
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

import communicator._native as _native
from communicator import timings
from communicator.backend import Backend
from communicator.backends.nccl import nccl_library, shrink
from communicator.backends.nccl.exit_notice import ExitNotice
from communicator.backends.nccl.given_stream import GivenStream
from communicator.backends.nccl.nccl_library import NcclLibrary
from communicator.backends.nccl.oneshot import Algorithm, Oneshot, is_aligned, select_algorithm
from communicator.backends.nccl.ras import ras_text
from communicator.backends.nccl.registered_memory import RegisteredMemory
from communicator.backends.nccl.watchdog import Watchdog
from communicator.backends.plugin import LibraryCalls, PluginBackend
from communicator.calls.dtypes import op_name
from communicator.calls.failures import describe_lost
from communicator.errors import (
    CommunicatorError,
    CommunicatorTimeout,
    DrumlineError,
    PeerLost,
    Unsupported,
    with_text,
)
from coordinator import Coordinator, RankFailure

SCORE = 200


def _adding_dead_peers(call: str) -> Any:
    """PluginBackend's method of this name, whose errors also name the peers that died."""
    method = getattr(PluginBackend, call)

    @functools.wraps(method)
    def wrapped(self: Nccl, *args: Any, **kwargs: Any) -> Any:
        self.check_not_aborted()
        if self.given_stream is not None:
            self.given_stream.follow_current(call)
        try:
            result = method(self, *args, **kwargs)
        except (PeerLost, CommunicatorTimeout) as error:
            raise self.with_dead_peers(error) from error
        if self.given_stream is not None:
            self.given_stream.keep([*args, *kwargs.values(), result])
        return result

    return wrapped


def _fast_allreduce(backend: Nccl) -> Callable[..., torch.Tensor]:
    """allreduce as _adding_dead_peers makes it, with one frame of Python above the C call."""
    native, owner = backend._comm.allreduce, weakref.ref(backend)

    def allreduce(
        tensor: torch.Tensor, op: Any = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        try:
            return native(tensor, op, out)
        except (PeerLost, CommunicatorTimeout) as error:
            if (backend := owner()) is None:
                raise
            raise backend.with_dead_peers(error) from error
        except (TypeError, ValueError):  # that it has ended matters more
            if (backend := owner()) is not None:
                backend.check_not_aborted()
            raise

    return functools.update_wrapper(allreduce, LibraryCalls.allreduce)


class NcclCalls(LibraryCalls):
    """Calls of NCCL, whose errors also name the peers that died; small sums by oneshot."""

    backend: Nccl

    def straight(self) -> dict[str, Callable[..., Any]]:
        is_plain = self.backend.given_stream is None and self.backend.oneshot is None
        calls = super().straight()
        return {**calls, "allreduce": _fast_allreduce(self.backend)} if is_plain else calls

    def allreduce(
        self, tensor: torch.Tensor, op: Any = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """By oneshot if it is open, and size, dtype and op say so, identically on every rank."""
        algorithm = self.backend.oneshot_algorithm(tensor, op)
        if algorithm is None:
            return super().allreduce(tensor, op, out=out)
        self.backend.check_tensor("allreduce", tensor)
        if out is not None:
            self.backend.check_out("allreduce", out, tensor.shape, tensor)
        self.backend.sum_in_one_shot(tensor, tensor if out is None else out, algorithm)
        return tensor if out is None else out


class Nccl(PluginBackend):
    """Work goes on torch's current stream; `with torch.cuda.stream(s):` chooses another.

    library: the path of libnccl.so.2; None looks for it. All ranks must have the same build.
    stream: a torch.cuda.Stream for everything this communicator does, instead of the current one.
        It waits for what the current one has to do when a call is made; before results are used,
        let the current one wait for it: torch.cuda.current_stream().wait_stream(stream).
    blocking: NCCL's own blocking mode. Calls return sooner (NCCL starts no thread for each), but a
        peer that dies while NCCL connects is waited for without a deadline.
    max_ctas: how many thread blocks a call may use at most.
    oneshot: sum small tensors by a kernel of our own (oneshot.py). Unsupported on every rank if
        one of them cannot.
    revoke: once a peer is lost, revoke NCCL's communicator instead of aborting it, so that the
        ranks that are left can make theirs with shrink_of=. Not yet seen to succeed on a GPU.
    shrink_of: a Communicator with revoke=True that has lost peers, in place of a new rendezvous of
        NCCL's. The ranks are those of it that are left, in its order.
    ras: where NCCL's RAS listens, as in NCCL_RAS_ADDR ("localhost:28028"): what it answers is added
        to the error of a hang.
    checked_calls: how many of the first collectives are compared over the Coordinator before they
        are enqueued (32; 0 for none): each waits for the slowest rank. None while captured.

    A call may be captured in a CUDA graph once the same call has run outside, where NCCL connects.
    """

    name = "nccl"
    device_type = "cuda"
    path = os.path.join(os.path.dirname(__file__), "_nccl.abi3.so")
    calls = NcclCalls
    is_trusted = True
    closes_when_forgotten = False
    # Composed, since NCCL has no such calls.
    gather, scatter = Backend.gather, Backend.scatter
    allgatherv = Backend.allgatherv
    reduce_scatterv = Backend.reduce_scatterv  # type: ignore[assignment]  # of any op

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        if not torch.cuda.is_available():
            raise Unsupported("torch sees no CUDA device in this process")
        nccl_library.find()
        return SCORE

    _watchdog: Watchdog | None = None
    _is_finalized = False
    _end_reason = ""  # why this communicator was aborted
    _end_failures: tuple[RankFailure, ...] = ()
    _is_end_known = False  # to its user: an error said so, or the user called abort()
    _exit_notice: ExitNotice
    oneshot: Oneshot | None = None
    given_stream: GivenStream | None = None

    def open(  # type: ignore[override]  # these options and no others
        self,
        library: str | None = None,
        stream: torch.cuda.Stream | None = None,
        blocking: bool = False,
        max_ctas: int | None = None,
        oneshot: bool = False,
        revoke: bool = False,
        shrink_of: Any = None,
        ras: str | None = None,
        existing: _native.Comm | None = None,
    ) -> None:
        """existing: a communicator of NCCL's to use, instead of opening one."""
        self._stream, self._ras_address = stream, ras
        if stream is not None:
            self.given_stream = GivenStream(stream, self._me)
        self._library, self._library_problem = nccl_library.find_or_problem(library)
        if existing is None:
            options: dict[str, Any] = {"blocking": int(blocking)}
            options["library"] = getattr(self._library, "path", "")
            if stream is not None:
                options["stream"] = stream.cuda_stream
            if max_ctas is not None:
                options["max_ctas"] = max_ctas
            if revoke:
                options["revoke"] = 1
            if shrink_of is not None:
                options |= shrink.options(self, shrink_of)
            super().open(**options)
        else:
            self._load_plugin()
            self._comm = existing
            self._comm.name_rank(self._me)
            self._make_call_checker()
        self._memory = RegisteredMemory(self)
        try:
            self._exit_notice = ExitNotice(self.coor)
            self._connect()
            if oneshot:
                self.oneshot = Oneshot(self.coor, self.device.index, self.timeout_s)
        except BaseException:
            self.abort()
            self.close()
            raise

    def _connect(self) -> None:
        """Make the first connections now, with a deadline, and start to watch for failures."""
        if torch.cuda.is_available():
            if torch.version.hip is None:
                nccl_library.warn_of_driver()
            self.barrier()
            self.synchronize()
        if self.world_size > 1:
            self._watchdog = Watchdog(self)
            self._watchdog.start()

    def _agree(self) -> tuple[str, bytes]:
        """Rank 0's unique id, once all ranks are known to have the same build of NCCL."""
        proposal: dict[str, Any] = {
            "problem": self._library_problem,
            "name": f"{self.coor.info.launch_id}-{secrets.token_hex(4)}",
        }
        if self._library is not None:
            size = os.path.getsize(self._library.path)
            proposal |= {"build": [self._library.version, size], "path": self._library.path}
        if self.rank == 0 and self._library is not None:
            try:
                proposal["unique_id"] = self._library.unique_id()
            except Unsupported as error:
                proposal["problem"] = str(error)
        if not self.is_gpu_named and torch.cuda.is_available():
            proposal["gpu"] = str(torch.cuda.get_device_properties(self.device).uuid)
        proposals = self.coor.allgather_object(proposal)
        nccl_library.check_same(self._me, self.coor.peers, proposals)
        nccl_library.check_gpus(self._me, self.rank_name, [one.get("gpu") for one in proposals])
        return proposals[0]["name"], proposals[0]["unique_id"]

    @property
    def library(self) -> NcclLibrary:
        """The NCCL in use: its path and version."""
        assert self._library is not None
        return self._library

    # Waiting, and failures.

    def follow_calls(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait, with a deadline, for what is enqueued on the stream.

        Raises PeerLost if a peer died meanwhile (then results are not to be used), and
        CommunicatorTimeout if the stream is not done in time.
        """
        self.check_outside_capture("synchronize")
        try:
            self._await_stream(self._stream, timeout_s)
        except CommunicatorTimeout as error:
            raise with_text(error, f"{error}{ras_text(self._ras_address)}") from error
        self.check()

    def check(self) -> None:
        """Raise if results are not to be used. Waits for nothing.

        PeerLost if a peer died or NCCL failed, CommunicatorTimeout if a one-shot sum waited in vain
        for a peer, CommunicatorError if one ran beside another. This communicator then has ended.
        Call it after replays of a graph, which raise nothing. Makes no CUDA call, and takes about a
        microsecond; what the watchdog has to find out is known here within seconds.
        """
        self.check_open("check")
        try:
            self._check_library()
        except PeerLost as error:
            raise self.with_dead_peers(error) from error
        except CommunicatorError as error:  # of the kernel, which does nothing from then on
            self.abort_because(PeerLost(str(error)), is_known=True)
            raise

    def _check_library(self) -> None:
        """Raise what a kernel of ours or NCCL has failed of."""
        if self.oneshot is not None:
            self.oneshot.check()
        self._comm.async_error()

    def set_timeout(self, timeout_s: float) -> None:
        super().set_timeout(timeout_s)
        if self.oneshot is not None:
            self.oneshot.set_timeout(timeout_s)

    def with_dead_peers(self, error: DrumlineError) -> DrumlineError:
        """The error with the peers that died, or why this communicator was aborted meanwhile."""
        if self._end_reason:
            return self._end_error()
        lost = self._await_lost_peers()
        text = f"{error}{describe_lost(lost)}"
        if isinstance(error, CommunicatorTimeout):
            text += ras_text(self._ras_address)
        return PeerLost(text, lost) if isinstance(error, PeerLost) else with_text(error, text)

    def _end_error(self) -> PeerLost:
        self._is_end_known = True
        return PeerLost(
            f"{self._me}: this communicator has ended: {self._end_reason} Close it and make "
            "a new one over the ranks that are left.",
            self._end_failures,
        )

    def check_open(self, call: str) -> None:
        super().check_open(call)
        self.check_not_aborted()

    def check_peers(self, call: str) -> None:
        """Leave dead peers to the watchdog, which aborts this communicator."""
        self.check_not_aborted()

    def check_not_aborted(self) -> None:
        """Raise PeerLost if this communicator was aborted: by the watchdog, or abort()."""
        if self._end_reason:
            raise self._end_error()

    def is_usable(self) -> bool:
        return not self.is_closed and not self._end_reason

    def find_failure(self) -> PeerLost | None:
        """Why no call can succeed any longer; None while they can."""
        if lost := self._exit_notice.unannounced(self._lost_peers()):
            time.sleep(timings.TIMINGS.watchdog_grace_s)
            return PeerLost(f"a peer died.{describe_lost(lost)}", lost)
        try:
            self._check_library()
        except DrumlineError as error:
            lost = self._await_lost_peers()
            return PeerLost(f"{error}{describe_lost(lost)}", lost)
        return None

    def abort(self) -> None:
        """From any thread: calls that wait and later ones raise PeerLost. Bounded in time.

        Every rank must abort, for NCCL does not tell the peers. Kernels that wait are ended; while
        a graph that captured this communicator is alive, NCCL frees its memory only later. That of
        one-shot sums, which peers may still read, is kept until the process ends.
        """
        self.abort_because(PeerLost("abort() was called."), is_known=True)

    def abort_because(self, reason: PeerLost, is_known: bool = False) -> None:
        """Abort, from any thread. is_known: to the user, so that close() need not raise it."""
        if not self.is_usable():
            return
        self._end_failures, self._is_end_known = reason.failures, is_known
        self._end_reason = str(reason)
        if self.call_checker is not None:
            self.call_checker.remove()
        if self.oneshot is not None:
            self.oneshot.state.abort()
        self._comm.abort()

    # Closing.

    def finish(self) -> DrumlineError | None:
        """Wait for what is enqueued. Every rank closes.

        Raises CommunicatorError, and stays open, while a CUDA graph that captured this communicator
        is alive: NCCL would wait for it for ever. Delete or reset() the graph first. One that holds
        one-shot sums makes it raise on every rank.
        PeerLost, once closed, if a peer died and no call has said so yet: what was enqueued may not
        have happened. While another exception is in flight that is a warning.
        """
        if not self._end_reason:
            return self._finalize()
        return None if self._is_end_known else self._end_error()

    def leave(self) -> None:
        """Abort: the others may make other calls, so wait for none."""
        self.abort()

    def _finalize(self) -> DrumlineError | None:
        """Close in good order, and announce it to the peers. Returns what went wrong."""
        self._memory.free_dropped()
        try:
            if self.oneshot is not None:
                self.oneshot.prepare_close()
            self._comm.finalize()
        except (PeerLost, CommunicatorTimeout) as error:  # then NCCL was aborted
            return self.with_dead_peers(error)
        self._is_finalized = True
        if self._watchdog is not None:
            self._watchdog.stop()
        if self.oneshot is not None:
            self.oneshot.close()
        if self.world_size > 1:
            self._exit_notice.announce()
        return None

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
        if hasattr(self, "_comm") and not self._is_finalized:  # another rank could not join
            self._comm.abort()
        super().close()
        if hasattr(self, "_memory"):
            self._memory.free_dropped()

    def __del__(self) -> None:
        """Never calls NCCL: its ends wait for other ranks, and garbage is collected anywhere."""
        if hasattr(self, "_comm") and not self.is_closed and not self._end_reason:
            self.is_closed = True
            warnings.warn(
                f"{self._me}: a Communicator over nccl was forgotten without close(); NCCL "
                "keeps its memory until the process ends. Use `with`.",
                ResourceWarning,
                stacklevel=2,
            )

    allreduce = _adding_dead_peers("allreduce")
    broadcast = _adding_dead_peers("broadcast")
    reduce = _adding_dead_peers("reduce")
    allgather = _adding_dead_peers("allgather")
    reduce_scatter = _adding_dead_peers("reduce_scatter")
    alltoall = _adding_dead_peers("alltoall")
    send = _adding_dead_peers("send")
    recv = _adding_dead_peers("recv")
    barrier = _adding_dead_peers("barrier")
    group = _adding_dead_peers("group")

    # Small sums.

    def oneshot_algorithm(self, tensor: torch.Tensor, op: Any) -> Algorithm | None:
        """The algorithm of oneshot for a sum; None for NCCL."""
        if self.oneshot is None or not isinstance(tensor, torch.Tensor) or isinstance(op, int):
            return None
        if op_name(op) != "sum" or tensor.device != self.device:
            return None
        return select_algorithm(self.world_size, tensor.nbytes, tensor.dtype)

    def sum_in_one_shot(
        self, tensor: torch.Tensor, out: torch.Tensor, algorithm: Algorithm
    ) -> None:
        """Enqueue the sum of every rank's tensor into out, which may be tensor."""
        assert self.oneshot is not None
        self._comm.async_error()
        if self.given_stream is not None:
            self.given_stream.follow_current("allreduce")
            self.given_stream.keep([tensor, out])
        with torch.cuda.stream(self._stream):
            if is_aligned(tensor) and is_aligned(out):
                self.oneshot.sum(tensor, out, algorithm)
            else:  # maybe on some ranks only, and the others are in the kernel
                self.oneshot.sum(copy := tensor.clone(), copy, algorithm)
                out.copy_(copy)

    # What NCCL has beyond the common operations.

    def scaled_sum(self, scale: float, dtype: torch.dtype) -> Any:
        """An op for allreduce, reduce and reduce_scatter of dtype: the sum of scale * tensor.

        It belongs to this communicator and lasts as long.
        """
        self.check_open("scaled_sum")
        return self._comm.scaled_sum(torch.tensor(scale, dtype=dtype))

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor in memory that NCCL's collectives use without a copy. Collective.

        Memory of ncclMemAlloc, registered as a symmetric window where the library has them. Once
        its last view is gone, the next empty() or close() waits for the GPU and frees it; after
        close() the last view itself does. A graph does not keep it alive.
        Raises CommunicatorError on every rank if one has no free memory.
        """
        self.check_outside_capture("empty")
        self._memory.free_dropped()
        return self._memory.empty(shape, dtype)

    def mem_alloc(self, nbytes: int) -> int:
        """The address of memory that is registered with this communicator."""
        return self._comm.mem_alloc(nbytes)

    def mem_free(self, address: int) -> None:
        self._comm.mem_free(address)

    def part_options(self, ranks: Sequence[int]) -> dict[str, Any]:
        """Options of a part, which is quicker made than new: NCCL knows the way between its ranks.

        Collective over all ranks of this one, which may name several parts that share no rank: the
        least rank of each is its color. With one color all of them were a single communicator.
        """
        key = ranks.index(self.rank) if self.rank in ranks else 0
        color = min(ranks) if self.rank in ranks else -1
        return {
            "existing": self._comm.split(color, key, key, len(ranks)),
            "timeout_s": self.timeout_s,
            "checked_calls": self.capabilities.checked_calls,
            "library": self.library.path,
            "device": self.device,
            "stream": self._stream,
            "oneshot": bool(self.oneshot and select_algorithm(len(ranks), 16, torch.float32)),
            "ras": self._ras_address,
        }
