"""Collectives that run on a thread while the program goes on, and handles to wait for them.

handle = comm.start("allreduce", tensor)
handle.wait(timeout_s=5)
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from communicator.calls.async_work import NO_TIMEOUT, AsyncWork, WorkQueue
from communicator.errors import CommunicatorError
from communicator.interceptors.interceptor import KINDS, Call, Interceptor, Order

COLLECTIVES = tuple(name for name in KINDS if name not in ("send", "recv"))
OTHERS = ("send", "recv", "group", "decline")  # which wait for started calls too


class CallHandle:
    """A call that was started."""

    def __init__(self, work: AsyncWork, result: Callable[[], Any]) -> None:
        self._work, self._result, self._pid = work, result, os.getpid()

    def wait(self, timeout_s: float | None = None) -> Any:
        """The result of the call. Raises what it raised.

        timeout_s: CommunicatorTimeout after so long, and the call goes on. None: its own deadline.
        """
        if os.getpid() != self._pid:  # whose threads it would wait for, and take its messages
            raise CommunicatorError(
                f"process {os.getpid()} was forked from {self._pid}, which started this call and "
                "alone can wait for it."
            )
        limit = NO_TIMEOUT if timeout_s is None else timedelta(seconds=max(timeout_s, 1e-6))
        self._work.wait(limit)
        return self._result()

    def is_completed(self) -> bool:
        """True once wait() would return or raise at once."""
        return self._work.is_completed()


class BackgroundCalls(Interceptor):
    """The calls of a communicator that were started. Its other calls wait for them first.

    only_enqueues: on the caller's stream, which another thread does not have.
    """

    order, names = Order.JOIN, (*COLLECTIVES, *OTHERS)

    def __init__(self, only_enqueues: bool) -> None:
        self._queue = WorkQueue()
        self._take = self._queue.run if only_enqueues else self._queue.submit

    def start(
        self, call: str, method: Call | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallHandle:
        """Run the method of that name after those that were started before."""
        if call not in COLLECTIVES or method is None:
            raise ValueError(f"start({call!r}): only {', '.join(COLLECTIVES)} can be started")
        results: list[Any] = []
        is_inference, has_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> None:
            with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
                results.append(method(*args, **kwargs))

        return CallHandle(self._take(run, []), lambda: results[0])

    def around(self, name: str, call: Call) -> Call:
        @functools.wraps(call)
        def joined(*args: Any, **kwargs: Any) -> Any:
            self.join()
            return call(*args, **kwargs)

        return joined

    def join(self) -> None:
        """Return when all have ended; at once on the thread that runs them."""
        if not self._queue.is_current(threading.current_thread()):
            self._queue.join()

    def is_idle(self) -> bool:
        """True if all have ended."""
        return self._queue.is_idle()

    def at_end(self, closing: Callable[[], object]) -> None:
        """Call this once all have ended by themselves: they may wait for ranks that wait here.

        An error of it is a warning: nobody is left to raise it for.
        """

        def close() -> None:
            try:
                closing()
            except Exception as error:
                warnings.warn(str(error), RuntimeWarning, stacklevel=2)

        self._queue.submit(close, [])

    def close(self) -> None:
        """Return when all have ended."""
        self._queue.close()
