"""A torch.distributed backend over our communicators: existing code runs on them unchanged.

import communicator.torch_backend
dist.init_process_group("drumline")     # or "cpu:drumline,cuda:drumline"
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist

from communicator.base import Communicator
from communicator.calls.async_work import NO_TIMEOUT, AsyncWork, WorkQueue
from communicator.errors import Unsupported
from communicator.selection import choose
from communicator.torch_interop import list_collectives
from communicator.torch_interop.store_coordinator import StoreCoordinator
from coordinator import Coordinator

NAME = "drumline"
DEVICE_TYPES = ("cpu", "cuda")
Tensors = list[torch.Tensor]
OneOrMore = torch.Tensor | Tensors
ProcessGroup: Any = dist.ProcessGroup  # untyped, for its overloads


class DrumlineProcessGroup(ProcessGroup):  # type: ignore[misc]
    """A process group of torch: the best communicator there is for each kind of device.

    On the CPU a call runs in a thread of the group, unless its caller waits for it at once. Sends
    and receives are deferred: they start together when one of them is waited for, or at the next
    collective, so they cannot wait for each other, in whatever order they were called.
    """

    def __init__(self, store_coor: StoreCoordinator) -> None:
        super().__init__(store_coor.rank, store_coor.world_size)
        self._names = ["undefined", "undefined"]
        self._comms = {kind: _open_best(store_coor, kind) for kind in DEVICE_TYPES}
        self._queue = WorkQueue()
        self._deferred: list[_DeferredP2P] = []

    # Properties that torch reads.

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return self._names[0]

    @property
    def group_desc(self) -> str:
        return self._names[1]

    def _set_group_name(self, name: str) -> None:
        self._names[0] = name

    def _set_group_desc(self, description: str) -> None:
        self._names[1] = description

    def shutdown(self) -> None:
        """End all calls, and close the communicators."""
        self.start_deferred(waits=True)
        self._queue.close()
        self.abort()

    def abort(self) -> None:
        for comm in self._comms.values():
            if comm is not None:
                comm.close()

    # Collectives. torch gives lists of tensors, one for each device of the caller, and options; or
    # one tensor, and what the options would hold. The deadline is the group's in any case.

    def allreduce(
        self, tensors: OneOrMore, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> AsyncWork:
        tensors, op = _as_list(tensors), _op_argument(opts, op)
        return self._run_each(
            list_collectives.allreduce, [(tensor, op) for tensor in tensors], tensors, opts
        )

    allreduce_coalesced = allreduce

    def broadcast(
        self, tensors: OneOrMore, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> AsyncWork:
        tensors, root = _as_list(tensors), _root_argument(opts, root)
        return self._run_each(
            list_collectives.broadcast, [(tensor, root) for tensor in tensors], tensors, opts
        )

    def reduce(
        self,
        tensors: OneOrMore,
        opts: Any = None,
        op: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> AsyncWork:
        tensors, op, root = _as_list(tensors), _op_argument(opts, op), _root_argument(opts, root)
        calls = [(tensor, root, op) for tensor in tensors]
        return self._run_each(list_collectives.reduce, calls, tensors, opts)

    def allgather(
        self, outs: Any, tensors: OneOrMore, opts: Any = None, timeout: Any = None
    ) -> AsyncWork:
        """outs[i][rank] is what tensors[i] is on that rank."""
        outs = [outs] if isinstance(tensors, torch.Tensor) else outs
        calls = list(zip(outs, _as_list(tensors), strict=True))
        return self._run_each(
            list_collectives.allgather, calls, [out for rows in outs for out in rows], opts
        )

    def allgather_coalesced(
        self, outs: list[Tensors], tensors: Tensors, opts: Any = None
    ) -> AsyncWork:
        """outs[rank][i] is what tensors[i] is on that rank."""
        return self.allgather([list(rows) for rows in zip(*outs, strict=True)], tensors, opts)

    def all_gather_single_coalesced(
        self, outs: Tensors, tensors: Tensors, opts: Any = None
    ) -> AsyncWork:
        calls = list(zip(outs, tensors, strict=True))
        return self._run_each(list_collectives.allgather_flat, calls, outs, opts)

    def all_gather_single(
        self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> AsyncWork:
        return self._run_each(list_collectives.allgather_flat, [(out, tensor)], [out], opts)

    def reduce_scatter(
        self, outs: OneOrMore, rows: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> AsyncWork:
        rows = [rows] if isinstance(outs, torch.Tensor) else rows
        outs, op = _as_list(outs), _op_argument(opts, op)
        calls = [(out, parts, op) for out, parts in zip(outs, rows, strict=True)]
        return self._run_each(list_collectives.reduce_scatter, calls, outs, opts)

    def reduce_scatter_single_coalesced(
        self, outs: Tensors, tensors: Tensors, opts: Any = None
    ) -> AsyncWork:
        op = _op_argument(opts)
        calls = [(out, tensor, op) for out, tensor in zip(outs, tensors, strict=True)]
        return self._run_each(list_collectives.reduce_scatter_flat, calls, outs, opts)

    def reduce_scatter_single(
        self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> AsyncWork:
        return self.reduce_scatter_single_coalesced([out], [tensor], opts)

    def gather(
        self,
        outs: Any,
        tensors: OneOrMore,
        opts: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> AsyncWork:
        rows = outs if isinstance(tensors, torch.Tensor) or not outs else outs[0]
        call = (rows, _as_list(tensors)[0], _root_argument(opts, root))
        return self._run_each(list_collectives.gather, [call], rows, opts)

    def scatter(
        self,
        outs: OneOrMore,
        rows: Any,
        opts: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> AsyncWork:
        parts = rows if isinstance(outs, torch.Tensor) or not rows else rows[0]
        outs = _as_list(outs)
        return self._run_each(
            list_collectives.scatter, [(outs[0], parts, _root_argument(opts, root))], outs, opts
        )

    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any = None) -> AsyncWork:
        return self._run_each(list_collectives.alltoall, [(outs, tensors)], outs, opts)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_sizes: list[int] | None,
        sizes: list[int] | None,
        opts: Any = None,
    ) -> AsyncWork:
        call = (out, tensor, out_sizes or [], sizes or [])
        return self._run_each(list_collectives.alltoall_flat, [call], [out], opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> AsyncWork:
        return self._start(self._comm_of_device("cpu").barrier, [], opts, on_device=False)

    # Between these two torch calls what may be done as one; here it starts at once all the same.

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> AsyncWork:
        """Ends when all calls before it have."""
        return self._start(lambda: None, [], None, on_device=device.type != "cpu")

    # The names of the same methods before torch 2.12.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _allgather_base = all_gather_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # Sends and receives.

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> AsyncWork:
        return self._defer("send", tensors[0], dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> AsyncWork:
        return self._defer("recv", tensors[0], src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> AsyncWork:
        raise Unsupported(
            f"rank {self.rank()}: recv without src: a communicator hears one rank at a time. Say "
            "which."
        )

    def start_deferred(self, waits: bool) -> None:
        """Start the deferred sends and receives. waits: the caller will wait for them anyway."""
        deferred, self._deferred = self._deferred, []
        if deferred:
            start = self._queue.run_or_submit if waits else self._queue.submit
            start(lambda: _run_deferred(deferred), [])

    def _defer(self, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> AsyncWork:
        message = _DeferredP2P(self, kind, tensor, peer, tag)
        self._deferred.append(message)
        return message

    def _run_each(
        self, move: Callable[..., None], calls: list[Any], written: Tensors, opts: Any
    ) -> AsyncWork:
        """move(communicator, *call) for each call, as one piece of work."""
        first = _first_tensor(calls[0])
        comm = self._comm_of_tensor(first)

        def work() -> None:
            for call in calls:
                move(comm, *call)

        return self._start(work, written, opts, on_device=first.device.type != "cpu")

    def _start(
        self, work: Callable[[], None], written: Tensors, opts: Any, on_device: bool
    ) -> AsyncWork:
        self.start_deferred(waits=False)
        if on_device:  # it only enqueues on the caller's stream
            return AsyncWork(written).run(work)
        if getattr(opts, "asyncOp", True):
            return self._queue.submit(work, written)
        return self._queue.run_or_submit(work, written)

    def _comm_of_tensor(self, tensor: torch.Tensor) -> Communicator:
        if tensor.layout != torch.strided:
            raise Unsupported(
                f"rank {self.rank()}: a communicator moves dense tensors, and this one is "
                f"{str(tensor.layout).removeprefix('torch.')}. Call to_dense() first, or make the "
                "nn.Embedding without sparse=True."
            )
        return self._comm_of_device(tensor.device.type)

    def _comm_of_device(self, device_type: str) -> Communicator:
        comm = self._comms.get(device_type)
        if comm is None:
            raise Unsupported(
                f"rank {self.rank()}: no backend moves tensors on {device_type!r} among these "
                f"{self.size()} ranks. Move the tensor to the CPU, or install a backend."
            )
        return comm


class _DeferredP2P(AsyncWork):
    """A send or receive that starts when its end is asked for.

    A tag is sent before the tensor, so that a receiver that expects another raises.
    """

    def __init__(
        self, group: DrumlineProcessGroup, kind: str, tensor: torch.Tensor, peer: int, tag: int
    ) -> None:
        super().__init__([tensor])
        self.comm = group._comm_of_tensor(tensor)
        self.kind, self.tensor, self.peer, self.tag = kind, tensor, peer, tag
        self.tag_tensor = torch.tensor([tag], device=tensor.device) if tag else None
        self._group = group

    def move(self, tensor: torch.Tensor) -> None:
        """Call for the tag and the tensor, in a group."""
        for part in (self.tag_tensor, tensor):
            if part is not None and self.kind == "send":
                self.comm.send(part, self.peer)
            elif part is not None:
                self.comm.recv(part, self.peer)

    def check_tag(self) -> None:
        if self.tag_tensor is None or self.tag_tensor.item() == self.tag:
            return
        raise Unsupported(
            f"rank {self.comm.rank}: the message from rank {self.peer} has "
            f"tag={self.tag_tensor.item()}, and was to be received with tag={self.tag}. Between "
            "two ranks messages arrive in the order of sending. Receive in the order in which rank "
            f"{self.peer} sends."
        )

    def wait(self, timeout: Any = NO_TIMEOUT) -> bool:
        self._group.start_deferred(waits=True)
        return super().wait(timeout)

    def is_completed(self) -> bool:
        self._group.start_deferred(waits=False)
        return super().is_completed()

    def get_future(self) -> Any:
        self._group.start_deferred(waits=False)
        return super().get_future()


def _run_deferred(deferred: list[_DeferredP2P]) -> None:
    """Run the messages together, and end each with the result."""
    error: Exception | None = None
    try:
        for device_type in {message.comm.device_type for message in deferred}:
            _run_deferred_on(
                [message for message in deferred if message.comm.device_type == device_type]
            )
    except Exception as caught:
        error = caught
    for message in deferred:
        message.end(error)


def _run_deferred_on(deferred: list[_DeferredP2P]) -> None:
    comm = deferred[0].comm
    with (
        list_collectives.flattened_all([message.tensor for message in deferred]) as tensors,
        comm.group(),
    ):
        for message, tensor in zip(deferred, tensors, strict=True):
            message.move(tensor)
    for message in deferred:
        message.check_tag()


def _open_best(store_coor: StoreCoordinator, device_type: str) -> Communicator | None:
    """The best communicator for a kind of device; None if there is none that all ranks can use."""
    coor = cast(Coordinator, store_coor)
    try:
        return choose(coor, None, device_type)(coor)
    except Unsupported:
        return None


def _first_tensor(call: tuple[Any, ...]) -> torch.Tensor:
    first = next(item for item in call if isinstance(item, torch.Tensor) or item)
    return first if isinstance(first, torch.Tensor) else cast(Tensors, first)[0]


def _as_list(tensors: OneOrMore) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _op_argument(opts: Any, op: Any = None) -> Any:
    """op, or that of opts, or opts itself, or SUM."""
    op = getattr(opts, "reduceOp", opts) if op is None else op
    return dist.ReduceOp.SUM if op is None or isinstance(op, int) else getattr(op, "op", op)


def _root_argument(opts: Any, root: int | None = None) -> int:
    """root, or that of opts, or opts itself, or 0."""
    root = getattr(opts, "rootRank", opts) if root is None else root
    return root or 0


def _create_group(options: Any, _: Any) -> DrumlineProcessGroup:
    timeout_s = options.timeout.total_seconds()
    store, rank, world_size = options.store, options.group_rank, options.group_size
    return DrumlineProcessGroup(StoreCoordinator(store, rank, world_size, timeout_s))


def _skip_in_dynamo(kind: type) -> None:
    """Have torch.compile run a class's methods, and all that they call, without tracing them.

    torch.compiler.disable does the same, and imports the compiler, which takes seconds. Where this
    private interface of torch is missing, functions around our calls are not compiled.
    """
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:
        return
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            set_code_exec_strategy(method.__code__, skip)


_skip_in_dynamo(DrumlineProcessGroup)
dist.Backend.register_backend(NAME, _create_group, extended_api=True, devices=list(DEVICE_TYPES))
