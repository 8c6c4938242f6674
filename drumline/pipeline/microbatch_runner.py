"""Threads of the master that take turns at its own work and wait for the other ranks together.

While one waits for its hidden states to come round the ring, the next does the master's layers of
another group of rows: so every rank has work, and the master has no more than one thread's.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch


class Cancelled(BaseException):
    """Ends a runner whose result nobody waits for any longer."""


class MicrobatchRunner:
    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._current_thread = threading.local()

    def map(self, work: Callable[[Any], Any], items: Iterable[Any], until: Any = None) -> list[Any]:
        """work(item) for each; one begins when the one before has sent what it has.

        until: the layer whose call must have been sent, where that matters.
        """
        own_turn = self.release_turn()
        runners: list[MicrobatchThread] = []
        try:
            for item in items:
                runners.append(MicrobatchThread(self, work, item, until))
                runners[-1].start()
                runners[-1].has_left.wait()
            for runner in runners:
                runner.join()
        except BaseException:
            for runner in runners:
                runner.is_cancelled = True
            raise
        finally:
            if own_turn is not None:
                self.acquire_turn(own_turn)
        return [runner.future.result() for runner in runners]

    def release_turn(self, sends: Iterable[Any] = ()) -> MicrobatchThread | None:
        """Give the turn away before waiting, if this thread is one of those that take turns.

        sends: the layers that are called by what it waits for.
        """
        runner: MicrobatchThread | None = getattr(self._current_thread, "runner", None)
        if runner is None:
            return None
        if not runner.has_left.is_set() and runner.until not in (None, *sends):
            return None
        self.turn.release()
        runner.has_left.set()
        return runner

    def acquire_turn(self, runner: MicrobatchThread) -> None:
        self.turn.acquire()
        if runner.is_cancelled:
            raise Cancelled


class MicrobatchThread(threading.Thread):
    """One item's work, in the circumstances of the thread that wants it."""

    def __init__(
        self, microbatches: MicrobatchRunner, work: Callable[[Any], Any], item: Any, until: Any
    ):
        super().__init__(name="drumline-microbatch", daemon=True)
        self.until = until
        self.microbatches, self.has_left, self.is_cancelled = microbatches, threading.Event(), False
        self.future: Future[Any] = Future()
        num_threads, context = torch.get_num_threads(), contextvars.copy_context()
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream() if has_cuda else None

        def begin() -> None:
            torch.set_num_threads(num_threads)  # OpenMP asks each thread anew
            with (
                torch.inference_mode(inference),
                torch.set_grad_enabled(grad),
                torch.cuda.stream(stream) if stream else contextlib.nullcontext(),
            ):
                self.future.set_result(context.run(work, item))

        self.begin = begin

    def run(self) -> None:
        self.microbatches._current_thread.runner = self
        try:
            self.microbatches.acquire_turn(self)
            self.begin()
        except BaseException as error:
            self.future.set_exception(error)
        finally:
            del self.begin  # a cycle of references would keep its cache until it is collected
            self.microbatches.turn.release()
            self.has_left.set()
