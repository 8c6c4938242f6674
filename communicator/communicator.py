"""The class that users hold: collectives and messages among the ranks of a Coordinator.

with Communicator(Coordinator()) as comm:
    comm.allreduce(torch.ones(4))

The way of a call: an interceptor, where there is one; the check of its arguments, in C or
calls/checked_calls.py; the backend (backend.py). The base's `_bind` says which of them a method is.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, final

import torch

import launcher
from communicator.backend import Backend, Capabilities
from communicator.calls import tensor_dict
from communicator.calls.arguments import check_peer, check_settings
from communicator.calls.checked_calls import CheckedCalls
from communicator.calls.dtypes import Op
from communicator.calls.joined_calls import allgather_along, reduce_scatter_along
from communicator.errors import CommunicatorError
from communicator.former_backend import BaseOfFormerBackends
from communicator.interceptors import forks
from communicator.interceptors.background_calls import BackgroundCalls, CallHandle
from communicator.interceptors.interceptor import InterceptedCalls
from communicator.interceptors.recording import Observation, Trace
from communicator.own_gpu import as_device
from communicator.selection import choose
from coordinator import Coordinator


@final
class Communicator(InterceptedCalls, metaclass=BaseOfFormerBackends):
    """Moves tensors among the ranks of a Coordinator. Collective to create.

    coor: the ranks. It stays the caller's, and must outlive the Communicator.
    backend: a name, the path of a vendor's library, or a Backend class; None selects the best that
        every rank can use. A backend that one rank lacks is Unsupported on all of them.
    timeout_s: the deadline of every call; coor's if not given.
    device_type: whose memory it must move, "cpu" or "cuda"; the best backend of any if not given.
    device: the device of this rank's tensors, such as "cuda:1" or 1, which says device_type too. On
        CUDA, if not given, the local rank, or the only GPU that the rank sees.
    checked_calls: how many of the first calls are compared among the ranks before anything moves,
        by backends that do not already compare every call.
    options: passed to the backend.

    Collectives are called by every rank in the same order, with the same shapes, dtypes and op. On
    the CPU a call returns when its result is there. On CUDA it enqueues on torch's current stream.
    op is "sum", "prod", "max", "min", "avg", or a member of torch.distributed.ReduceOp.
    Arguments that cannot work raise ValueError or TypeError before anything moves; a peer that dies
    raises PeerLost, a deadline CommunicatorTimeout.

    What a backend has beyond these methods, as empty() of shared memory, is found here too.
    """

    _backend: Backend
    _closed = True  # until it is open
    _background: BackgroundCalls | None = None
    _messages: Any = None  # of isend and irecv
    _is_aborted = False
    _recorder: launcher.Recorder | None = None
    _part_coor: Coordinator | None = None  # made by split() or over() for this one alone

    def __init__(
        self,
        coor: Coordinator,
        backend: Any = None,
        *,
        timeout_s: float | None = None,
        device_type: str | None = None,
        device: torch.device | str | int | None = None,
        checked_calls: int | None = None,
        **options: Any,
    ) -> None:
        check = functools.partial(check_settings, coor, timeout_s, checked_calls)
        chosen = choose(coor, backend, device_type, device, options, check)
        own = as_device(device)
        self._open(chosen, coor, backend, own, timeout_s, checked_calls, **options)

    @classmethod
    def _of(
        cls,
        chosen: type[Backend],
        coor: Coordinator,
        device: torch.device | str | int | None = None,
        **options: Any,
    ) -> Communicator:
        """Over this backend, which all ranks are known to have chosen. Collective."""
        comm = cls.__new__(cls)
        comm._open(chosen, coor, chosen, as_device(device), **options)
        return comm

    def _open(
        self,
        chosen: type[Backend],
        coor: Coordinator,
        backend: Any,
        device: torch.device | None,
        timeout_s: float | None = None,
        checked_calls: int | None = None,
        **options: Any,
    ) -> None:
        self.coor, self.rank, self.world_size = coor, coor.rank, coor.world_size
        self._backend = chosen(
            coor, timeout_s=timeout_s, device=device, checked_calls=checked_calls
        )
        self._choice = {"backend": backend, "checked_calls": checked_calls, **options}
        self._closed, self._pid, self._opening = False, os.getpid(), threading.Lock()
        forks.track(self)
        self._backend.open(**options)
        self._calls: CheckedCalls = self._backend.own_calls() or CheckedCalls(self._backend)
        self._recorder = launcher.recorder(coor.info)
        self._start_binding(self._calls.straight())
        if self._backend.call_checker is not None:
            self._backend.call_checker.install(self)
        if self._recorder is not None:
            Trace(self._recorder, Communicator, backend=self.backend).install(self)
        coor.live_calls.offer(Observation(self, backend=self.backend))

    @classmethod
    def over(
        cls,
        ranks: Any,
        rank: int | None = None,
        world_size: int | None = None,
        backend: Any = None,
        *,
        timeout_s: float = 300.0,
        **options: Any,
    ) -> Communicator:
        """A Communicator of ranks that have met already, without a Coordinator. Collective.

        ranks: their torch ProcessGroup; or a torch Store that all of them reach, with rank and
            world_size. The other arguments are those of Communicator(coor, ...).

        Its ranks detect failures and encrypt as those of a Coordinator do.
        """
        from communicator.p2p.group_ranks import coordinator_over  # a later package

        coor = coordinator_over(ranks, rank, world_size, timeout_s)
        try:
            comm = cls(coor, backend, timeout_s=timeout_s, **options)
        except BaseException:
            coor.close()
            raise
        comm._part_coor = coor
        return comm

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """A Communicator of some ranks, in this order, made as this one; None on the others.

        Collective over those ranks; over NCCL, which is quicker so, over all ranks of this one.
        Ranks that are in different parts may call at once, each with the ranks of its own.
        """
        self._backend.check_outside_capture("split")
        coor = self.coor.split(ranks)
        try:
            options = self._backend.part_options(ranks)
            if coor is None:
                return None
            if options is not None:
                child = Communicator._of(type(self._backend), coor, **options)
            else:
                gpu = self.device if self._backend.is_gpu_named else None
                choice = {"timeout_s": self.timeout_s, **self._choice}
                child = Communicator(coor, device_type=self.device_type, device=gpu, **choice)
        except BaseException:
            if coor is not None:
                coor.close()
            raise
        child._part_coor = coor
        return child

    # The calls. Their bodies run where nothing else was bound in their place, see _bind().

    def allreduce(
        self, tensor: torch.Tensor, op: Op = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The reduction of every rank's tensor, in place, or into out. Collective.

        Returns the tensor written. All ranks get the same bits.
        """
        return self._calls.allreduce(tensor, op, out=out)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Rank src's tensor, written into every rank's tensor, which is returned. Collective."""
        return self._calls.broadcast(tensor, src)

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: Op = "sum") -> torch.Tensor:
        """The reduction of every rank's tensor, in place on rank dst alone. Collective.

        Returns the tensor; on the other ranks it is unchanged.
        """
        return self._calls.reduce(tensor, dst, op)

    def allgather(
        self,
        tensor: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        dim: int | None = None,
        sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Every rank's tensor, by rank: [world_size, *tensor.shape]. Collective.

        dim: join them along it instead. sizes: of each rank's tensor along dim (0 if None), where
        they differ. Neither goes with out.
        """
        if dim is None and sizes is None:
            return self._calls.allgather(tensor, out=out)
        joined = (self._calls, self.allgather, tensor, out, dim, sizes)
        return self._calls.or_decline(lambda: allgather_along(*joined))

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: Op = "sum",
        *,
        out: torch.Tensor | None = None,
        dim: int | None = None,
        sizes: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Row `rank` of the reduction of every rank's [world_size, *shape]: shape. Collective.

        dim: cut it along this one instead, into equal parts. sizes: into these, one for each rank,
        along dim (0 if None). Neither goes with out.
        """
        if dim is None and sizes is None:
            return self._calls.reduce_scatter(tensor, op, out=out)
        cut = (self._calls, self.reduce_scatter, tensor, op, out, dim, sizes)
        return self._calls.or_decline(lambda: reduce_scatter_along(*cut))

    def alltoall(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Row i of the result is what rank i had in row `rank`: [world_size, *shape]. Collective.

        out must not share memory with tensor.
        """
        return self._calls.alltoall(tensor, out=out)

    def gather(
        self, tensor: torch.Tensor, dst: int = 0, *, dim: int | None = None
    ) -> torch.Tensor | None:
        """Every rank's tensor, by rank, on rank dst: [world_size, *tensor.shape]. Collective.

        None on the other ranks. dim: join them along it instead.
        """
        return self._calls.gather(tensor, dst, dim=dim)

    def scatter(
        self, out: torch.Tensor, rows: torch.Tensor | None = None, src: int = 0
    ) -> torch.Tensor:
        """Row `rank` of the rows of rank src, [world_size, *out.shape], in out. Collective.

        Returns out. rows: of no meaning on the other ranks.
        """
        return self._calls.scatter(out, rows, src)

    def barrier(self) -> None:
        """Return once every rank has called. Collective. On CUDA: once the stream gets there."""
        self._calls.barrier()

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send tensor to rank dst, which calls recv with the same shape and dtype.

        Returns when tensor may be changed again; that may be before dst has received.
        """
        self._calls.send(tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Fill tensor with what rank src sent, and return it. Between two ranks order is kept."""
        return self._calls.recv(tensor, src)

    def group(self) -> AbstractContextManager[None]:
        """Sends and receives inside start together at its end: they cannot wait for each other.

        If the body raises, none of them happens on this rank.
        """
        return self._calls.group()

    def decline(self, why: str) -> None:
        """Stand in for a collective that this rank cannot make: it raises on the others, with why.

        For whoever finds a mistake in arguments that this class does not see, and then raises here.
        Collective, in place of that call. Nothing has moved, and later calls work; but after the
        first checked_calls, tcp and hierarchical end the communicator, as they do where calls
        differ, and over NCCL, MPI and vendors' libraries the others wait until their deadline.
        """
        self._calls.decline(why)

    # Calls that are made of those.

    def send_tensors(self, values: dict[str, Any], dst: int) -> None:
        """Send a dict of tensors and of values as Coordinator.broadcast_object takes them.

        Its tensors are on this communicator's device. Rank dst calls recv_tensors.
        """
        check_peer(self._backend.rank_name(), "send_tensors", dst, self.world_size, "dst")
        tensor_dict.write(self._backend, "send_tensors", values, lambda part: self.send(part, dst))

    def recv_tensors(self, src: int) -> dict[str, Any]:
        """The dict that rank src sends, in new tensors. Not inside a group()."""
        me = self._backend.rank_name()
        check_peer(me, "recv_tensors", src, self.world_size, "src")
        if self._calls.pending is not None:
            raise CommunicatorError(f"{me}: recv_tensors inside a group(); call it outside.")
        return tensor_dict.read(self._backend, lambda tensor: self.recv(tensor, src))

    def broadcast_tensors(
        self, values: dict[str, Any] | None = None, src: int = 0
    ) -> dict[str, Any]:
        """Rank src's dict, as send_tensors takes it, on every rank. Collective."""
        check_peer(self._backend.rank_name(), "broadcast_tensors", src, self.world_size, "src")
        move = functools.partial(self.broadcast, src=src)
        if self.rank != src:
            return tensor_dict.read(self._backend, move)
        values = {} if values is None else values
        tensor_dict.write(self._backend, "broadcast_tensors", values, move)
        return values

    def isend(self, tensor: torch.Tensor, dst: int) -> CallHandle:
        """Start to send tensor to rank dst, which calls irecv; its handle is to be waited for.

        These messages are apart from those of send and recv, and no other call delays them. tensor
        must stay as it is until then. Over backends without streams of their own (all but shm) the
        first isend or irecv is collective: it opens connections. On CUDA messages start together
        when one of them is waited for.
        """
        return self._start_message("send", tensor, dst, "dst")

    def irecv(self, tensor: torch.Tensor, src: int) -> CallHandle:
        """Start to fill tensor with what rank src gives to isend; see there."""
        return self._start_message("recv", tensor, src, "src")

    def start(self, call: str, *args: Any, **kwargs: Any) -> CallHandle:
        """Start a collective by its name: start("allreduce", tensor). Collective.

        On the CPU it runs on a thread, after those that were started before it, and other calls of
        this communicator wait for all of them; on CUDA it is enqueued. Tensors that it takes must
        not be touched until its handle was waited for, which alone raises what the call raised.
        """
        self._backend.check_open(call)
        with self._opening:
            if self._background is None:
                self._background = BackgroundCalls(only_enqueues=self.device_type != "cpu")
                self._background.install(self)
        return self._background.start(call, getattr(self, call, None), args, kwargs)

    # The whole.

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait, with a deadline, for what is enqueued on torch's current stream; not on the CPU.

        Raises CommunicatorTimeout if the stream is not done in time.
        """
        self._backend.synchronize(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """Give this rank's later calls another deadline. Not collective, from any thread."""
        self._backend.set_timeout(self.coor.checked_timeout(timeout_s))

    def abort(self) -> None:
        """Make calls of this rank that wait raise, and later ones; from any thread."""
        if self._pid != os.getpid():  # a forked child has its connections, too
            return
        self._backend.abort()
        self._is_aborted = True
        if self._messages is not None:
            self._messages.abort()

    def close(self) -> None:
        """Free what the backend holds. Not collective; over NCCL every rank closes.

        Twice, or in a forked process, it does nothing. Not while another thread waits in a call:
        abort() ends that first, where there is one. Over NCCL it raises CommunicatorError, and all
        stays open, while a CUDA graph that captured calls is alive: reset() the graph first.
        """
        self._close(is_failing=sys.exc_info()[0] is not None)

    def _close(self, is_failing: bool) -> None:
        if self._closed or self._pid != os.getpid():
            return
        if self._background is not None:
            self._background.join()  # what was started still runs; finish() may leave all open
        problem = self._backend.finish()
        self._closed = self._backend.is_closed = True
        self._close_parts(is_failing)
        if problem is not None and not is_failing:
            raise problem
        if problem is not None:
            warnings.warn(str(problem), RuntimeWarning, stacklevel=3)

    def _close_parts(self, is_failing: bool) -> None:
        with ExitStack() as closing:  # each, though the one before raises
            for part in (self._background, self._recorder, self._part_coor, self._backend):
                closing.callback(part.close if part is not None else lambda: None)
            if self._messages is not None:
                self._messages.close(is_aborting=is_failing)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._pid != os.getpid():
            return
        if error is not None:
            self._backend.leave()
        if error is not None and self._background is not None and not self._background.is_idle():
            self._closed = self._backend.is_closed = True
            return self._background.at_end(lambda: self._close_parts(is_failing=True))
        self._close(is_failing=error is not None)

    def __del__(self) -> None:
        if not self._closed and self._backend.closes_when_forgotten:
            self._close(is_failing=True)

    def __repr__(self) -> str:
        return f"{type(self._backend).__name__}(rank={self.rank}, world_size={self.world_size})"

    @property
    def device(self) -> torch.device:
        """The device whose tensors this rank may pass."""
        return self._backend.device

    @property
    def device_type(self) -> str:
        """The kind of that device, "cpu" or "cuda"."""
        return self._backend.device_type

    @property
    def timeout_s(self) -> float:
        """The deadline of every call."""
        return self._backend.timeout_s

    @property
    def backend(self) -> str:
        """The name by which Communicator(coor, backend=...) finds this backend."""
        return self._backend.name

    name = backend  # an alias

    @property
    def capabilities(self) -> Capabilities:
        """Declarations of the backend."""
        return self._backend.capabilities

    def rank_name(self, rank: int | None = None) -> str:
        """A rank of this communicator in errors; see Coordinator.rank_name."""
        return self._backend.rank_name(rank)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Something that this backend has beyond the methods of Backend."""
            if name.startswith("_") or hasattr(Backend, name):
                raise AttributeError(f"a Communicator has no attribute {name!r}")
            return getattr(self._backend, name)

    # torch.distributed's spellings.

    def all_reduce(
        self, tensor: torch.Tensor, op: Op = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """An alias of allreduce."""
        return self.allreduce(tensor, op, out=out)

    def all_gather(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """An alias of allgather."""
        return self.allgather(tensor, out=out)

    def all_to_all(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """An alias of alltoall."""
        return self.alltoall(tensor, out=out)

    def _start_message(self, kind: str, tensor: torch.Tensor, peer: int, name: str) -> CallHandle:
        self._calls.check_message(f"i{kind}", tensor, peer, name)
        self.coor.note_peer(peer)
        with self._opening:
            if self._messages is None and not self._is_aborted:
                from communicator.p2p.async_messages import open_messages  # later, too

                self._messages = open_messages(self, self._backend)
        if self._is_aborted:  # perhaps while it opened
            raise CommunicatorError(f"{self.rank_name()}: i{kind} on an aborted Communicator.")
        return CallHandle(self._messages.start(kind, tensor, peer), lambda: tensor)

    def _disown(self, error: CommunicatorError) -> None:
        """In a forked child: refuse its calls, which the peers would take for those of the rank."""
        self._backend.disown(error)
        if "_straight" in self.__dict__:  # it was open
            self._refuse_all(error)
