"""Collectives that torch.compile sees through: each is one call in the generated code.

from communicator import compile

group = compile.name(comm)
compiled = torch.compile(lambda x: compile.allreduce(x @ weight, group), fullgraph=True)

Outside of compiled functions call comm's own, which do not pass torch's dispatcher. Each is
collective over the group, which is the name() of the communicator, and raises ValueError for a
tensor that needs a gradient: none would come through.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from communicator.calls.arguments import check_dim
from communicator.communicator import Communicator
from communicator.errors import CommunicatorError
from coordinator import torch_private


class _Groups:
    """Communicators by name, for the operator, which takes no objects. Holds no references."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._named: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()
        self._count = 0

    def name(self, comm: Communicator) -> str:
        with self._lock:
            name = next((name for name, other in self._named.items() if other is comm), None)
            if name is None:
                self._count += 1
                name = f"{comm.backend}-{self._count}"
                self._named[name] = comm
            return name

    def find(self, name: str) -> Communicator:
        comm = self._named.get(name)
        if comm is None:
            raise CommunicatorError(
                f"the communicator {name!r} that this function was compiled with was deleted. Keep "
                "it for as long as the function, or compile again with a new one."
            )
        return comm


_groups = _Groups()


def name(comm: Communicator) -> str:
    """The name of comm in compiled functions of this process. Not collective."""
    return _groups.name(comm)


def allreduce(tensor: torch.Tensor, group: str, op: str = "sum") -> torch.Tensor:
    """The reduction of every rank's tensor, in place with no copy, and the tensor."""
    torch.ops.drumline.allreduce_(tensor, group, op)
    return tensor


def reduced(tensor: torch.Tensor, group: str, op: str = "sum") -> torch.Tensor:
    """The reduction of every rank's tensor, in a new one."""
    return torch.ops.drumline.allreduce(tensor, group, op)  # type: ignore[no-any-return]


def allgather(tensor: torch.Tensor, group: str, dim: int = 0) -> torch.Tensor:
    """Every rank's tensor, joined along dim."""
    return torch.ops.drumline.allgather(tensor, group, dim)  # type: ignore[no-any-return]


def reduce_scatter(tensor: torch.Tensor, group: str, op: str = "sum", dim: int = 0) -> torch.Tensor:
    """This rank's part of the reduction of every rank's tensor, cut evenly along dim."""
    return torch.ops.drumline.reduce_scatter(tensor, group, op, dim)  # type: ignore[no-any-return]


def alltoall(tensor: torch.Tensor, group: str) -> torch.Tensor:
    """Row i of the result is what rank i had in row `rank`: [world_size, *shape]."""
    return torch.ops.drumline.alltoall(tensor, group)  # type: ignore[no-any-return]


def sendrecv(tensor: torch.Tensor, group: str, dst: int, src: int) -> torch.Tensor:
    """Rank src's tensor, while this rank's goes to dst; of the same shape, as around a ring."""
    return torch.ops.drumline.sendrecv(tensor, group, dst, src)  # type: ignore[no-any-return]


def _allreduce_in_place(tensor: torch.Tensor, group: str, op: str) -> None:
    _groups.find(group).allreduce(tensor.detach(), op)


def _allreduce(tensor: torch.Tensor, group: str, op: str) -> torch.Tensor:
    return _groups.find(group).allreduce(tensor.detach().contiguous().clone(), op)


def _allgather(tensor: torch.Tensor, group: str, dim: int) -> torch.Tensor:
    return _groups.find(group).allgather(tensor.detach().contiguous(), dim=dim).contiguous()


def _reduce_scatter(tensor: torch.Tensor, group: str, op: str, dim: int) -> torch.Tensor:
    part = _groups.find(group).reduce_scatter(tensor.detach().contiguous(), op, dim=dim)
    return part.contiguous()


def _alltoall(tensor: torch.Tensor, group: str) -> torch.Tensor:
    return _groups.find(group).alltoall(tensor.detach().contiguous())


def _sendrecv(tensor: torch.Tensor, group: str, dst: int, src: int) -> torch.Tensor:
    comm, sent = _groups.find(group), tensor.detach().contiguous()
    if dst == src == comm.rank:
        return sent.clone()
    received = torch.empty_like(sent)
    with comm.group():
        comm.send(sent, dst)
        comm.recv(received, src)
    return received


# For the compiler, on tensors without data.


def _fake_in_place(tensor: torch.Tensor, group: str, op: str) -> None:
    """Shapes and strides stay as they are."""


def _fake_same(tensor: torch.Tensor, group: str, *_: Any) -> torch.Tensor:
    return tensor.new_empty(tensor.shape)


def _fake_allgather(tensor: torch.Tensor, group: str, dim: int) -> torch.Tensor:
    comm, shape = _groups.find(group), list(tensor.shape)
    shape[check_dim(comm.rank_name(), "allgather", tensor, dim)] *= comm.world_size
    return tensor.new_empty(shape)


def _fake_reduce_scatter(tensor: torch.Tensor, group: str, op: str, dim: int) -> torch.Tensor:
    comm, shape = _groups.find(group), list(tensor.shape)
    shape[check_dim(comm.rank_name(), "reduce_scatter", tensor, dim)] //= comm.world_size
    return tensor.new_empty(shape)


def _below_autograd(name: str) -> Callable[..., Any]:
    """A function that runs before the others wherever autograd may record, also while tracing."""

    def call(tensor: torch.Tensor, group: str, *args: Any) -> Any:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"rank {_groups.find(group).rank}: compile.{name.strip('_')} of "
                f"{tuple(tensor.shape)} {tensor.dtype} that needs a gradient. Autograd does not "
                "see through it, so the gradient would be lost or wrong. Call the function under "
                "torch.no_grad(), pass tensor.detach(), or take torch.distributed's functional "
                "collectives on the backend 'drumline' to differentiate."
            )
        if name.endswith("_"):  # a gradient for which the tensor was saved must fail
            torch.autograd.graph.increment_version(tensor)
        with torch_private.below_autograd():
            return getattr(torch.ops.drumline, name)(tensor, group, *args)

    return call


_library: Any = torch.library.Library("drumline", "DEF")  # type: ignore[no-untyped-call]


def _define(name: str, schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _library.define(f"{name}({schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, body, "CompositeExplicitAutograd")
    _library.impl(name, _below_autograd(name), "Autograd")
    torch.library.register_fake(f"drumline::{name}", fake, lib=_library)


_define(
    "allreduce_", "Tensor(a!) tensor, str group, str op) -> ()", _allreduce_in_place, _fake_in_place
)
_define("allreduce", "Tensor tensor, str group, str op) -> Tensor", _allreduce, _fake_same)
_define("allgather", "Tensor tensor, str group, int dim) -> Tensor", _allgather, _fake_allgather)
_define(
    "reduce_scatter",
    "Tensor tensor, str group, str op, int dim) -> Tensor",
    _reduce_scatter,
    _fake_reduce_scatter,
)
_define("alltoall", "Tensor tensor, str group) -> Tensor", _alltoall, _fake_same)
_define("sendrecv", "Tensor tensor, str group, int dst, int src) -> Tensor", _sendrecv, _fake_same)
