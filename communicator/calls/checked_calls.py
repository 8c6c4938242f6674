"""The calls of users over a backend: arguments are checked, calls compared, then it does them.

calls = CheckedCalls(backend)
calls.allreduce(torch.ones(4))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from communicator.backend import Backend
from communicator.calls.arguments import (
    check_apart,
    check_dim,
    check_like,
    check_op,
    check_other,
    check_peer,
)
from communicator.calls.default_collectives import P2PCall
from communicator.calls.dtypes import Op
from communicator.errors import CommunicatorError, DrumlineError

Checked = TypeVar("Checked")
_DECLINED = "is_declined"  # of an error: the other ranks have heard of it


def is_declined(error: Exception) -> bool:
    """True if the call that raised this has been declined, which must not happen twice."""
    return hasattr(error, _DECLINED)


class CheckedCalls:
    """The work of Communicator's methods of these names, where Python checks the arguments.

    A backend whose library checks them itself has a subclass.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.rank, self.world_size, self._me = backend.rank, backend.world_size, backend.rank_name()
        self._note_peer = backend.coor.note_peer
        self.rank_name = backend.rank_name
        self.pending: list[P2PCall] | None = None  # of the group() that is open

    def straight(self) -> dict[str, Callable[..., Any]]:
        """Functions that take a user's call as it is; Communicator's methods of those names."""
        return {}

    def allreduce(
        self, tensor: torch.Tensor, op: Op = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.backend.check_tensor("allreduce", tensor)
        name = check_op(self._me, "allreduce", op, tensor)
        if out is None:
            out = tensor
        else:
            self.backend.check_out("allreduce", out, tensor.shape, tensor)
        if self.world_size == 1:
            return out if out is tensor else out.copy_(tensor)
        self.backend.compare_call("allreduce", tensor, name)
        if self._has_work(tensor):
            self.backend.allreduce(out, tensor, name)
        return out

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        self.backend.check_tensor("broadcast", tensor)
        check_peer(self._me, "broadcast", src, self.world_size, "src")
        self.backend.compare_call("broadcast", tensor, f"from {self.backend.rank_name(src)}")
        if self.world_size > 1 and self._has_work(tensor):
            self.backend.broadcast(tensor, src)
        return tensor

    def reduce(self, tensor: torch.Tensor, dst: int = 0, op: Op = "sum") -> torch.Tensor:
        self.backend.check_tensor("reduce", tensor)
        name = check_op(self._me, "reduce", op, tensor)
        check_peer(self._me, "reduce", dst, self.world_size, "dst")
        details = f"{name}, to {self.backend.rank_name(dst)}"
        self.backend.compare_call("reduce", tensor, details)
        if self.world_size > 1 and self._has_work(tensor):
            self.backend.reduce(tensor if self.rank == dst else None, tensor, dst, name)
        return tensor

    def allgather(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        self.backend.check_tensor("allgather", tensor)
        out = self._out("allgather", out, (self.world_size, *tensor.shape), tensor)
        self.backend.compare_call("allgather", tensor)
        if self.world_size == 1:
            out[0].copy_(tensor)
        elif self._has_work(tensor):
            self.backend.allgather(out, tensor)
        return out

    def allgatherv(self, out: torch.Tensor, tensor: torch.Tensor, counts: list[int]) -> None:
        """Fill out with every rank's tensor, of counts elements each, one after the other."""
        self.backend.compare_call("allgatherv", out, f"in parts of {counts}")
        self.backend.allgatherv(self._flat(out), tensor, counts)

    def reduce_scatter(
        self, tensor: torch.Tensor, op: Op = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.backend.check_tensor("reduce_scatter", tensor)
        name = check_op(self._me, "reduce_scatter", op, tensor)
        out = self.or_decline(lambda: self._checked_rows("reduce_scatter", tensor, out, 1))
        self.backend.compare_call("reduce_scatter", tensor, name)
        if self.world_size == 1:
            out.copy_(tensor[0])
        elif self._has_work(tensor):
            self.backend.reduce_scatter(out, tensor, name)
        return out

    def reduce_scatterv(
        self, out: torch.Tensor, tensor: torch.Tensor, counts: list[int], op: Op
    ) -> None:
        """Reduce this rank's part of tensor, which has counts elements for the ranks, into out."""
        name = self._op("reduce_scatter", op, tensor)
        self.backend.compare_call("reduce_scatterv", tensor, f"in parts of {counts} {name}")
        self.backend.reduce_scatterv(out, self._flat(tensor), counts, name)

    def alltoall(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        self.backend.check_tensor("alltoall", tensor)
        out = self.or_decline(lambda: self._checked_rows("alltoall", tensor, out, 0))
        self.backend.compare_call("alltoall", tensor)
        if self.world_size == 1:
            out.copy_(tensor)
        elif self._has_work(tensor):
            self.backend.alltoall(out, tensor)
        return out

    def gather(
        self, tensor: torch.Tensor, dst: int = 0, *, dim: int | None = None
    ) -> torch.Tensor | None:
        self.backend.check_tensor("gather", tensor)
        check_peer(self._me, "gather", dst, self.world_size, "dst")
        dim = None if dim is None else check_dim(self._me, "gather", tensor, dim)
        self.backend.compare_call("gather", tensor, f"to rank {dst}")
        if self.rank != dst:
            if self._has_work(tensor):
                self.backend.gather(None, tensor, dst)
            return None
        out = tensor.new_empty((self.world_size, *tensor.shape))
        if self._has_work(tensor):
            self.backend.gather(out, tensor, dst)
        return out if dim is None else self.join_rows(out, dim)

    def scatter(
        self, out: torch.Tensor, rows: torch.Tensor | None = None, src: int = 0
    ) -> torch.Tensor:
        self.backend.check_tensor("scatter", out)
        check_peer(self._me, "scatter", src, self.world_size, "src")
        if self.rank == src:
            rows = self.or_decline(lambda: self._check_scattered(out, rows))
        self.backend.compare_call("scatter", out, f"from rank {src}")
        if self._has_work(out):
            self.backend.scatter(out, rows if self.rank == src else None, src)
        return out

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self.check_message("send", tensor, dst, "dst")
        if tensor.numel() or self.backend.capabilities.empty_messages:
            self._post("send", tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        self.check_message("recv", tensor, src, "src")
        if tensor.numel() or self.backend.capabilities.empty_messages:
            self._post("recv", tensor, src)
        return tensor

    def barrier(self) -> None:
        self.backend.check_open("barrier")
        self.backend.compare_call("barrier")
        if self.world_size > 1:
            self.backend.barrier()

    def decline(self, why: str) -> None:
        self.backend.check_open("decline")
        if self.world_size > 1:
            with suppress(DrumlineError):  # the comparison's own: the caller raises why
                self.backend.decline(why)

    def or_decline(self, check: Callable[[], Checked]) -> Checked:
        """Return check(); a mistake that it finds is raised on the other ranks, too.

        For calls with a part for each rank, in which ranks are easily of two minds.
        """
        try:
            return check()
        except (TypeError, ValueError) as error:
            if not is_declined(error):  # by a call within this one
                self.decline(str(error))
                setattr(error, _DECLINED, True)
            raise

    @contextmanager
    def group(self) -> Iterator[None]:
        self.backend.check_open("group")
        if self.pending is not None:
            raise CommunicatorError(f"{self._me}: group() cannot be nested. Use one.")
        calls: list[P2PCall] = []
        self.pending = calls
        try:
            yield
        finally:
            self.pending = None
        self.backend.group(calls)

    def join_rows(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """The rows of a call before, [world_size, *shape], joined along a dim of the shape."""
        if dim:  # it reads them
            self.backend.follow_calls()
        return rows.movedim(0, dim).flatten(dim, dim + 1)

    # The checks.

    def check_message(self, call: str, tensor: torch.Tensor, peer: int, name: str) -> None:
        """Raise what is wrong with a message to or from peer, the argument of that name."""
        self.backend.check_tensor(call, tensor)
        check_peer(self._me, call, peer, self.world_size, name)
        check_other(self._me, call, peer, self.rank)

    def _op(self, call: str, op: Op, tensor: torch.Tensor) -> Any:
        return check_op(self._me, call, op, tensor)

    def _flat(self, parts: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks, one after the other, as a backend of Python takes them."""
        return parts.view(-1)

    def _out(
        self, call: str, out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor
    ) -> torch.Tensor:
        if out is None:
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        return self.backend.check_out(call, out, shape, like)

    def _has_work(self, tensor: torch.Tensor) -> bool:
        """True if a collective is passed on to the backend."""
        return tensor.numel() > 0 or self.backend.capabilities.empty_collectives

    def _post(self, kind: str, tensor: torch.Tensor, peer: int) -> None:
        if self.pending is not None:
            self.pending.append((kind, tensor, peer))
            return
        self._note_peer(peer)
        move = self.backend.send if kind == "send" else self.backend.recv
        move(tensor, peer)

    def _checked_rows(
        self, call: str, tensor: torch.Tensor, out: torch.Tensor | None, dim: int
    ) -> torch.Tensor:
        """The place of a result that has the shape of the tensor from this dim on."""
        if tensor.dim() == 0 or tensor.shape[0] != self.world_size:
            raise ValueError(
                f"{self._me}, {call}: the tensor has shape {tuple(tensor.shape)}, but needs "
                f"one row for each of the {self.world_size} ranks: [{self.world_size}, ...]. "
                f"Reshape it with .view({self.world_size}, -1)."
            )
        return self._out(call, out, tuple(tensor.shape[dim:]), tensor)

    def _check_scattered(self, out: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        if rows is None:
            raise ValueError(f"{self._me}, scatter: the rows of the rank that sends are None")
        self.backend.check_tensor("scatter", rows)
        advice = "to have one like out for each rank. Pass torch.stack(list_of_rows)."
        shape = (self.world_size, *out.shape)
        check_like(self._me, "scatter", rows, shape, out, "the rows are", advice)
        check_apart(self._me, "scatter", rows, out, self.rank)
        return rows
