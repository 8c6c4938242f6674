"""The class that users call and that backends extend.

    with Communicator(Coordinator()) as comm:
        comm.allreduce(torch.ones(4))

A backend needs `do_send` and `do_recv`; everything else works on top of them, correct and slow,
and is overridden, one `do_` method at a time, where the backend does better.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

import launcher
from communicator import timings
from communicator.calls import call_check, tensor_dict
from communicator.calls.arguments import (
    check_apart,
    check_dim,
    check_like,
    check_op,
    check_other,
    check_peer,
    check_tensor,
)
from communicator.calls.default_collectives import CollectivesFromP2P, P2PCall
from communicator.calls.dtypes import Op
from communicator.calls.failures import describe_lost, lost_peers
from communicator.calls.joined_calls import allgather_along, join_rows, reduce_scatter_along
from communicator.errors import (
    CommunicatorError,
    CommunicatorTimeout,
    DrumlineError,
    Unsupported,
)
from communicator.interceptors.background_calls import BackgroundCalls, CallHandle
from communicator.interceptors.interceptor import (
    CALLS,
    Interceptor,
    Refusal,
)
from communicator.interceptors.recording import Observation, Trace
from communicator.own_gpu import own_ordinal
from coordinator import Coordinator, RankFailure

if TYPE_CHECKING:
    from communicator.torch_interop.async_messages import Messages

Checked = TypeVar("Checked")


@dataclass(frozen=True)
class Capabilities:
    """Declarations of a backend, beyond do_send and do_recv, that decide what it is called for.

    only_by_name: never selected as the best, only if it is named.
    empty_messages: do_send and do_recv also get tensors of 0 elements, which are else left out.
    empty_collectives: so do the collectives, because every call is compared by what is exchanged.
    compares_every_call: by itself, so nothing has to be compared before.
    checked_calls: how many of the first calls are else compared before anything moves.
    encrypts: what goes to other hosts is encrypted, where the Coordinator encrypts.
    """

    only_by_name: bool = False
    empty_messages: bool = False
    empty_collectives: bool = False
    compares_every_call: bool = False
    checked_calls: int = call_check.FIRST_CALLS
    encrypts: bool = False


def _as_device(device: torch.device | str | int | None) -> torch.device | None:
    """The device that an argument names; a number is that of a GPU."""
    if isinstance(device, int):
        return torch.device("cuda", device)
    return None if device is None else torch.device(device)


class Communicator(CollectivesFromP2P):
    """Moves tensors among the ranks of a Coordinator. Collective to create.

    coor: the ranks. It stays the caller's, and must outlive the Communicator.
    backend: a name, the path of a vendor's library, or a subclass; None selects the best that every
        rank can use. A backend that one rank lacks is Unsupported on all of them.
    timeout_s: the deadline of every call; coor's if not given.
    device_type: whose memory it must move, "cpu" or "cuda"; the best backend of any if not given.
    device: the device of this rank's tensors, such as "cuda:1" or 1, which says device_type too. On
        CUDA, if not given, the local rank, or the only GPU that the rank sees.
    checked_calls: how many of the first calls are compared among the ranks before anything moves,
        by backends that do not compare every call anyhow.
    options: passed to the backend.

    Collectives are called by every rank in the same order, with the same shapes, dtypes and op. On
    the CPU a call returns when its result is there. On CUDA it enqueues on torch's current stream.
    op is "sum", "prod", "max", "min", "avg", or a member of torch.distributed.ReduceOp.
    Arguments that cannot work raise ValueError or TypeError before anything moves; a peer that dies
    raises PeerLost, a deadline CommunicatorTimeout.
    """

    name: ClassVar[str] = ""
    device_type: ClassVar[str] = "cpu"
    capabilities: Capabilities = Capabilities()

    def __new__(
        cls,
        coor: Coordinator,
        backend: Any = None,
        *,
        timeout_s: float | None = None,
        device_type: str | None = None,
        device: torch.device | str | int | None = None,
        **options: Any,
    ) -> Communicator:
        if cls is not Communicator:
            return super().__new__(cls)
        from communicator.selection import choose  # the table of backends imports this class

        own = _as_device(device)
        kind = own.type if own is not None and device_type is None else device_type
        has_gpu = own is not None and own.index is not None
        return super().__new__(choose(coor, backend, kind, has_gpu))

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
        self.coor = coor
        self.rank, self.world_size = coor.rank, coor.world_size
        self._me = self.rank_name()
        self.timeout_s = coor.timeout_s if timeout_s is None else timeout_s
        if reason := self.why_unencrypted(coor):
            raise Unsupported(f"{self._me}: {self.name}: {reason}")
        self._closed, self._pid, self._opening = False, os.getpid(), threading.Lock()
        self._binding = threading.RLock()
        self._choice = {"backend": backend, "timeout_s": self.timeout_s, **options}
        _live.add(self)
        self._is_gpu_named = device is not None
        self._device = self._own_device(_as_device(device))
        if checked_calls is not None:
            self.capabilities = replace(self.capabilities, checked_calls=checked_calls)
        self._note_peer = coor.note_peer
        self.do_open(**options)
        self._recorder = launcher.recorder(coor.info)
        self._bind()
        if self._recorder is not None:
            Trace(self._recorder, type(self), backend=self.name).install(self)
        coor.live_calls.offer(Observation(self, backend=self.name))

    @classmethod
    def why_unencrypted(cls, coor: Coordinator) -> str:
        """Why ranks that encrypt cannot use this backend; "" if they can, or do not encrypt."""
        if not coor.encrypts or len(coor.nodes) == 1 or cls.capabilities.encrypts:
            return ""
        return "it does not encrypt between hosts, as --encrypt demands; tcp and hierarchical do"

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
        from communicator.torch_interop.group_ranks import coordinator_over  # torch's interface

        coor = coordinator_over(ranks, rank, world_size, timeout_s)
        try:
            comm = cls(coor, backend, timeout_s=timeout_s, **options)
        except BaseException:
            coor.close()
            raise
        comm._split_coor = coor
        return comm

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """A Communicator of some ranks, in this order, made as this one; None on the others.

        Collective over those ranks.
        """
        coor = self.coor.split(ranks)
        if coor is None:
            return None
        where: Any = {"device_type": self.device_type}
        if self._is_gpu_named:
            where = {"device": self.device}
        child = Communicator(coor, **where, **self._choice)
        child._split_coor = coor
        return child

    # A backend provides these, do_send and do_recv, and overrides what it does better.

    @classmethod
    def probe(cls, coor: Coordinator) -> int:
        """The score of this backend here; the highest is selected. Not collective.

        Raises Unsupported with the reason if this rank cannot use it.
        """
        raise Unsupported(f"{cls.__name__} does not say when it can be used; override probe()")

    def do_open(self) -> None:
        """Connect the ranks. Collective. May use self.coor; options become arguments."""

    def do_close(self) -> None:
        """Free what do_open took. Not collective."""

    # What users call.

    def allreduce(
        self, tensor: torch.Tensor, op: Op = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The reduction of every rank's tensor, in place, or into out. Collective.

        Returns the tensor written. All ranks get the same bits.
        """
        self._check("allreduce", tensor)
        op = check_op(self._me, "allreduce", op, tensor)
        out = tensor if out is None else self._check_out("allreduce", out, tensor.shape, tensor)
        if self.world_size == 1:
            return out if out is tensor else out.copy_(tensor)
        self._check_same_call("allreduce", tensor, op)
        if self._has_work(tensor):
            self.do_allreduce(out, tensor, op)
        return out

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Rank src's tensor, written into every rank's tensor, which is returned. Collective."""
        self._check("broadcast", tensor)
        check_peer(self._me, "broadcast", src, self.world_size, "src")
        self._check_same_call("broadcast", tensor, f"from {self.rank_name(src)}")
        if self.world_size > 1 and self._has_work(tensor):
            self.do_broadcast(tensor, src)
        return tensor

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: Op = "sum") -> torch.Tensor:
        """The reduction of every rank's tensor, in place on rank dst alone. Collective.

        Returns the tensor; on the other ranks it is unchanged.
        """
        self._check("reduce", tensor)
        op = check_op(self._me, "reduce", op, tensor)
        check_peer(self._me, "reduce", dst, self.world_size, "dst")
        self._check_same_call("reduce", tensor, f"{op}, to {self.rank_name(dst)}")
        if self.world_size > 1 and self._has_work(tensor):
            self.do_reduce(tensor if self.rank == dst else None, tensor, dst, op)
        return tensor

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
        if dim is not None or sizes is not None:
            self._check_no_out("allgather", out)
            return self._or_decline(lambda: allgather_along(self, tensor, dim, sizes))
        self._check("allgather", tensor)
        shape = (self.world_size, *tensor.shape)
        out = self._out("allgather", out, shape, tensor)
        self._check_same_call("allgather", tensor)
        if self.world_size == 1:
            out[0].copy_(tensor)
        elif self._has_work(tensor):
            self.do_allgather(out, tensor)
        return out

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
        self._check("reduce_scatter", tensor)
        if dim is not None or sizes is not None:
            self._check_no_out("reduce_scatter", out)
            return self._or_decline(lambda: reduce_scatter_along(self, tensor, op, dim, sizes))
        op = check_op(self._me, "reduce_scatter", op, tensor)
        self._or_decline(lambda: self._check_rows("reduce_scatter", tensor))
        out = self._out("reduce_scatter", out, tuple(tensor.shape[1:]), tensor)
        self._check_same_call("reduce_scatter", tensor, op)
        if self.world_size == 1:
            out.copy_(tensor[0])
        elif self._has_work(tensor):
            self.do_reduce_scatter(out, tensor, op)
        return out

    def do_allgatherv(self, out: torch.Tensor, tensor: torch.Tensor, counts: list[int]) -> None:
        """Fill out with every rank's tensor, of so many elements, one after the other."""
        parts = torch.split(out, counts)
        parts[self.rank].copy_(tensor.flatten())
        for src, part in enumerate(parts):
            self.broadcast(part, src)

    def do_reduce_scatterv(
        self, out: torch.Tensor, tensor: torch.Tensor, counts: list[int], op: Op
    ) -> None:
        """Reduce this rank's part of tensor, which has so many elements for each, into out."""
        for dst, part in enumerate(torch.split(tensor.clone(), counts)):
            self.reduce(part, dst, op)
            if dst == self.rank:
                out.copy_(part.view(out.shape))

    def alltoall(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Row i of the result is what rank i had in row `rank`: [world_size, *shape]. Collective.

        out must not share memory with tensor.
        """
        self._check("alltoall", tensor)
        self._or_decline(lambda: self._check_rows("alltoall", tensor))
        out = self._out("alltoall", out, tuple(tensor.shape), tensor)
        self._check_same_call("alltoall", tensor)
        if self.world_size == 1:
            out.copy_(tensor)
        elif self._has_work(tensor):
            self.do_alltoall(out, tensor)
        return out

    def gather(
        self, tensor: torch.Tensor, dst: int = 0, *, dim: int | None = None
    ) -> torch.Tensor | None:
        """Every rank's tensor, by rank, on rank dst: [world_size, *tensor.shape]. Collective.

        None on the other ranks. dim: join them along it instead.
        """
        self._check("gather", tensor)
        check_peer(self._me, "gather", dst, self.world_size, "dst")
        dim = None if dim is None else check_dim(self._me, "gather", tensor, dim)
        self._check_same_call("gather", tensor, f"to rank {dst}")
        if self.rank != dst:
            if self._has_work(tensor):
                self.do_gather(None, tensor, dst)
            return None
        out = tensor.new_empty((self.world_size, *tensor.shape))
        if self._has_work(tensor):
            self.do_gather(out, tensor, dst)
        return out if dim is None else join_rows(out, dim)

    def scatter(
        self, out: torch.Tensor, rows: torch.Tensor | None = None, src: int = 0
    ) -> torch.Tensor:
        """Row `rank` of the rows of rank src, [world_size, *out.shape], in out. Collective.

        Returns out. rows: of no meaning on the other ranks.
        """
        self._check("scatter", out)
        check_peer(self._me, "scatter", src, self.world_size, "src")
        if self.rank == src:
            rows = self._or_decline(lambda: self._check_scattered(out, rows))
        self._check_same_call("scatter", out, f"from rank {src}")
        if self._has_work(out):
            self.do_scatter(out, rows if self.rank == src else None, src)
        return out

    def send_tensors(self, values: dict[str, Any], dst: int) -> None:
        """Send a dict of tensors and of values as Coordinator.broadcast_object takes them.

        Its tensors are on this communicator's device. Rank dst calls recv_tensors.
        """
        check_peer(self._me, "send_tensors", dst, self.world_size, "dst")
        tensor_dict.write(self, "send_tensors", values, lambda tensor: self.send(tensor, dst))

    def recv_tensors(self, src: int) -> dict[str, Any]:
        """The dict that rank src sends, in new tensors. Not inside a group()."""
        check_peer(self._me, "recv_tensors", src, self.world_size, "src")
        if self._pending is not None:
            raise CommunicatorError(f"{self._me}: recv_tensors inside a group(). Call it after it.")
        return tensor_dict.read(self, lambda tensor: self.recv(tensor, src))

    def broadcast_tensors(
        self, values: dict[str, Any] | None = None, src: int = 0
    ) -> dict[str, Any]:
        """Rank src's dict, as send_tensors takes it, on every rank. Collective."""
        check_peer(self._me, "broadcast_tensors", src, self.world_size, "src")
        if self.rank != src:
            return tensor_dict.read(self, lambda tensor: self.broadcast(tensor, src))
        values = values or {}
        tensor_dict.write(
            self, "broadcast_tensors", values, lambda tensor: self.broadcast(tensor, src)
        )
        return values

    def isend(self, tensor: torch.Tensor, dst: int) -> CallHandle:
        """Start to send tensor to rank dst, which calls irecv; its handle is to be waited for.

        These messages are apart from those of send and recv, and no other call delays them. tensor
        must stay as it is until then. Over backends without streams of their own (all but shm) the
        first isend or irecv is collective: it opens connections. On CUDA messages start together
        when one of them is waited for.
        """
        self._check_p2p("isend", tensor, dst, "dst")
        return self._start_message("send", tensor, dst)

    def irecv(self, tensor: torch.Tensor, src: int) -> CallHandle:
        """Start to fill tensor with what rank src gives to isend; see there."""
        self._check_p2p("irecv", tensor, src, "src")
        return self._start_message("recv", tensor, src)

    def start(self, call: str, *args: Any, **kwargs: Any) -> CallHandle:
        """Start a collective by its name: start("allreduce", tensor). Collective.

        On the CPU it runs on a thread, after those that were started before it, and other calls of
        this communicator wait for all of them; on CUDA it is enqueued. Tensors that it takes must
        not be touched until its handle was waited for, which alone raises what the call raised.
        """
        self._check_open(call)
        with self._opening:
            if self._background is None:
                self._background = BackgroundCalls()
                self._background.install(self)
        return self._background.start(call, getattr(self, call, None), args, kwargs)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send tensor to rank dst, which calls recv with the same shape and dtype.

        Returns when tensor may be changed again; that may be before dst has received.
        """
        self._check_p2p("send", tensor, dst, "dst")
        if tensor.numel() or self.capabilities.empty_messages:
            self._post("send", tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Fill tensor with what rank src sent, and return it. Between two ranks order is kept."""
        self._check_p2p("recv", tensor, src, "src")
        if tensor.numel() or self.capabilities.empty_messages:
            self._post("recv", tensor, src)
        return tensor

    def barrier(self) -> None:
        """Return once every rank has called. Collective. On CUDA: once the stream gets there."""
        self._check_open("barrier")
        self._check_same_call("barrier")
        if self.world_size > 1:
            self.do_barrier()

    def decline(self, why: str) -> None:
        """Stand in for a collective that this rank cannot make: it raises on the others, with why.

        For whoever finds a mistake in arguments that this class does not see, and then raises here.
        Collective, in place of that call. Nothing has moved, and later calls work; but after the
        first checked_calls, tcp and hierarchical end the communicator, as they do where calls
        differ, and over NCCL, MPI and vendors' libraries the others wait until their deadline.
        """
        self._check_open("decline")
        if self.world_size > 1:
            with suppress(DrumlineError):  # the comparison's own: the caller raises why
                self.do_decline(why)

    def do_decline(self, why: str) -> None:
        """Take part in the comparison of a call; raises what it raises on the other ranks."""
        self._check_same_call(call_check.DECLINED, details=why)

    def _or_decline(self, check: Callable[[], Checked]) -> Checked:
        """Return check(); a mistake that it finds is raised on the other ranks, too.

        For calls with a part for each rank, in which ranks are easily of two minds.
        """
        try:
            return check()
        except (TypeError, ValueError) as error:
            self.decline(str(error))
            raise

    @contextmanager
    def group(self) -> Iterator[None]:
        """Sends and receives inside start together at its end: they cannot wait for each other.

        If the body raises, none of them happens on this rank.
        """
        self._check_open("group")
        if self._pending is not None:
            raise CommunicatorError(f"{self._me}: group() inside a group(). Use one.")
        calls: list[P2PCall] = []
        self._pending = calls
        try:
            yield
        finally:
            self._pending = None
        self.do_group(calls)

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Wait, with a deadline, for what is enqueued on torch's current stream; not on the CPU.

        Raises CommunicatorTimeout if the stream is not done in time.
        """
        if self.device.type != "cpu":
            self._await_stream(None, timeout_s)

    def close(self) -> None:
        """Free what the backend holds. Not collective.

        Calling it twice, or in a forked process, does nothing. Not while another thread waits in a
        call: abort() ends that first, where there is one.
        """
        if not self._closed and self._pid == os.getpid():
            if self._background is not None:
                self._background.close()  # what was started still runs
            self._closed = True
            if self._messages is not None:
                self._messages.close()
            self.do_close()
            if self._split_coor is not None:
                self._split_coor.close()
            if self._recorder is not None:
                self._recorder.close()

    def set_timeout(self, timeout_s: float) -> None:
        """Give this rank's later calls another deadline. Not collective, from any thread."""
        self.timeout_s = timeout_s

    def abort(self) -> None:
        """Make calls of this rank that wait raise, and later ones; from any thread."""
        raise Unsupported(f"{self._me}: {self.name} cannot be aborted; end the process.")

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._background is not None and not self._background.is_idle():
            self._closed = True  # not to wait for ranks, which may be waiting for this one
            return self._background.close(is_waiting=False)
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size})"

    @property
    def device(self) -> torch.device:
        """The device whose tensors this rank may pass."""
        return self._device

    @property
    def backend(self) -> str:
        """The name by which Communicator(coor, backend=...) finds this class."""
        return self.name

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

    # Internal.

    def _intercept(self, interceptor: Interceptor) -> None:
        """Do something around calls, until its remove()."""
        with self._binding:
            self._interceptors = (*self._interceptors, interceptor)
            self._bind()

    def _uninstall(self, interceptor: Interceptor) -> None:
        """Do it no longer."""
        with self._binding:
            self._interceptors = tuple(one for one in self._interceptors if one is not interceptor)
            self._bind()

    def _bind(self) -> None:
        """Bind each call to what it goes through: interceptors, then C where nothing is before it.

        The only place where a method of an object is set. So `comm.allreduce` is the C function
        itself, or the method of the class, or what an interceptor has made of either.
        """
        straight = self._straight()
        outermost_last = sorted(self._interceptors, key=lambda one: one.order, reverse=True)
        for name in CALLS:
            call = straight.get(name)
            for interceptor in outermost_last:
                if name in interceptor.names:
                    call = interceptor.around(name, call or getattr(type(self), name).__get__(self))
            if call is not None:
                self.__dict__[name] = call
            else:
                self.__dict__.pop(name, None)

    def _straight(self) -> dict[str, Callable[..., Any]]:
        """The calls that go to C without any Python between, where nothing is around them."""
        return {}

    def _await_stream(self, stream: torch.cuda.Stream | None, timeout_s: float | None) -> None:
        start, limit_s = time.monotonic(), self.timeout_s if timeout_s is None else timeout_s
        with torch.cuda.device(self.device):
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream or torch.cuda.current_stream())
        while not event.query():
            if (waited_s := time.monotonic() - start) > limit_s:
                lost = describe_lost(self._lost_peers())
                raise CommunicatorTimeout(
                    f"{self._me}: the stream was not done in time: some rank did not make "
                    f"the same calls.{lost} abort() ends what waits on the GPU."
                )
            time.sleep(min(waited_s / 10, timings.TIMINGS.stream_poll_s))  # a tenth late at most

    def _own_device(self, device: torch.device | None) -> torch.device:
        """The device whose tensors this rank may pass, if this one or none was named."""
        if device is not None and device.type != self.device_type:
            raise Unsupported(
                f"{self._me}: {self.name} moves tensors on {self.device_type}, not on "
                f"{device}. Choose another backend, or leave device= out."
            )
        if self.device_type == "cpu" or (device is not None and device.index is not None):
            return device or torch.device("cpu")
        return torch.device(self.device_type, own_ordinal(self.coor.info.local_rank))

    def rank_name(self, rank: int | None = None) -> str:
        """A rank of this communicator in errors; see Coordinator.rank_name."""
        return self.coor.rank_name(rank)

    _interceptors: tuple[Interceptor, ...] = ()
    _num_compared = 0  # collectives
    _pending: list[P2PCall] | None = None
    _recorder: launcher.Recorder | None = None
    _background: BackgroundCalls | None = None
    _messages: Messages | None = None  # of isend and irecv
    _split_coor: Coordinator | None = None  # made by split() or over() for this one alone
    _disowned: CommunicatorError | None = None  # why a forked child cannot use it

    def disown(self) -> None:
        """In a forked child: refuse its calls, which the peers would take for those of the rank."""
        error = self._disowned = CommunicatorError(
            f"{self._me}: process {os.getpid()} was forked from the rank and cannot use its "
            "communicator: the peers would take it for the rank. Call from the rank itself, or "
            "start the process as a rank of its own."
        )
        self._binding = threading.RLock()  # which a thread of the rank may have held
        Refusal(error).install(self)

    def _start_message(self, kind: str, tensor: torch.Tensor, peer: int) -> CallHandle:
        self._note_peer(peer)
        with self._opening:
            if self._messages is None:
                from communicator.torch_interop.async_messages import open_messages  # imports this

                self._messages = open_messages(self)
        return CallHandle(self._messages.start(kind, tensor, peer), lambda: tensor)

    def _post(self, kind: str, tensor: torch.Tensor, peer: int) -> None:
        if self._pending is not None:
            self._pending.append((kind, tensor, peer))
        else:
            self._note_peer(peer)
            self.do_send(tensor, peer) if kind == "send" else self.do_recv(tensor, peer)

    def _has_work(self, tensor: torch.Tensor) -> bool:
        """True if a collective is passed on to the backend."""
        return tensor.numel() > 0 or self.capabilities.empty_collectives

    def _lost_peers(self) -> tuple[RankFailure, ...]:
        return lost_peers(self.coor)

    def _await_lost_peers(self) -> tuple[RankFailure, ...]:
        """The lost peers after a connection closed: its process is seen to end a bit later."""
        return lost_peers(self.coor, timings.TIMINGS.exit_lag_s)

    def _check_same_call(
        self, call: str, tensor: torch.Tensor | None = None, details: str = ""
    ) -> None:
        """Raise CommunicatorError on every rank if they make different calls.

        Only the first calls are compared.
        """
        if self._num_compared < self.capabilities.checked_calls and self.world_size > 1:
            self._num_compared += 1
            description = call_check.describe_call(call, tensor, details)
            call_check.compare(self, self._num_compared, description)

    def _check(self, call: str, tensor: torch.Tensor) -> None:
        self._check_open(call)
        check_tensor(self._me, call, tensor, self.device_type)

    def _check_open(self, call: str) -> None:
        if self._disowned is not None:
            raise self._disowned
        if self._closed:
            raise CommunicatorError(
                f"{self._me}: {call} on a closed Communicator. Make a new one, or close it later."
            )

    def _check_rows(self, call: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 0 or tensor.shape[0] != self.world_size:
            raise ValueError(
                f"{self._me}, {call}: the tensor has shape {tuple(tensor.shape)}, but needs "
                f"one row for each of the {self.world_size} ranks: [{self.world_size}, ...]. "
                f"Reshape it with .view({self.world_size}, -1)."
            )

    def _check_p2p(self, call: str, tensor: torch.Tensor, peer: int, name: str) -> None:
        self._check(call, tensor)
        check_peer(self._me, call, peer, self.world_size, name)
        check_other(self._me, call, peer, self.rank)

    def _check_no_out(self, call: str, out: torch.Tensor | None) -> None:
        if out is not None:
            raise ValueError(f"{self._me}, {call}: out= goes with neither dim= nor sizes=")

    def _check_scattered(self, out: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        if rows is None:
            raise ValueError(f"{self._me}, scatter: the rows of the rank that sends are None")
        self._check("scatter", rows)
        check_like(self._me, "scatter", rows, (self.world_size, *out.shape), out)
        check_apart(self._me, "scatter", rows, out, self.rank)
        return rows

    def _check_out(
        self, call: str, out: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor
    ) -> torch.Tensor:
        check_tensor(self._me, f"{call}(out=)", out, self.device_type)
        check_like(self._me, call, out, tuple(shape), like)
        check_apart(self._me, call, like, out, self.rank)
        return out

    def _out(
        self, call: str, out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor
    ) -> torch.Tensor:
        if out is None:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        return self._check_out(call, out, shape, like)


_live: weakref.WeakSet[Communicator] = weakref.WeakSet()
_inherited: list[Communicator] = []


def _keep_inherited() -> None:
    """In a forked child, never free the parent's Communicators: their threads are not there."""
    _inherited.extend(_live)
    for comm in _inherited:
        comm.disown()


os.register_at_fork(after_in_child=_keep_inherited)
