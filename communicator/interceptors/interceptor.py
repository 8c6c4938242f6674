"""An interceptor: the base of what this package has."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from enum import IntEnum, auto
from typing import Any, ClassVar, Protocol

Call = Callable[..., Any]

KINDS = dict.fromkeys(
    (
        "allreduce",
        "broadcast",
        "reduce",
        "allgather",
        "reduce_scatter",
        "alltoall",
        "gather",
        "scatter",
        "send",
        "recv",
    ),
    "move",
) | {"barrier": "wait"}
"""The calls that are recorded, and as what; see Recorder.span."""
CALLS = (*KINDS, "decline", "group")
"""The methods of a communicator that interceptors stand before."""


class Order(IntEnum):
    """The order in which they are done, the outermost first."""

    REFUSE = auto()
    JOIN = auto()
    COMPARE = auto()
    COUNT = auto()
    TRACE = auto()


class Intercepted(Protocol):
    """A communicator, as its interceptors know it."""

    def _intercept(self, interceptor: Interceptor) -> None:
        """Do it around calls from now on, until its remove()."""
        ...

    def _uninstall(self, interceptor: Interceptor) -> None:
        """Do it no longer; nothing if it is not there."""
        ...


class Interceptor:
    """Something done around calls of one communicator. It keeps no communicator alive."""

    order: ClassVar[Order]
    names: Collection[str] = CALLS  # of the methods around which it is done

    def around(self, name: str, call: Call) -> Call:
        """The call of that name with this around it."""
        raise NotImplementedError

    _owner: Callable[[], Intercepted | None] = staticmethod(lambda: None)

    def install(self, comm: Intercepted) -> None:
        """Do it around calls of this communicator from now on."""
        self._owner = weakref.ref(comm)
        comm._intercept(self)

    def remove(self) -> None:
        """Stand before no call any more, and leave the other interceptors."""
        if (comm := self._owner()) is not None:
            comm._uninstall(self)


class Refusal(Interceptor):
    """Raises in place of every call."""

    order = Order.REFUSE

    def __init__(self, error: Exception) -> None:
        self._error = error

    def around(self, name: str, call: Call) -> Call:
        @functools.wraps(call)
        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise self._error

        return refuse
