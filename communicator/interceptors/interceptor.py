"""An interceptor: the base of what this package has."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from enum import IntEnum, auto
from typing import Any, ClassVar

Call = Callable[..., Any]

MOVES = (
    "allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall", "gather",
    "scatter", "send", "recv",
)  # fmt: skip
KINDS = dict.fromkeys(MOVES, "move") | {"barrier": "wait"}
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


class Interceptor:
    """Something done around calls of one communicator. It keeps no communicator alive."""

    order: ClassVar[Order]
    names: Collection[str] = CALLS  # of the methods around which it is done

    def around(self, name: str, call: Call) -> Call:
        """The call of that name with this around it."""
        raise NotImplementedError

    _owner: Callable[[], InterceptedCalls | None] = staticmethod(lambda: None)

    def install(self, comm: InterceptedCalls) -> None:
        """Do it around calls of this communicator from now on."""
        self._owner = weakref.ref(comm)
        comm._rebind(added=(self,))

    def remove(self) -> None:
        """Stand before no call any longer, and leave the other interceptors."""
        if (comm := self._owner()) is not None:
            comm._rebind(removed=self)


class InterceptedCalls:
    """The base of a class before whose methods, those in CALLS, interceptors may stand."""

    _interceptors: tuple[Interceptor, ...] = ()

    def _start_binding(self, straight: Mapping[str, Call]) -> None:
        """Bind the calls. straight: functions that do what the method of that name does."""
        self._straight, self._binding = straight, threading.RLock()
        self._bind()

    def _rebind(
        self, added: tuple[Interceptor, ...] = (), removed: Interceptor | None = None
    ) -> None:
        """Do something more around calls, or something no longer."""
        with self._binding:
            kept = (one for one in self._interceptors if one is not removed)
            self._interceptors = (*kept, *added)
            self._bind()

    def _refuse_all(self, error: Exception) -> None:
        """In a forked child: raise the error in place of every call."""
        self._binding = threading.RLock()  # which a thread of the parent may have held
        Refusal(error).install(self)

    def _bind(self) -> None:
        """Bind each call to what it goes through: interceptors, then C where nothing is before it.

        The only place where a method of an object is set. So `comm.allreduce` is the C function
        itself, or the method of its class, or what an interceptor has made of either.
        """
        outermost_last = sorted(self._interceptors, key=lambda one: one.order, reverse=True)
        for name in CALLS:
            call = self._straight.get(name)
            for interceptor in outermost_last:
                if name in interceptor.names:
                    own = getattr(type(self), name).__get__(self)
                    call = interceptor.around(name, call or own)
            if call is not None:
                self.__dict__[name] = call
            else:
                self.__dict__.pop(name, None)


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
