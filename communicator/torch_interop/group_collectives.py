"""The collectives of torch.distributed's process groups, on our communicators.

dist.all_gather(outs, tensor)     # calls GroupCollectives.allgather([outs], [tensor], options)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from communicator.calls.async_work import AsyncWork, WorkQueue
from communicator.calls.checked_calls import is_declined
from communicator.errors import Unsupported
from communicator.p2p.deferred_p2p import DeferredMessages
from communicator.p2p.group_ranks import GroupRanks
from communicator.torch_interop import list_arguments, list_collectives
from communicator.torch_interop.lazy_communicators import LazyCommunicators
from coordinator import torch_private

DEVICE_TYPES = ("cpu", "cuda")
Tensors = list[torch.Tensor]
OneOrMore = torch.Tensor | Tensors
ProcessGroup: Any = torch_private.NamedProcessGroup  # untyped, for its overloads

# Of a caller, in arguments: found before anything moves.
MISTAKES = (ValueError, TypeError, Unsupported)
# What they write is as many numbers as they read there; a tensor may be expanded if all ranks' are.
IN_PLACE = (
    list_collectives.allreduce,
    list_collectives.allreduce_coalesced,
    list_collectives.allreduce_sparse,
    list_collectives.broadcast,
    list_collectives.reduce,
)
Method = TypeVar("Method", bound=Callable[..., AsyncWork])


def _declining(method: Method) -> Method:
    """The method of a collective, which says to the other ranks if this one cannot make the call.

    They raise in it, too, and do not wait for a rank that has raised.
    """

    @functools.wraps(method)
    def call(self: GroupCollectives, *args: Any, **kwargs: Any) -> AsyncWork:
        try:
            return method(self, *args, **kwargs)
        except MISTAKES as error:
            self._decline(error, args)
            raise

    return cast(Method, call)


class GroupCollectives(ProcessGroup):  # type: ignore[misc]
    """The collectives of a process group; DrumlineProcessGroup is the rest of it.

    torch gives lists of tensors, one for each device of the caller, and options; or one tensor, and
    what the options would hold. The deadline is the group's in any case. A mistake that this rank
    sees in its arguments is raised at the call, and on the other ranks in the same call.
    """

    _ranks: GroupRanks
    _queue: WorkQueue
    _comms: LazyCommunicators
    _deferred: DeferredMessages

    @_declining
    def allreduce(
        self, tensors: OneOrMore, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> AsyncWork:
        place = self._place("allreduce")
        tensor = list_arguments.only_item(place, _as_list(tensors))
        is_sparse = tensor.layout == torch.sparse_coo
        move = list_collectives.allreduce_sparse if is_sparse else list_collectives.allreduce
        return self._run(place, move, [(tensor, _op_argument(opts, op))], [tensor], opts)

    @_declining
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> AsyncWork:
        place = self._place("allreduce_coalesced")
        list_arguments.equal_lengths(place, tensors=tensors)
        call = (tensors, _op_argument(opts))
        return self._run(place, list_collectives.allreduce_coalesced, [call], tensors, opts)

    def comparison_of(self, tensors: Tensors) -> Callable[[], None]:
        """The first part of an allreduce_coalesced whose others C++ does."""
        call, comm = "allreduce_coalesced", self._comms.of("cpu")
        return functools.partial(list_collectives.compare_lists, comm, call, tensors)

    @_declining
    def broadcast(
        self, tensors: OneOrMore, opts: Any = None, timeout: Any = None, *, root: int | None = None
    ) -> AsyncWork:
        place, root = self._place("broadcast"), _root_argument(opts, root)
        list_arguments.check_root(place, root, getattr(opts, "rootTensor", 0))
        tensor = list_arguments.only_item(place, _as_list(tensors))
        return self._run(place, list_collectives.broadcast, [(tensor, root)], [tensor], opts)

    @_declining
    def reduce(
        self,
        tensors: OneOrMore,
        opts: Any = None,
        op: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> AsyncWork:
        place, root = self._place("reduce"), _root_argument(opts, root)
        list_arguments.check_root(place, root, getattr(opts, "rootTensor", 0))
        tensor = list_arguments.only_item(place, _as_list(tensors))
        call = (tensor, root, _op_argument(opts, op))
        return self._run(place, list_collectives.reduce, [call], [tensor], opts)

    @_declining
    def allgather(
        self, outs: Any, tensors: OneOrMore, opts: Any = None, timeout: Any = None
    ) -> AsyncWork:
        """outs[0][rank] is what tensors[0] is on that rank."""
        place = self._place("allgather")
        rows = [outs] if isinstance(tensors, torch.Tensor) else outs
        tensor = list_arguments.only_item(place, _as_list(tensors))
        call = (list_arguments.only_item(place, rows), tensor)
        return self._run(place, list_collectives.allgather, [call], call[0], opts)

    @_declining
    def allgather_coalesced(
        self, outs: list[Tensors], tensors: Tensors, opts: Any = None
    ) -> AsyncWork:
        """outs[rank][i] is what tensors[i] is on that rank."""
        place = self._place("allgather_coalesced")
        if len(outs) != self.size():
            raise place.error(f"got {len(outs)} lists of outputs for {self.size()} ranks.")
        for rows in outs:
            list_arguments.check_coalesced_lists(place, rows, tensors)
        calls = [(list(rows), tensor) for *rows, tensor in zip(*outs, tensors, strict=True)]
        written = [out for rows, _ in calls for out in rows]
        return self._run(place, list_collectives.allgather, calls, written, opts)

    @_declining
    def all_gather_single_coalesced(
        self, outs: Tensors, tensors: Tensors, opts: Any = None
    ) -> AsyncWork:
        place = self._place("all_gather_single")
        list_arguments.equal_lengths(place, inputs=tensors, outputs=outs)
        calls = list(zip(outs, tensors, strict=True))
        return self._run(place, list_collectives.allgather_flat, calls, outs, opts)

    def all_gather_single(
        self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> AsyncWork:
        return self.all_gather_single_coalesced([out], [tensor], opts)

    @_declining
    def reduce_scatter(
        self, outs: OneOrMore, rows: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> AsyncWork:
        place = self._place("reduce_scatter")
        rows = [rows] if isinstance(outs, torch.Tensor) else rows
        out = list_arguments.only_item(place, _as_list(outs))
        call = (out, list_arguments.only_item(place, rows), _op_argument(opts, op))
        return self._run(place, list_collectives.reduce_scatter, [call], [out], opts)

    @_declining
    def reduce_scatter_single_coalesced(
        self, outs: Tensors, tensors: Tensors, opts: Any = None
    ) -> AsyncWork:
        place, op = self._place("reduce_scatter_single"), _op_argument(opts)
        list_arguments.equal_lengths(place, inputs=tensors, outputs=outs)
        calls = [(out, tensor, op) for out, tensor in zip(outs, tensors, strict=True)]
        return self._run(place, list_collectives.reduce_scatter_flat, calls, outs, opts)

    def reduce_scatter_single(
        self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> AsyncWork:
        return self.reduce_scatter_single_coalesced([out], [tensor], opts)

    @_declining
    def gather(
        self,
        outs: Any,
        tensors: OneOrMore,
        opts: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> AsyncWork:
        place = self._place("gather")
        tensor = list_arguments.only_item(place, _as_list(tensors))
        is_bare = isinstance(tensors, torch.Tensor) or not outs
        rows = outs if is_bare else list_arguments.only_item(place, outs)
        call = (rows, tensor, _root_argument(opts, root))
        return self._run(place, list_collectives.gather, [call], rows, opts)

    @_declining
    def scatter(
        self,
        outs: OneOrMore,
        rows: Any,
        opts: Any = None,
        timeout: Any = None,
        *,
        root: int | None = None,
    ) -> AsyncWork:
        place = self._place("scatter")
        out = list_arguments.only_item(place, _as_list(outs))
        is_bare = isinstance(outs, torch.Tensor) or not rows
        parts = rows if is_bare else list_arguments.only_item(place, rows)
        call = (out, parts, _root_argument(opts, root))
        return self._run(place, list_collectives.scatter, [call], [out], opts)

    @_declining
    def alltoall(self, outs: Tensors, tensors: Tensors, opts: Any = None) -> AsyncWork:
        place = self._place("alltoall")
        return self._run(place, list_collectives.alltoall, [(outs, tensors)], outs, opts)

    @_declining
    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_sizes: list[int] | None,
        sizes: list[int] | None,
        opts: Any = None,
    ) -> AsyncWork:
        call = (out, tensor, out_sizes or [], sizes or [])
        place = self._place("all_to_all_single")
        return self._run(place, list_collectives.alltoall_flat, [call], [out], opts)

    def barrier(self, opts: Any = None, timeout: Any = None) -> AsyncWork:
        self._comms.check("cpu")
        return self._start(lambda: self._comms.of("cpu").barrier(), [], opts, on_device=False)

    # Between these two torch calls what may be done as one; here it starts at once all the same.

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device | None = None) -> AsyncWork:
        """Ends when the collectives before it have; messages are waited for one by one."""
        on_device = device is not None and device.type != "cpu"
        return self._start(lambda: None, [], None, on_device=on_device)

    # The names of the same methods before torch 2.12.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _allgather_base = all_gather_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _run(
        self,
        place: list_arguments.Place,
        move: Callable[..., None],
        calls: list[Any],
        written: Tensors,
        opts: Any,
    ) -> AsyncWork:
        """move(communicator, *call) for each call, as one piece of work."""
        for call in calls:
            list_arguments.check(move, place, *call)
        if move not in IN_PLACE:
            list_arguments.check_outputs(place, written)
        first = _first_tensor(calls[0])
        if move is not list_collectives.allreduce_sparse:
            self._check_dense(first)
        device_type = first.device.type
        self._comms.check(device_type)

        def work() -> None:
            comm = self._comms.of(device_type)
            try:
                list_collectives.compare_lists(comm, place.call, [call[1] for call in calls])
                for call in calls:
                    move(comm, *call)
            except MISTAKES as error:  # which the communicator saw before anything moved
                if not is_declined(error):
                    comm.decline(str(error))
                raise

        return self._start(work, written, opts, on_device=device_type != "cpu")

    def _place(self, call: str) -> list_arguments.Place:
        return list_arguments.Place(self._ranks.rank_name(), call, self.rank(), self.size())

    def _decline(self, error: Exception, arguments: tuple[Any, ...]) -> None:
        """Have the call that the other ranks make raise there, in its turn."""
        device_type = _device_type(arguments, "cpu" if self._comms.if_opened("cpu") else "cuda")

        def work() -> None:
            self._comms.of(device_type).decline(str(error))

        self._start(work, [], None, on_device=device_type != "cpu")

    def _start(
        self, work: Callable[[], None], written: Tensors, opts: Any, on_device: bool
    ) -> AsyncWork:
        self._deferred.start()
        if on_device:  # it only enqueues on the caller's stream
            return self._queue.run(work, written)
        if getattr(opts, "asyncOp", True):
            return self._queue.submit(work, written)
        return self._queue.run_or_submit(work, written)

    def _check_dense(self, tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided:
            raise Unsupported(
                f"{self._ranks.rank_name()}: only all_reduce takes sparse tensors, of layout "
                f"sparse_coo, and this one is {str(tensor.layout).removeprefix('torch.')}. Call "
                "to_dense() first."
            )


def _first_tensor(call: tuple[Any, ...]) -> torch.Tensor:
    first = next(item for item in call if isinstance(item, torch.Tensor) or item)
    return first if isinstance(first, torch.Tensor) else cast(Tensors, first)[0]


def _device_type(arguments: Any, default: str) -> str:
    """The device of the first tensor in these lists that is where a communicator may be."""
    for item in arguments if isinstance(arguments, (list, tuple)) else [arguments]:
        if isinstance(item, torch.Tensor) and item.device.type in DEVICE_TYPES:
            return item.device.type
        if isinstance(item, (list, tuple)) and (nested := _device_type(item, "")):
            return nested
    return default


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
