"""Calls in the trace of a launch, and in the counts of a viewer while it looks."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from typing import Any

from communicator.interceptors.interceptor import KINDS, Call, InterceptedCalls, Interceptor, Order
from launcher import Recorder


class Trace(Interceptor):
    """Records every call. owner: the class whose methods name the parameters.

    Not the call of that name which it may be made of: allgather(dim=), say.
    """

    order, names = Order.TRACE, KINDS

    def __init__(self, recorder: Recorder, owner: type, **extra_args: Any) -> None:
        self._recorder, self._owner_class, self._extra_args = recorder, owner, extra_args

    def around(self, name: str, call: Call) -> Call:
        parameters = list(inspect.signature(getattr(self._owner_class, name)).parameters)[1:]
        record = self._recorder.recorded(call, parameters, name, KINDS[name], self._extra_args)
        of_thread = threading.local()

        @functools.wraps(call)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if vars(of_thread):
                return call(*args, **kwargs)
            of_thread.is_inside = True
            try:
                return record(*args, **kwargs)
            finally:
                del of_thread.is_inside

        return recorded


class Count(Trace):
    """A trace for a viewer alone, while it looks."""

    order = Order.COUNT


class Observation:
    """A communicator as LiveCalls observes it: counted while a viewer looks."""

    def __init__(self, comm: InterceptedCalls, **extra_args: Any) -> None:
        self.target, self._extra_args = weakref.ref(comm), extra_args
        self._count: Count | None = None

    def watch(self, recorder: Recorder) -> None:
        if (comm := self.target()) is not None:
            self._count = Count(recorder, type(comm), **self._extra_args)
            self._count.install(comm)

    def unwatch(self) -> None:
        if self._count is not None:
            self._count.remove()
            self._count = None
