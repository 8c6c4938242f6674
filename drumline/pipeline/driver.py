"""The master's end of the ring: sends the calls of its threads, and hands each its reply."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from drumline.core.pytree import Leaves, flatten
from drumline.errors import DrumlineError, PeerLost, StageError
from drumline.kv_cache.proxy import cache_number, prepare_next_token
from drumline.pipeline.deferred_calls import (
    CallsByThread,
    DeferredCalls,
    OutputUsage,
    SpecTable,
)
from drumline.pipeline.microbatch_runner import MicrobatchRunner
from drumline.pipeline.pass_hooks import PassContext
from drumline.stages.interrupt import DelayedInterrupt
from drumline.stages.messages import Message, MessageKind
from drumline.stages.program import NOTHING
from drumline.stages.ring import Ring

if TYPE_CHECKING:
    from drumline.stages.tp_stage import TpDriverRing

T = TypeVar("T")

MODEL_OPERATIONS = ("scale_weight", "use_attention")
"""Those on the model, which may be sent twice; all others are on a cache, whose number is their
first argument."""


class PipelineDriver:
    """One distributed model as its master sees it; safe to use from several threads."""

    def __init__(self, ring: Ring | TpDriverRing, device: torch.device):
        self.ring, self.device, self.specs = ring, device, SpecTable()
        self._programs: dict[tuple[Any, ...], tuple[int, tuple[int, ...]]] = {}  # number, slots
        self._program_numbers, self._cache_numbers = itertools.count(1), itertools.count(1)
        self._operations: deque[tuple[Any, ...]] = deque()
        self._send_lock, self._reply_arrived = threading.Lock(), threading.Condition()
        self._pending: deque[PendingReply] = deque()
        self._is_receiving = self._is_desynchronised = False
        self.microbatches = MicrobatchRunner()
        self.context = PassContext()
        # Not the method itself: a trace that follows it comes later.
        self.calls = CallsByThread(lambda c: self.exchange(c), OutputUsage(), self.context)
        self._failure: DrumlineError | None = None
        self.unread: set[str] = set()  # arguments that keep batches whole; each is warned of once
        self.uncroppable: set[int] = set()  # layers of a cache that their ranks cannot crop

    def record(self, name: str, *arguments: Any) -> None:
        """Note an operation, as on a cache: sent before the next call, after those gathered."""
        self.calls.unsent().flush(is_amid_pass=True)
        kept = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        self._operations.append((name, *kept))

    def forget(self, number: int) -> None:
        self._operations.append(("free", number))

    def next_cache(self) -> int:
        return next(self._cache_numbers)

    @property
    def lost(self) -> PeerLost | None:
        """The loss of a rank after which nothing can run, if there was one."""
        return self._failure if isinstance(self._failure, PeerLost) else None

    def exchange(self, calls: DeferredCalls) -> Message:
        """Send calls, and the cache operations that wait, round the ring; returns the reply."""
        try:
            with DelayedInterrupt():
                return self._exchange(calls)
        except BaseException as error:
            if not isinstance(error, DrumlineError):
                calls.invalidate_caches()  # what follows these layers will not get their tokens
            raise

    def _exchange(self, calls: DeferredCalls) -> Message:
        pending, leaves, runner = PendingReply(), Leaves(), None
        try:
            with self._send_lock:
                if self._failure is not None:
                    raise copy.copy(self._failure)  # whose traceback would grow each time
                if self._is_desynchronised:
                    self._resync()
                # Taken under the send lock, so that every rank applies them in the order of this
                # log, and before the calls that come in the same message.
                waiting = [self._operations.popleft() for _ in range(len(self._operations))]
                num_programs = len(self._programs)
                try:
                    message = self._message(calls, waiting, leaves)
                    # Messages have no numbers: the ring keeps their order, so the n-th reply is for
                    # the n-th call in this queue. It grows under the lock that orders the sends.
                    self._pending.append(pending)
                    layers = (layer for run in calls.runs for layer in run.layers)
                    runner = self.microbatches.release_turn(layers)
                    pending.reply = self._failing_all_threads(lambda: self.ring.send(message))
                except BaseException:
                    self._is_desynchronised = True  # it may not have been sent whole
                    self._give_up(waiting, num_programs)
                    raise
                if pending.reply is not None:
                    self._pending.remove(pending)
            for run in calls.runs:
                for cache in run.caches:  # while this token is on its way
                    prepare_next_token(cache)
            reply = self._answer(pending, calls)
        except BaseException as error:
            if not isinstance(error, DrumlineError):
                self._is_desynchronised = True  # whether it had come back is unknown
            raise
        finally:
            if runner is not None:
                self.microbatches.acquire_turn(runner)
        reply.tensors = reply.tensors[len(leaves.tensors) :]
        for tensor in reply.tensors:
            if tensor.is_cuda:  # another thread, on its own stream, may have received it
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return reply

    def _give_up(self, operations: list[tuple[Any, ...]], num_programs: int) -> None:
        """Forget a message that was not sent whole: its program, if new, and what it changes.

        Which ranks have it is unknown, so all are to let go of the caches that it names.
        """
        while len(self._programs) > num_programs:
            self._programs.popitem()
        freed = [op if op[0] in MODEL_OPERATIONS else ("free", op[1]) for op in operations]
        self._operations.extendleft(reversed(freed))

    def _message(
        self, calls: DeferredCalls, waiting: list[tuple[Any, ...]], leaves: Leaves
    ) -> Message:
        """The message for operations and deferred calls, with the text of their program if new."""
        spec = NOTHING
        if waiting:
            spec = flatten(waiting, leaves, lambda cache: cache_number(cache, self))
        operations = self.specs[spec]
        starts, ints, form = calls.form(leaves.ints)
        key = (operations, len(leaves.tensors), form)
        text = ""
        entry = self._programs.get(key)
        if entry is None:
            program = calls.program(operations.template, len(leaves.tensors), starts)
            entry = self._programs[key] = next(self._program_numbers), program.leaving(0)
            text = program.to_json()
        number, slots = entry
        tensors = leaves.tensors + calls.inputs.tensors
        return Message(MessageKind.CALL, number, ints, [tensors[slot] for slot in slots], text)

    def _answer(self, pending: PendingReply, calls: DeferredCalls) -> Message:
        with self._reply_arrived:
            while pending.reply is None:
                if self._is_receiving:
                    self._reply_arrived.wait()
                else:
                    self._receive_one()
        reply = pending.reply
        if reply.kind is MessageKind.CHANGED:
            for run in calls.runs:  # whose layers are to be asked again what they return
                self.specs.pop(run.spec.template, None)
        if reply.kind in (MessageKind.ERROR, MessageKind.CHANGED):
            calls.invalidate_caches()
            raise StageError(reply.note)
        return reply

    def _receive_one(self) -> None:
        """Receive the next reply, for whichever thread it is: replies come in the order of calls.

        One thread receives for all. The lock is free meanwhile, so that a thread goes on as soon as
        its reply is here, and the ranks work on several generations at once.
        """
        self._is_receiving = True
        self._reply_arrived.release()
        try:
            reply = self._failing_all_threads(self.ring.receive, Exception)
            if reply.kind is MessageKind.MARK:
                self._fail_pending()
            else:
                self._pending.popleft().reply = reply
        finally:
            self._reply_arrived.acquire()
            self._is_receiving = False
            self._reply_arrived.notify_all()

    # A MARK is passed on unchanged. When it has come round, so has the reply to every call before
    # it, so the queue is empty again whatever an interruption left in it.
    def _resync(self) -> None:
        """After an interruption: wait until all that was sent has come back, whosever it was."""
        reply = self._failing_all_threads(lambda: self.ring.send(Message(MessageKind.MARK)))
        with self._reply_arrived:
            if reply is not None:
                self._fail_pending()
            while self._is_desynchronised:
                self._reply_arrived.wait() if self._is_receiving else self._receive_one()

    def _fail_pending(self) -> None:
        for pending in self._pending:
            pending.reply = Message(
                MessageKind.ERROR, note="another thread's call was interrupted; repeat."
            )
        self._pending.clear()
        self._is_desynchronised = False

    def _failing_all_threads(
        self, work: Callable[[], T], errors: type[Exception] = DrumlineError
    ) -> T:
        """Use the ring. If that raises one of `errors`, so does every later use, on any thread."""
        try:
            if self._failure is not None:
                raise copy.copy(self._failure)
            return work()
        except errors as error:
            if self._failure is None:
                self._failure = error if isinstance(error, DrumlineError) else _cut_off(error)
                self.ring.close(self._failure)
            raise

    def leave(self, code: int = 0) -> None:
        """Release the other ranks. Every later use of the model is an error."""
        with DelayedInterrupt(), self._send_lock:
            if self._failure is None and self._is_desynchronised:
                with contextlib.suppress(DrumlineError):
                    self._resync()
            if self._failure is None:
                self._failure = DrumlineError(
                    f"rank {self.ring.rank}: the model was closed and its other ranks have left, "
                    "so it cannot run; load it again."
                )
                with self._reply_arrived:
                    while self._is_receiving:
                        self._reply_arrived.wait()
                    self.ring.leave(code)


def _cut_off(error: Exception) -> DrumlineError:
    return DrumlineError(
        f"rank 0: a reply of other ranks could not be received ({error!r}), so later ones would "
        "be taken for it; load the model again."
    )


class PendingReply:
    """The place of a thread in the queue for replies."""

    reply: Message | None = None
