"""Calls that run in the background, and the objects to wait for them.

queue = WorkQueue()
work = queue.submit(lambda: comm.allreduce(tensor), [tensor])
work.wait()
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Queue
from typing import Any, NoReturn

import torch
from torch.distributed import Work
from torch.futures import Future

from communicator.errors import CommunicatorTimeout

NO_TIMEOUT = timedelta(0)


class AsyncWork(Work):
    """The Work that torch.distributed returns for a call: wait() raises what the call raised."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._result = result
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._end_future: Future[None] | None = None  # created, with the other, on request
        self._future: Future[list[torch.Tensor]] | None = None

    def run(self, call: Callable[[], object]) -> AsyncWork:
        """Run the call on this thread."""
        try:
            call()
        except Exception as error:
            self.end(error)
        else:
            self.end()
        return self

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        with self._lock:
            self._ended.set()
            waiting = self._end_future  # get_future() completes any later one
        if waiting is not None:
            with torch.inference_mode(False):  # callbacks run in a mode of their own
                waiting.set_result(None)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """True once the result is there. timeout 0: the deadline of the call itself."""
        if not self._ended.wait(timeout.total_seconds() or None):
            raise_timeout(timeout.total_seconds())
        self._result_or_raise()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._result

    def get_future(self) -> Future[list[torch.Tensor]]:
        """A future of the result. If the call fails it raises a RuntimeError with the call's text.

        It is one that then() makes, and so fails in C++ too. set_exception() would leave the
        exception as a value, which DDP's reducer takes for tensors.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            self._end_future = Future()
            self._future = self._end_future.then(self._result_or_raise)
            has_ended = self._ended.is_set()
        if has_ended:
            self._end_future.set_result(None)
        return self._future

    def _result_or_raise(self, _: object = None) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result


def raise_timeout(timeout_s: float) -> NoReturn:
    raise CommunicatorTimeout(
        f"timed out after {timeout_s:g} s of waiting for a call that still runs. Give wait() more "
        "time, or none."
    )


class WorkQueue:
    """A thread that runs one call after another, in the order in which they were submitted."""

    def __init__(self) -> None:
        self._calls: Queue[Callable[[], object] | None] = Queue()
        self._lock, self._is_closed = threading.Lock(), False
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], object], result: list[torch.Tensor]) -> AsyncWork:
        """Run the call on this thread, whatever is before it."""
        return AsyncWork(result).run(call)

    def submit(self, call: Callable[[], object], result: list[torch.Tensor]) -> AsyncWork:
        """Run the call after those before it, and return at once.

        One that is submitted when another ends (Future.then) runs here, and so comes next on all
        ranks if each asked for that end before it made any further call. After close() all do.
        """
        handle = AsyncWork(result)
        if threading.current_thread() is self._thread:
            with torch.inference_mode():  # as the calls it serves, which end() has left
                return handle.run(call)
        with self._lock:
            if not self._is_closed:
                self._calls.put(lambda: handle.run(call))
                if self._thread is None:
                    self._thread = threading.Thread(target=_serve, args=(self._calls,), daemon=True)
                    self._thread.start()
                return handle
        return handle.run(call)

    def run_or_submit(self, call: Callable[[], object], result: list[torch.Tensor]) -> AsyncWork:
        """Run the call on this thread if none is before it: no thread need wake. Or submit it."""
        return self.run(call, result) if self.is_idle() else self.submit(call, result)

    def is_idle(self) -> bool:
        """True if all calls that were submitted have ended."""
        return not self._calls.unfinished_tasks

    def is_current(self, thread: threading.Thread) -> bool:
        """True for the thread of this queue."""
        return thread is self._thread

    def join(self) -> None:
        """Return when all calls that were submitted have ended."""
        self._calls.join()

    def close(self, is_waiting: bool = True) -> None:
        """Return when all calls have ended, or let them: so always on the thread that runs them."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            thread = self._thread
            if thread is not None and not was_closed:
                self._calls.put(None)
        if thread is not None and is_waiting and not self.is_current(threading.current_thread()):
            thread.join()


@torch.inference_mode()  # so that it may write to any tensor, as a caller in that mode could
def _serve(calls: Queue[Any]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # with the tensors that it holds
        calls.task_done()
    calls.task_done()  # of the None, so that join() returns after close() too
