"""torch.distributed over our communicators: existing code runs on them unchanged.

import communicator.torch_interop.process_group
dist.init_process_group("drumline")     # or "cpu:drumline,cuda:drumline"
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist

from communicator.async_work import NO_TIMEOUT, Handle, WorkQueue
from communicator.base import Communicator
from communicator.errors import Unsupported
from communicator.selection import choose
from communicator.torch_interop import list_collectives
from communicator.torch_interop.store_coordinator import Meeting
from coordinator import Coordinator

NAME = "drumline"
DEVICE_TYPES = ("cpu", "cuda")
Tensors = list[torch.Tensor]
OneOrMore = torch.Tensor | Tensors
ProcessGroup: Any = dist.ProcessGroup  # whose overloads are torch's affair


class Group(ProcessGroup):  # type: ignore[misc]
    """A process group of torch: the best communicator there is for each kind of device.

    On the CPU a call goes on in a thread of the group, unless its caller waits for it at once.
    Sends and receives start together when one of them is waited for, or at the next collective: so
    they cannot wait for each other, in whatever order they were asked for.
    """

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting.rank, meeting.world_size)
        self._names = ["undefined", "undefined"]
        self._comms = {kind: _communicator(meeting, kind) for kind in DEVICE_TYPES}
        self._queue = WorkQueue()
        self._posted: list[_Message] = []

    # What torch asks about a group.

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
        """End all calls, and give back the communicators."""
        self.flush(waits=True)
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
    ) -> Handle:
        tensors, op = _listed(tensors), _op(opts, op)
        return self._each(
            list_collectives.allreduce, [(tensor, op) for tensor in tensors], tensors, opts
        )

    allreduce_coalesced = allreduce

    def broadcast(
        self, tensors: OneOrMore, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> Handle:
        tensors, root = _listed(tensors), _root(opts, root)
        return self._each(
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
    ) -> Handle:
        tensors, op, root = _listed(tensors), _op(opts, op), _root(opts, root)
        calls = [(tensor, root, op) for tensor in tensors]
        return self._each(list_collectives.reduce, calls, tensors, opts)

    def allgather(
        self, outs: Any, tensors: OneOrMore, opts: Any = None, timeout: Any = None
    ) -> Handle:
        """outs[i][rank] is what tensors[i] is on that rank."""
        outs = [outs] if isinstance(tensors, torch.Tensor) else outs
        calls = list(zip(outs, _listed(tensors), strict=True))
        return self._each(
            list_collectives.allgather, calls, [out for rows in outs for out in rows], opts
        )

    def allgather_coalesced(
        self, outs: list[Tensors], tensors: Tensors, opts: Any = None
    ) -> Handle:
        """outs[rank][i] is what tensors[i] is on that rank."""
        return self.allgather([list(rows) for rows in zip(*outs, strict=True)], tensors, opts)

    def all_gather_single_coalesced(
        self, outs: Tensors, tensors: Tensors, opts: Any = None
    ) -> Handle:
        calls = list(zip(outs, tensors, strict=True))
        return self._each(list_collectives.allgather_flat, calls, outs, opts)

    def all_gather_single(
        self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Handle:
        return self._each(list_collectives.allgather_flat, [(out, tensor)], [out], opts)

    def reduce_scatter(
        self, outs: OneOrMore, rows: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Handle:
        rows = [rows] if isinstance(outs, torch.Tensor) else rows
        outs, op = _listed(outs), _op(opts, op)
        calls = [(out, parts, op) for out, parts in zip(outs, rows, strict=True)]
        return self._each(list_collectives.reduce_scatter, calls, outs, opts)

    def reduce_scatter_single_coalesced(
        self, outs: Tensors, tensors: Tensors, opts: Any = None
    ) -> Handle:
        op = _op(opts)
        calls = [(out, tensor, op) for out, tensor in zip(outs, tensors, strict=True)]
        return self._each(list_collectives.reduce_scatter_flat, calls, outs, opts)

    def reduce_scatter_single(
        self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Handle:
        return self.reduce_scatter_single_coalesced([out], [tensor], opts)

    def gather(
        self,
        outs: Any,
        tensors: OneOrMore,
        opts: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> Handle:
        rows = outs if isinstance(tensors, torch.Tensor) or not outs else outs[0]
        call = (rows, _listed(tensors)[0], _root(opts, root))
        return self._each(list_collectives.gather, [call], rows, opts)

    def scatter(
        self,
        outs: OneOrMore,
        rows: Any,
        opts: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> Handle:
        parts = rows if isinstance(outs, torch.Tensor) or not rows else rows[0]
        outs = _listed(outs)
        return self._each(
            list_collectives.scatter, [(outs[0], parts, _root(opts, root))], outs, opts
        )

    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any = None) -> Handle:
        return self._each(list_collectives.alltoall, [(outs, tensors)], outs, opts)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_sizes: list[int] | None,
        sizes: list[int] | None,
        opts: Any = None,
    ) -> Handle:
        call = (out, tensor, out_sizes or [], sizes or [])
        return self._each(list_collectives.alltoall_flat, [call], [out], opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Handle:
        return self._run(self._comm("cpu").barrier, [], opts, on_device=False)

    # Between these two torch calls what may be done as one; here it starts at once all the same.

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> Handle:
        """Ends when all calls before it have."""
        return self._run(lambda: None, [], None, on_device=device.type != "cpu")

    # The names of the same methods before torch 2.12.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _allgather_base = all_gather_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    # Sends and receives.

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Handle:
        return self._post("send", tensors[0], dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Handle:
        return self._post("recv", tensors[0], src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Handle:
        raise Unsupported(
            f"rank {self.rank()}: recv without src: a communicator hears one rank at a time. Say "
            "which."
        )

    def flush(self, waits: bool) -> None:
        """Start the sends and receives that were asked for. waits: the caller will wait anyway."""
        posted, self._posted = self._posted, []
        if posted:
            start = self._queue.do if waits else self._queue.put
            start(lambda: _exchange(posted), [])

    def _post(self, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> Handle:
        message = _Message(self, kind, tensor, peer, tag)
        self._posted.append(message)
        return message

    def _each(
        self, move: Callable[..., None], calls: list[Any], written: Tensors, opts: Any
    ) -> Handle:
        """move(communicator, *call) for each call, as one piece of work."""
        first = _first_tensor(calls[0])
        comm = self._comm_for(first)

        def work() -> None:
            for call in calls:
                move(comm, *call)

        return self._run(work, written, opts, on_device=first.device.type != "cpu")

    def _run(
        self, work: Callable[[], None], written: Tensors, opts: Any, on_device: bool
    ) -> Handle:
        self.flush(waits=False)
        if on_device:  # it only enqueues on the caller's stream
            return Handle(written).run(work)
        if getattr(opts, "asyncOp", True):
            return self._queue.put(work, written)
        return self._queue.do(work, written)

    def _comm_for(self, tensor: torch.Tensor) -> Communicator:
        if tensor.layout != torch.strided:
            raise Unsupported(
                f"rank {self.rank()}: a communicator moves dense tensors, and this one is "
                f"{str(tensor.layout).removeprefix('torch.')}. Call to_dense() first, or make the "
                "nn.Embedding without sparse=True."
            )
        return self._comm(tensor.device.type)

    def _comm(self, device_type: str) -> Communicator:
        comm = self._comms.get(device_type)
        if comm is None:
            raise Unsupported(
                f"rank {self.rank()}: no backend moves tensors on {device_type!r} among these "
                f"{self.size()} ranks. Move the tensor to the CPU, or install a backend."
            )
        return comm


class _Message(Handle):
    """A send or receive that starts when somebody asks for its end.

    One with a tag has it before it on the line, so that a receiver who expects another is told.
    """

    def __init__(self, group: Group, kind: str, tensor: torch.Tensor, peer: int, tag: int) -> None:
        super().__init__([tensor])
        self.comm = group._comm_for(tensor)
        self.kind, self.tensor, self.peer, self.tag = kind, tensor, peer, tag
        self.tag_on_line = torch.tensor([tag], device=tensor.device) if tag else None
        self._group = group

    def move(self, tensor: torch.Tensor) -> None:
        """Ask for the tag and the tensor, in a group."""
        for part in (self.tag_on_line, tensor):
            if part is not None and self.kind == "send":
                self.comm.send(part, self.peer)
            elif part is not None:
                self.comm.recv(part, self.peer)

    def check_tag(self) -> None:
        if self.tag_on_line is None or self.tag_on_line.item() == self.tag:
            return
        raise Unsupported(
            f"rank {self.comm.rank}: the message from rank {self.peer} has "
            f"tag={self.tag_on_line.item()}, and was to be received with tag={self.tag}. Between "
            "two ranks messages arrive in the order of sending, so this one is not what it was "
            "taken for. Receive in the order in which rank "
            f"{self.peer} sends."
        )

    def wait(self, timeout: Any = NO_TIMEOUT) -> bool:
        self._group.flush(waits=True)
        return super().wait(timeout)

    def is_completed(self) -> bool:
        self._group.flush(waits=False)
        return super().is_completed()

    def get_future(self) -> Any:
        self._group.flush(waits=False)
        return super().get_future()


def _exchange(posted: list[_Message]) -> None:
    """Run the messages together, and end each with what came of it."""
    error: Exception | None = None
    try:
        for device_type in {message.comm.device_type for message in posted}:
            _exchange_on([message for message in posted if message.comm.device_type == device_type])
    except Exception as caught:
        error = caught
    for message in posted:
        message.end(error)


def _exchange_on(posted: list[_Message]) -> None:
    comm = posted[0].comm
    with list_collectives.pieces([message.tensor for message in posted]) as tensors, comm.group():
        for message, tensor in zip(posted, tensors, strict=True):
            message.move(tensor)
    for message in posted:
        message.check_tag()


def _communicator(meeting: Meeting, device_type: str) -> Communicator | None:
    """The best communicator for a kind of device; None if there is none that all ranks can use."""
    coor = cast(Coordinator, meeting)
    try:
        return choose(coor, None, device_type)(coor)
    except Unsupported:
        return None


def _first_tensor(call: tuple[Any, ...]) -> torch.Tensor:
    first = next(item for item in call if isinstance(item, torch.Tensor) or item)
    return first if isinstance(first, torch.Tensor) else cast(Tensors, first)[0]


def _listed(tensors: OneOrMore) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _op(opts: Any, op: Any = None) -> Any:
    """op; or what opts say, or are; or a sum."""
    op = getattr(opts, "reduceOp", opts) if op is None else op
    return dist.ReduceOp.SUM if op is None or isinstance(op, int) else getattr(op, "op", op)


def _root(opts: Any, root: int | None = None) -> int:
    """root; or what opts say, or are; or 0."""
    root = getattr(opts, "rootRank", opts) if root is None else root
    return root or 0


def _create(options: Any, _: Any) -> Group:
    timeout_s = options.timeout.total_seconds()
    store, rank, world_size = options.store, options.group_rank, options.group_size
    return Group(Meeting(store, rank, world_size, timeout_s))


def _leave_untraced(kind: type) -> None:
    """Let torch.compile run a class's methods, and all that they call, as they are.

    torch.compiler.disable does the same, and imports the compiler, which takes seconds. This much
    of it is torch's own affair: without it only what is compiled around our calls is lost.
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


_leave_untraced(Group)
dist.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICE_TYPES))
