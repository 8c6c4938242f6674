"""An allreduce that torch.compile sees through: one call in the generated code, in place, no copy.

from communicator import compile

group = compile.name(comm)
compiled = torch.compile(lambda x: compile.allreduce(x @ weight, group), fullgraph=True)

Outside of compiled functions call comm.allreduce, which does not pass torch's dispatcher.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from communicator.base import Communicator
from communicator.errors import CommunicatorError


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
    """The reduction of every rank's tensor, in place, and the tensor. Collective over the group.

    group: the name() of the communicator. Raises ValueError for a tensor that needs a
    gradient: none would come through.
    """
    torch.ops.drumline.allreduce_(tensor, group, op)
    return tensor


def _allreduce(tensor: torch.Tensor, group: str, op: str) -> None:
    _groups.find(group).allreduce(tensor.detach(), op)


def _below_autograd(tensor: torch.Tensor, group: str, op: str) -> None:
    """Runs before the others wherever autograd may record, also while tracing."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"rank {_groups.find(group).rank}: compile.allreduce of "
            f"{tuple(tensor.shape)} {tensor.dtype} that needs a gradient. It is "
            "changed in place where autograd does not see it, so the gradient would be lost or "
            "wrong. Call the function under torch.no_grad(), pass "
            "tensor.detach(), or take torch.distributed's functional collectives on the backend "
            "'drumline' to differentiate."
        )
    torch.autograd.graph.increment_version(tensor)  # a gradient for which it was saved must fail
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.drumline.allreduce_(tensor, group, op)


def _fake_allreduce(tensor: torch.Tensor, group: str, op: str) -> None:
    """For the compiler, on tensors without data: shapes and strides stay as they are."""


_library: Any = torch.library.Library("drumline", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "allreduce_(Tensor(a!) tensor, str group, str op) -> ()", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("allreduce_", _allreduce, "CompositeExplicitAutograd")
_library.impl("allreduce_", _below_autograd, "Autograd")
torch.library.register_fake("drumline::allreduce_", _fake_allreduce, lib=_library)
