"""An allreduce that torch.compile sees through: one call in the generated code, in place, no copy.

group = compile.name(comm)
compiled = torch.compile(lambda x: compile.allreduce(x @ weight, group), fullgraph=True)

Outside of compiled functions call comm.allreduce: it never passes torch's dispatcher.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from communicator.base import Communicator
from communicator.errors import CommunicatorError


class _Groups:
    """Communicators by name, for the operator, which can be given no object. Forgets the dead."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._named: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()
        self._count = 0

    def name(self, comm: Communicator) -> str:
        with self._lock:
            known = next((name for name, other in self._named.items() if other is comm), None)
            if known is None:
                self._count += 1
                known = f"{comm.backend}-{self._count}"
                self._named[known] = comm
            return known

    def find(self, name: str) -> Communicator:
        found = self._named.get(name)
        if found is None:
            raise CommunicatorError(
                f"the communicator {name!r} that this function was compiled with is gone. Keep it "
                "for as long as the function, or compile again with a new one."
            )
        return found


_groups = _Groups()


def name(comm: Communicator) -> str:
    """What the communicator is called in compiled functions of this process. Not collective."""
    return _groups.name(comm)


def allreduce(tensor: torch.Tensor, group: str, op: str = "sum") -> torch.Tensor:
    """The reduction of every rank's tensor, in place, and the tensor. Collective over the group.

    group: what name() said of the communicator. Raises ValueError for a tensor that needs a
    gradient: none would come through.
    """
    torch.ops.drumline.allreduce_(tensor, group, op)
    return tensor


def _allreduce(tensor: torch.Tensor, group: str, op: str) -> None:
    _groups.find(group).allreduce(tensor.detach(), op)


def _below_autograd(tensor: torch.Tensor, group: str, op: str) -> None:
    """Runs above the others wherever autograd may be watching, while tracing too."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{_who(group)}: compile.allreduce of {tuple(tensor.shape)} {tensor.dtype} that needs "
            "a gradient. It is changed in place where autograd does not see it, so the gradient "
            "would be lost or wrong. Call the function under torch.no_grad(), pass "
            "tensor.detach(), or take torch.distributed's functional collectives on the backend "
            "'drumline' to differentiate."
        )
    torch.autograd.graph.increment_version(tensor)  # whoever saved it for a gradient must notice
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.drumline.allreduce_(tensor, group, op)


def _who(group: str) -> str:
    return f"rank {_groups.find(group).rank}"


def _nothing(tensor: torch.Tensor, group: str, op: str) -> None:
    """What the compiler runs on tensors without data: shapes and strides stay as they are."""


_library: Any = torch.library.Library("drumline", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "allreduce_(Tensor(a!) tensor, str group, str op) -> ()", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("allreduce_", _allreduce, "CompositeExplicitAutograd")
_library.impl("allreduce_", _below_autograd, "Autograd")
torch.library.register_fake("drumline::allreduce_", _nothing, lib=_library)
